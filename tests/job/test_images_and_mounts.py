"""The options for each container runtime, and missing files that are found before submission."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support import only, refused

from fp8launch.cluster.images import catalogue, image_for
from fp8launch.cluster.profile import Cluster
from fp8launch.job.build_job import plan
from fp8launch.job.job import Job, Mount
from fp8launch.job.prepared import prepare

Write = Callable[[str, str], str]


@pytest.mark.parametrize(
    ("name", "pyxis", "apptainer"),
    [
        ("nvcr.io/nvidia/nemo:26.04", "nvcr.io#nvidia/nemo:26.04", "docker://nvcr.io/nvidia/nemo:26.04"),
        ("docker://nvcr.io/nvidia/nemo:26.04", "nvcr.io#nvidia/nemo:26.04", "docker://nvcr.io/nvidia/nemo:26.04"),
        ("nvcr.io#nvidia/nemo:26.04", "nvcr.io#nvidia/nemo:26.04", "docker://nvcr.io/nvidia/nemo:26.04"),
        ("docker://nvcr.io#a/b:1", "nvcr.io#a/b:1", "docker://nvcr.io/a/b:1"),
        ("ubuntu:24.04", "ubuntu:24.04", "docker://ubuntu:24.04"),
        ("pytorch/pytorch:2.9", "pytorch/pytorch:2.9", "docker://pytorch/pytorch:2.9"),
        ("localhost:5000/mine:1", "localhost:5000#mine:1", "docker://localhost:5000/mine:1"),
        ("localhost/mine:1", "localhost#mine:1", "docker://localhost/mine:1"),
        ("registry.site:5000/a/b", "registry.site:5000#a/b", "docker://registry.site:5000/a/b"),
        ("nvcr.io/a/b@sha256:12", "nvcr.io#a/b@sha256:12", "docker://nvcr.io/a/b@sha256:12"),
        ("nemo-26.04", "nvcr.io#nvidia/nemo:26.04", "docker://nvcr.io/nvidia/nemo:26.04"),
    ],
)
def test_registry_images(name: str, pyxis: str, apptainer: str) -> None:
    assert image_for(name, "pyxis", Cluster(), "w") == pyxis
    assert image_for(name, "apptainer", Cluster(), "w") == apptainer


@pytest.mark.parametrize("uri", ["oras://site/a:1", "library://a/b:1"])
def test_other_sources_of_apptainer_stay_as_they_are(uri: str) -> None:
    assert image_for(uri, "apptainer", Cluster(), "w") == uri


def test_a_docker_daemon_is_no_registry() -> None:
    assert image_for("dockerd://mine:1", "pyxis", Cluster(), "w") == "dockerd://mine:1"


@pytest.mark.parametrize("runtime", ["pyxis", "apptainer", "charliecloud"])
@pytest.mark.parametrize("name", ["x.sqsh", "./x.sqsh", "sub/../x.sqsh", "~/x.sqsh"])
def test_a_file_is_given_by_its_absolute_path(
    home: Path, monkeypatch: pytest.MonkeyPatch, name: str, runtime: str
) -> None:
    (home / "sub").mkdir()
    (home / "x.sqsh").touch()
    monkeypatch.chdir(home)
    found = Path(image_for(name, runtime, Cluster(), "w"))
    assert found.is_absolute()
    assert found.samefile(home / "x.sqsh")


def test_a_missing_file_is_reported_before_submission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    problem = only(refused(image_for, "x.sqsh", "pyxis", Cluster(), "r.yaml:7", exit_code=3))
    assert (problem.code, problem.where) == ("image-missing", "r.yaml:7")
    assert str(tmp_path / "x.sqsh") in problem.message
    assert image_for("x.sqsh", "pyxis", Cluster(), "w", must_exist=False) == str(tmp_path / "x.sqsh")


def test_the_site_has_its_own_copies(tmp_path: Path) -> None:
    (tmp_path / "n.sqsh").touch()
    cluster = Cluster(images={"nemo-26.04": str(tmp_path / "n.sqsh"), "mine": "site.io/mine:1"})
    assert image_for("nemo-26.04", "charliecloud", cluster, "w") == str(tmp_path / "n.sqsh")
    assert image_for("mine", "pyxis", cluster, "w") == "site.io#mine:1"


@pytest.mark.parametrize(("name", "near"), [("nemo-26.4", "nemo"), ("mien", "mine"), ("zzz", "known names")])
def test_an_unknown_name_is_answered_with_the_nearest(name: str, near: str) -> None:
    problem = only(refused(image_for, name, "pyxis", Cluster(images={"mine": "a/b"}), "r.yaml:3"))
    assert (problem.code, problem.where) == ("unknown-image", "r.yaml:3")
    assert near in str(problem.fix)


def test_charliecloud_needs_a_file_or_a_folder(tmp_path: Path) -> None:
    assert only(refused(image_for, "nvcr.io/a/b:1", "charliecloud", Cluster(), "w")).code == "image-not-local"
    assert image_for(str(tmp_path), "charliecloud", Cluster(), "w") == str(tmp_path)


def test_nobodys_home(tmp_path: Path) -> None:
    assert only(refused(image_for, "~no-such-user-here/x.sqsh", "pyxis", Cluster(), "w")).code == "no-such-home"


def test_the_catalogue_says_where_each_image_comes_from() -> None:
    assert catalogue()
    for entry in catalogue().values():
        assert entry["uri"]
        assert str(entry["source"]).startswith("https://")


# --- mounts -----------------------------------------------------------------------------------------------------------


def planned(write: Write, mounts: str, cluster: Cluster | None = None, check: bool = True) -> Job:
    one = prepare(write("r.yaml", f"name: r\ncontainer:\n  image: a/b\n  mounts: {mounts}\n"))
    cluster = cluster or Cluster()
    return plan(one, cluster, Path("/r"), runtime=cluster.runtime or "pyxis", check_paths=check)


def test_mounts_of_cluster_and_recipe(write: Write, tmp_path: Path, home: Path) -> None:
    job = planned(write, f"['{tmp_path}', '{tmp_path}:/data:ro', '~:/home', '/tmp:/t:rw']", Cluster(mounts=["/usr:/u"]))
    assert job.container is not None
    assert job.container.mounts == (
        Mount("/usr", "/u"),
        Mount(str(tmp_path), str(tmp_path)),
        Mount(str(tmp_path), "/data", read_only=True),
        Mount(str(home), "/home"),
        Mount("/tmp", "/t"),
    )


@pytest.mark.parametrize("mount", ["a", "a:/b", "/tmp:b", "/tmp:/b:rx", "/tmp:/b:ro:x", "/a,b:/c", "", ":", ":/a"])
def test_a_mount_that_cannot_be_read(write: Write, mount: str) -> None:
    problem = only(refused(planned, write, f"['/tmp', '{mount}']"))
    assert problem.code == "bad-mount"
    assert str(problem.where).endswith("r.yaml:4")


def test_a_missing_source_is_reported_before_submission(write: Write) -> None:
    problem = only(refused(planned, write, "[/no/such/folder]", exit_code=3))
    assert problem.code == "mount-missing"
    planned(write, "[/no/such/folder]", check=False)


def test_a_read_only_mount_where_the_runtime_has_none(write: Write, tmp_path: Path) -> None:
    """ch-run would mount it so that the run may write there."""
    image = tmp_path / "image"
    image.mkdir()
    for texts, profile in (([f"{tmp_path}:/data:ro"], []), ([], [f"{tmp_path}:/data:ro"])):
        cluster = Cluster(runtime="charliecloud", images={"a/b": str(image)}, mounts=profile)
        problem = only(refused(planned, write, str(texts), cluster))
        assert (problem.code, problem.severity) == ("mount-read-only", "error")
        assert f"{tmp_path}:/data:ro" in problem.message and problem.where and problem.fix


def test_all_wrong_mounts_come_at_once(write: Write) -> None:
    problems = refused(planned, write, "[/no/such/folder, relative]", Cluster(mounts=["also relative"]))
    assert [p.code for p in problems] == ["bad-mount", "mount-missing", "bad-mount"]
    assert problems[0].where == "cluster profile: mounts"


def test_no_runtime_no_container(write: Write) -> None:
    one = prepare(write("r.yaml", "name: r\ncontainer: {image: nowhere-at-all, mounts: [/no/such]}\n"))
    assert plan(one, Cluster(), Path("/r"), runtime="none").container is None


def test_a_training_script_of_this_machine_must_be_there(write: Write, tmp_path: Path) -> None:
    script = write("train.py", "")
    one = prepare(write("r.yaml", f"name: r\nlaunch:\n  script: {script}\n"))
    assert plan(one, Cluster(), Path("/r")).entry.script == script
    one = prepare(write("r.yaml", "name: r\nlaunch:\n  script: /no/such.py\n"))
    problem = only(refused(plan, one, Cluster(), Path("/r")))
    assert (problem.code, problem.where) == ("script-missing", f"{tmp_path}/r.yaml:3")


def test_in_a_container_python_and_script_are_the_images(write: Write) -> None:
    text = "name: r\ncontainer: {image: a/b}\nlaunch: {script: /opt/Megatron-LM/pretrain_gpt.py}\n"
    one = prepare(write("r.yaml", text))
    job = plan(one, Cluster(python="/host/python"), Path("/r"), runtime="pyxis")
    assert (job.python, job.entry.script) == ("python3", "/opt/Megatron-LM/pretrain_gpt.py")

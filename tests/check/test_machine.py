"""What this machine lacks for a run: a place for run folders, an image, mounts, secrets, software that fits."""

from __future__ import annotations

import importlib.metadata
import os
import re
import venv
from pathlib import Path

import pytest
from support_site import codes, ready

from fp8launch import schedulers
from fp8launch.check import login_node
from fp8launch.cluster.images import catalogue, software_in
from fp8launch.cluster.profile import Cluster
from fp8launch.diagnostics import Problem
from fp8launch.schedulers.base import Scheduler

BOX = "container: {image: nemo-26.04}\n"
# What the catalogue's image has, by its own entry.
FITS = 'software: {megatron: "0.17"}\n'


def look(
    tmp_path: Path,
    text: str = "",
    environment: dict[str, str] | None = None,
    scheduler: Scheduler | None = None,
    **profile: object,
) -> list[Problem]:
    settings = {"run_root": str(tmp_path / "runs"), "runtime": "pyxis", **profile}
    cluster = Cluster.model_validate(settings)
    prepared = ready(tmp_path, text)
    shell = os.environ if environment is None else environment
    return list(login_node.inspect_run(prepared, cluster, shell, scheduler).problems)


def only(problems: list[Problem]) -> Problem:
    assert len(problems) == 1, problems
    return problems[0]


def test_a_good_machine(tmp_path: Path) -> None:
    assert look(tmp_path) == []
    assert look(tmp_path, BOX + FITS) == []
    assert not (tmp_path / "runs").exists(), "checking makes nothing"


def test_a_run_root_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    problem = only(look(tmp_path, run_root=f"{tmp_path}/file/runs"))
    assert (problem.code, problem.severity, problem.where) == ("run-root", "error", "run root")
    assert "is not a folder" in problem.message


def test_a_run_root_without_space(tmp_path: Path) -> None:
    """/proc, /sys and the like have none."""
    found = [p for p in ("/dev/fd", "/proc") if os.statvfs(p).f_bavail == 0 and os.access(p, os.W_OK)]
    if not found:
        pytest.skip("no file system without space here that this user may write")
    assert "run-root-full" in codes(look(tmp_path, run_root=found[0]))


def test_a_run_root_that_the_profile_does_not_call_shared(tmp_path: Path) -> None:
    problem = only(look(tmp_path, partition="gpu", shared_folders=["/project", "/home"]))
    assert (problem.code, problem.severity) == ("run-root-not-shared", "error")
    assert "/project, /home" in problem.message
    assert look(tmp_path, partition="gpu", shared_folders=["/project", str(tmp_path)]) == []


def test_an_image_file_that_is_not_there(tmp_path: Path) -> None:
    image = tmp_path / "nemo.sqsh"
    text = f"container: {{image: {image}}}\n"
    problem = only(look(tmp_path, text))
    assert (problem.code, problem.where) == ("image-missing", f"{tmp_path}/recipe.yaml:2")
    image.write_bytes(b"hsqs")
    assert look(tmp_path, text) == []
    image.unlink()
    # The catalogue's name, where the profile says that the site has a copy.
    assert codes(look(tmp_path, BOX + FITS, images={"nemo-26.04": str(image)})) == ["image-missing"]


def test_a_misspelt_image(tmp_path: Path) -> None:
    problem = only(look(tmp_path, "container: {image: nemo-26.4}\n"))
    assert problem.code == "unknown-image" and "nemo-26.04" in (problem.fix or "")


def test_mounts_are_all_looked_at(tmp_path: Path) -> None:
    text = f"{FITS}container:\n  image: nemo-26.04\n  mounts:\n  - {tmp_path}:/here\n  - {tmp_path}/gone:/there\n"
    problems = look(tmp_path, text, mounts=["/nowhere/at/all"])
    assert [(p.code, p.where) for p in problems] == [
        ("mount-missing", "cluster profile: mounts"),
        ("mount-missing", f"{tmp_path}/recipe.yaml:7"),
    ]
    # Without a container nothing is mounted.
    assert look(tmp_path, text, runtime="none") == []


def test_a_mount_that_does_not_parse(tmp_path: Path) -> None:
    assert codes(look(tmp_path, f"{FITS}container: {{image: nemo-26.04, mounts: ['relative:/x']}}\n")) == ["bad-mount"]


def test_an_image_and_the_arguments_are_of_two_megatrons(tmp_path: Path) -> None:
    assert look(tmp_path, BOX) == [], "what is not said comes from the image"
    stated = 'software:\n  megatron: "0.18"\n'
    problem = only(look(tmp_path, BOX + stated))
    assert (problem.code, problem.severity) == ("image-software", "warning")
    assert problem.where == f"{tmp_path}/recipe.yaml:4" and "0.17.0" in problem.message
    # The same image by its URI, in the words of each runtime.
    for uri in ("nvcr.io/nvidia/nemo:26.04", "docker://nvcr.io/nvidia/nemo:26.04", "nvcr.io#nvidia/nemo:26.04"):
        assert codes(look(tmp_path, f"container: {{image: '{uri}'}}\n{stated}")) == ["image-software"]
    assert look(tmp_path, "container: {image: my.registry/own:1}\n" + stated) == []


def test_software_that_is_newer_than_the_image(tmp_path: Path) -> None:
    base = BOX + 'software: {megatron: "0.17", '
    for section, label in (('transformer_engine: "2.20"}\n', "Transformer Engine 2.20"), ('cuda: "13.2"}\n', "CUDA")):
        problem = only(look(tmp_path, base + section))
        assert problem.code == "image-software" and label in problem.message
    assert look(tmp_path, base + 'transformer_engine: "2.9", cuda: "13.0"}\n') == []


def test_the_catalogue_states_versions_with_their_source() -> None:
    for name, entry in catalogue().items():
        known = software_in(name)
        assert all(isinstance(version, str) for version in known.values())
        assert not known or entry["versions_from"].startswith("https://")
        # Without a table of versions, the entry names the document that names the tag.
        assert known or entry["named_in"].startswith("https://")
    assert software_in("nemo-26.04")["transformer_engine"] == "2.14"
    assert software_in(None) == {}


def test_a_secret_that_is_not_set(tmp_path: Path) -> None:
    problem = only(look(tmp_path, "secrets: [HF_TOKEN]\n", environment={}))
    assert (problem.code, problem.where) == ("secret-missing", f"{tmp_path}/recipe.yaml:2")
    assert look(tmp_path, "secrets: [HF_TOKEN]\n", environment={"HF_TOKEN": "hush"}) == []


def test_a_python_that_is_not_there(tmp_path: Path) -> None:
    assert codes(look(tmp_path, python="/no/such/python")) == ["python-missing"]
    assert codes(look(tmp_path, "launch: {python: /no/such/python}\n")) == ["python-missing"]
    # In a container it is the container's.
    assert look(tmp_path, BOX + FITS + "launch: {python: /no/such/python}\n") == []


def test_a_python_without_the_packages_of_a_run_on_this_machine(tmp_path: Path) -> None:
    venv.create(tmp_path / "env", symlinks=True)
    bare = tmp_path / "env/bin/python"
    local = schedulers.by_name("local")
    where = f"{tmp_path}/recipe.yaml:2"
    problem = only(look(tmp_path, f"launch: {{python: {bare}}}\n", scheduler=local))
    assert (problem.code, problem.severity, problem.where) == ("python-packages", "error", where)
    assert f"{bare} has no torch and no megatron-core" in problem.message
    # Without ranges, pip takes the newest torch, and on Python 3.11 a Megatron without training code.
    tested = r"-m pip install 'torch[<>=0-9.,]+' 'megatron-core[<>=0-9.,]+', with Python 3\.12 or newer"
    assert re.search(tested, problem.fix or ""), problem.fix
    assert only(look(tmp_path, python=str(bare), scheduler=local)).where == "cluster profile: python"
    # What a site's Python prints at its start may be in any encoding.
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.stderr.buffer.write(b'caf\\xe9')")
    site = f"launch: {{python: {bare}}}\nenv: {{PYTHONPATH: {tmp_path}}}\n"
    assert codes(look(tmp_path, site, scheduler=local)) == ["python-packages"]
    # So do settings that need another package.
    muon = look(tmp_path, f"launch: {{python: {bare}}}\nmegatron: {{optimizer: dist_muon}}\n", scheduler=local)
    assert any("imports emerging_optimizers" in problem.message for problem in muon)
    # A script may bring its Megatron; the variables of the job may bring everything.
    script = tmp_path / "train.py"
    script.write_text("")
    problem = only(look(tmp_path, f"launch: {{python: {bare}, script: {script}}}\n", scheduler=local))
    assert "has no torch," in problem.message
    for name in ("torch", "megatron/core"):
        (tmp_path / "site" / name).mkdir(parents=True)
    assert look(tmp_path, f"launch: {{python: {bare}}}\nenv: {{PYTHONPATH: {tmp_path}/site}}\n", scheduler=local) == []
    # What is set up in the job cannot be known here, nor what Python there is on a cluster's nodes.
    assert look(tmp_path, python=str(bare), setup=["module load pytorch"], scheduler=local) == []
    assert look(tmp_path, f"launch: {{python: {bare}}}\n") == []
    # A script under the name of a Python is not run.
    script.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    script.chmod(0o755)
    assert look(tmp_path, f"launch: {{python: {script}}}\n", scheduler=local) == []
    assert not (tmp_path / "ran").exists()


def test_missing_packages_of_an_uninstalled_fp8launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(name: str) -> list[str]:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.requires", unknown)
    venv.create(tmp_path / "env", symlinks=True)
    problem = only(look(tmp_path, python=f"{tmp_path}/env/bin/python", scheduler=schedulers.by_name("local")))
    assert "-m pip install torch megatron-core, with Python" in (problem.fix or "")


def test_a_training_script_that_is_not_there(tmp_path: Path) -> None:
    assert codes(look(tmp_path, f"launch: {{script: {tmp_path}/train.py}}\n")) == ["script-missing"]

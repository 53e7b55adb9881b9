"""Cluster profiles: where they are found, what is refused in them, and what they change in a job."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support import only, refused

from fp8launch.cluster.profile import Cluster, cluster_files, load_cluster
from fp8launch.job.build_job import plan
from fp8launch.job.prepared import prepare
from fp8launch.resources import pack_folder
from fp8launch.rundir.registry import run_root
from fp8launch.schedulers import probe_runtime
from fp8launch.schedulers.slurm.options import sbatch_options

Write = Callable[[str, str], str]


def profile(home: Path, name: str, text: str) -> Path:
    file = home / ".config/fp8launch/clusters" / f"{name}.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def options(
    cluster: Cluster, *overrides: str, recipe: str = "llama8b_fp8", folder: str = "/r"
) -> dict[str, str | None]:
    one = prepare(recipe, overrides)
    return sbatch_options(plan(one, cluster, Path(folder), runtime="none"))


def test_without_a_profile_nothing_is_asked_for(home: Path) -> None:
    assert load_cluster(None) == Cluster()
    assert cluster_files() == {}


def test_default_is_taken_when_nothing_is_named(home: Path) -> None:
    profile(home, "default", "partition: gpu\n")
    profile(home, "other", "partition: cpu\n")
    assert (load_cluster(None).partition, load_cluster(None).name) == ("gpu", "default")
    assert load_cluster("other").partition == "cpu"


def test_a_name_in_the_file_wins_over_the_files(home: Path) -> None:
    profile(home, "a", "name: big\n")
    assert load_cluster("a").name == "big"


def test_profiles_lie_in_the_configuration_folder(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    profile(home, "a", "partition: x\n")
    other = tmp_path / "etc"
    (other / "fp8launch/clusters").mkdir(parents=True)
    (other / "fp8launch/clusters/b.yaml").write_text("partition: y\n")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(other))
    assert list(cluster_files()) == ["b"]
    assert load_cluster("b").partition == "y"


def test_a_file_can_be_named(home: Path, write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write("mine.yaml", "partition: z\n")
    assert load_cluster(file).partition == "z"
    monkeypatch.chdir(tmp_path)
    assert load_cluster("mine.yaml").partition == "z"


def test_an_unknown_name_is_answered_with_the_nearest(home: Path) -> None:
    profile(home, "juwels", "{}")
    problem = only(refused(load_cluster, "juwles"))
    assert (problem.code, problem.fix) == ("unknown-cluster", "did you mean 'juwels'?")
    assert "juwels" in problem.message


@pytest.mark.parametrize("name", ["none.yaml", "no/such", "", "\0", "a" * 5000])
def test_a_profile_that_is_not_there(home: Path, name: str) -> None:
    only(refused(load_cluster, name))


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ('partition: "a\\nwhoami"', "partition"),
        ('partition: "a\\n"', "partition"),
        ("partition: a b", "partition"),
        ("partition: 'a\"b'", "partition"),
        ("account: ''", "account"),
        ("qos: [a]", "qos"),
        ('constraint: "a\\t"', "constraint"),
        ("memory: 0", "memory"),
        ("segment: 0", "segment"),
        ("exclusive: 1", "exclusive"),
        ("gpus: gpus-per-task", "gpus"),
        ("runtime: docker", "runtime"),
        ("launch: mpirun", "launch"),
        ('options: {comment: "a\\n#SBATCH --wrap=x"}', "options.comment"),
        ("options: {comment: 'a\\b'}", "options.comment"),
        ('options: {"a=b\\nx": 1}', "options.a=b\nx"),
        ("options: {--nice: 1}", "options.--nice"),
        ("options: {Nice: 1}", "options.Nice"),
        ("env: {A: true}", "env.A"),
        ("env: {A: null}", "env.A"),
        ("rehearse: {from_gpu_hours: -1}", "rehearse.from_gpu_hours"),
        ("rehearse: {from_gpu_hours: all}", "rehearse.from_gpu_hours"),
        ("setup: module load x", "setup"),
        ("images: [a]", "images"),
    ],
)
def test_a_wrong_value_in_a_profile(home: Path, write: Write, text: str, field: str) -> None:
    file = write("c.yaml", f"name: c\n{text}\n")
    problem = only(refused(load_cluster, file))
    assert (problem.code, problem.where) == ("bad-value", f"{file}:2")
    assert f"'{field}' must be " in problem.message


def test_an_unknown_key_in_a_profile(write: Write) -> None:
    problem = only(refused(load_cluster, write("c.yaml", "name: c\npartitoin: x\n")))
    assert (problem.message, problem.fix) == ("unknown key 'partitoin'", "did you mean 'partition'?")


@pytest.mark.parametrize("file", sorted(pack_folder("clusters").glob("*.yaml")), ids=lambda f: f.stem)
def test_the_example_profiles_load_and_plan(file: Path) -> None:
    cluster = load_cluster(str(file))
    assert cluster.name == file.stem
    one = prepare("llama8b_fp8")
    job = plan(one, cluster, Path("/r"), runtime=cluster.runtime, check_paths=False)
    assert job.container is not None
    assert job.container.image == cluster.images["nemo-26.04"]
    assert job.resources.account == "my_project"


def test_there_are_example_profiles() -> None:
    assert {f.stem for f in pack_folder("clusters").glob("*.yaml")} >= {"example_pyxis", "example_apptainer"}


# --- what a profile changes -------------------------------------------------------------------------------------------


def test_options_of_a_plain_job(home: Path) -> None:
    assert options(Cluster()) == {
        "job-name": "llama8b_fp8",
        "nodes": "1",
        "ntasks-per-node": "8",
        "time": "00:30:00",
        "gpus-per-node": "8",
        "output": "/r/logs/slurm-%j.out",
        "open-mode": "append",
        "comment": "fp8launch:r",
    }


def test_options_of_a_profile() -> None:
    cluster = Cluster(
        account="a", partition="p", qos="q", reservation="r", constraint="c&d", nodelist="n[1-2]", exclude="n3",
        segment=2, exclusive=True, memory="0", requeue=False,
        options={"nice": 5, "overcommit": True, "spread-job": False, "comment": "two words"},
    )  # fmt: skip
    found = options(cluster)
    assert found | {
        "account": "a", "partition": "p", "qos": "q", "reservation": "r", "constraint": "c&d", "nodelist": "n[1-2]",
        "exclude": "n3", "segment": "2", "exclusive": None, "mem": "0", "no-requeue": None, "nice": "5",
        "overcommit": None, "comment": "fp8launch:r two words",
    } == found  # fmt: skip
    assert "spread-job" not in found
    assert "requeue" not in found


@pytest.mark.parametrize(
    ("cluster", "name", "value"),
    [
        (Cluster(), "gpus-per-node", "8"),
        (Cluster(gres_type="h100"), "gpus-per-node", "h100:8"),
        (Cluster(gpus="gres"), "gres", "gpu:8"),
        (Cluster(gpus="gres", gres_type="h100"), "gres", "gpu:h100:8"),
    ],
)
def test_how_gpus_are_asked_for(cluster: Cluster, name: str, value: str) -> None:
    found = options(cluster)
    assert found[name] == value
    assert len({"gpus-per-node", "gres"} & set(found)) == 1


def test_no_gpus_are_asked_for_where_there_are_none() -> None:
    assert not {"gpus-per-node", "gres"} & set(options(Cluster(gpus="none")))
    assert not {"gpus-per-node", "gres"} & set(options(Cluster(), recipe="tiny_cpu"))


def test_one_task_per_node_under_torchrun() -> None:
    found = options(Cluster(launch="torchrun"), "resources.cpus_per_task=4")
    assert (found["ntasks-per-node"], found["cpus-per-task"]) == ("1", "32")
    assert options(Cluster(launch="torchrun"), "launch.mode=srun")["ntasks-per-node"] == "8"


def test_an_option_of_the_site_wins() -> None:
    assert options(Cluster(options={"time": "5", "open-mode": "truncate"}))["time"] == "5"


def test_the_recipes_variables_win_over_the_clusters(write: Write) -> None:
    file = write("r.yaml", "name: r\nenv: {A: recipe}\n")
    one = prepare(file)
    job = plan(one, Cluster(env={"A": "cluster", "B": "1"}), Path("/r"))
    assert dict(job.environment) | {"A": "recipe", "B": "1"} == dict(job.environment)


def test_variables_of_a_profile_keep_their_digits(write: Write) -> None:
    assert load_cluster(write("c.yaml", "env: {A: 3.10, B: 007}\n")).env == {"A": "3.10", "B": "007"}


@pytest.mark.parametrize(
    "name", ["code", "python", "megatron_args", "UID", "RANDOM", "MASTER_ADDR", "RANK", "WORLD_SIZE"]
)
def test_variables_that_the_script_or_bash_needs_are_refused(write: Write, name: str) -> None:
    one = prepare(write("r.yaml", f"name: r\nenv:\n  {name}: x\n"))
    problem = only(refused(plan, one, Cluster(), Path("/r")))
    assert problem.code == "reserved-variable"
    assert str(problem.where).endswith("r.yaml:3")


@pytest.mark.parametrize("folder", ["/a\nb", "/a%j", "/a'b", '/a"b', "/a$b", "/a;b", "/a\\b", "relative"])
def test_a_run_folder_that_slurm_or_a_shell_would_misread(folder: str) -> None:
    one = prepare("tiny_cpu")
    assert only(refused(plan, one, Cluster(), Path(folder))).code == "run-folder-name"


def test_the_run_root_follows_the_command_then_the_profile_then_the_home(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEAM", "ours")
    assert run_root(Cluster(run_root="/x/$TEAM"), None) == Path("/x/ours")
    assert run_root(Cluster(run_root="~/y"), None) == home / "y"
    assert run_root(Cluster(run_root="/x"), "rel") == Path.cwd() / "rel"
    assert run_root(Cluster(), None) == home / "fp8launch-runs"
    assert only(refused(run_root, Cluster(run_root="~no-such-user-here/y"), None)).code == "no-such-home"


def test_the_runtime_is_the_profiles_or_what_the_machine_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert probe_runtime(Cluster(runtime="apptainer"), {}) == "apptainer"
    assert only(refused(probe_runtime, Cluster(), {}, exit_code=3)).code == "no-container-runtime"
    for program, runtime in (("ch-run", "charliecloud"), ("singularity", "apptainer")):
        (tmp_path / program).write_text("#!/bin/sh\n")
        (tmp_path / program).chmod(0o755)
        assert probe_runtime(Cluster(), {}) == runtime
    (tmp_path / "srun").write_text("#!/bin/sh\necho '  --container-image=...'\n")
    (tmp_path / "srun").chmod(0o755)
    assert probe_runtime(Cluster(), {}) == "pyxis"

"""From recipe to run: what is written down, what is not, and what is refused before anything is made."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from memory_scheduler import Memory
from support import only, refused

from fp8launch import schedulers
from fp8launch.cluster.profile import Cluster, Storage
from fp8launch.job.prepared import prepare
from fp8launch.recipe.load import load_recipe
from fp8launch.report.read_run import stated_arguments
from fp8launch.rundir.registry import find_run, run_root
from fp8launch.rundir.run_dir import RunFolder
from fp8launch.schedulers.base import JobState, Scheduler
from fp8launch.schedulers.local import LocalScheduler
from fp8launch.schedulers.slurm.slurm_scheduler import SlurmScheduler
from fp8launch.submit.checkout import checkout_of
from fp8launch.submit.new_run import image_record, new_run_id
from fp8launch.submit.submission import record_reported
from fp8launch.submit.submit import single, submit_run

Write = Callable[[str, str], str]
SECRET = "hunter2-very-secret"
# What "runs" here is a program that ends at once: these tests are about the folder.
QUICK = Cluster(python="/bin/true")


@pytest.fixture
def slurm_that_takes_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """sbatch that answers with a job id, for what is written before Slurm sees a job."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, answer in (("sbatch", 'if [ "$1" = --parsable ]; then echo 4242; else echo Submitted batch job 4242; fi'),
                         ("srun", ":")):  # fmt: skip
        (folder / name).write_text(f"#!/bin/bash\n{answer}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


@pytest.fixture(params=["local", "memory"])
def scheduler(request: pytest.FixtureRequest, memory: Memory) -> Scheduler:
    memory.ends_at_once = 0
    return schedulers.by_name(request.param)


def ended(run: RunFolder) -> JobState:
    end = time.monotonic() + 20
    while not (state := schedulers.of_run(run).state(run)).final:
        assert time.monotonic() < end
        time.sleep(0.02)
    return state


def test_a_run_on_this_machine_from_recipe_to_end(home: Path) -> None:
    run = submit_run(single(prepare("tiny_cpu")), QUICK, home / "runs", LocalScheduler())
    assert ended(run).status == "completed"
    assert run.path.parent == home / "runs"
    assert [a.exit_status for a in run.attempts()] == [0]
    record_reported(run)  # as the command does: otherwise the same submission again means the same run
    failed = submit_run(single(prepare("tiny_cpu")), Cluster(python="/bin/false"), home / "runs", LocalScheduler())
    assert (ended(failed).status, ended(failed).exit_code) == ("failed", 1)


def test_checkpoints_are_stored_where_the_profile_says(home: Path, scheduler: Scheduler) -> None:
    cluster = Cluster(python="/bin/true", storage=Storage(checkpoints=str(home / "saved")))
    saves = ["checkpoint.dir=checkpoints", "checkpoint.interval=5"]
    run = submit_run(single(prepare("tiny_cpu", saves)), cluster, home / "runs", scheduler)
    place = home / "saved" / run.run_id
    assert (run.path / "checkpoints").readlink() == place and place.is_dir()
    assert run.manifest()["storage"] == {"checkpoints": str(place)}
    alone = submit_run(single(prepare("tiny_cpu")), cluster, home / "runs", scheduler)
    assert not (alone.path / "checkpoints").exists() and "storage" not in alone.manifest()
    assert [each.name for each in (home / "saved").iterdir()] == [run.run_id]


def test_a_run_folder_with_spaces(home: Path) -> None:
    run = submit_run(single(prepare("tiny_cpu")), QUICK, home / "my runs", LocalScheduler())
    assert ended(run).status == "completed"


def test_the_manifest_records_the_request(home: Path, write: Write, scheduler: Scheduler) -> None:
    recipe = write("mine.yaml", "extends: tiny_cpu\nname: mine\nenv: {A: 3.10}\n")
    prepared = prepare(recipe, ["train.iterations=3"])
    run = submit_run(single(prepared), QUICK, home / "runs", scheduler)
    ended(run)
    found = run.manifest()
    assert found["run_id"] == run.run_id
    assert found["arguments"] == prepared.args.recorded
    assert found["megatron"]["argv"] == list(prepared.args.argv)
    assert found["environment"]["A"] == "3.10"
    assert found["recipe"]["train"]["iterations"] == 3
    assert found["recipe_files"][-1] == recipe
    assert found["layout"]["global_batch"] == 8
    assert (found["backend"], found["gpu"], found["python"]) == (scheduler.name, "cpu", "/bin/true")
    assert {"fp8launch", "python", "slurm"} == set(found["versions"])
    assert len(found["jobs"]) == 1


def test_the_resolved_recipe_is_the_same_recipe(home: Path, write: Write, scheduler: Scheduler) -> None:
    file = write("mine.yaml", "extends: tiny_cpu\nname: mine\nenv: {A: 3.10, B: 'off', C: \"it's\\n$(x)\"}\n")
    prepared = prepare(file, ["train.lr=3e-4"])
    run = submit_run(single(prepared), QUICK, home / "runs", scheduler)
    again = load_recipe(str(run.path / "recipe.yaml"))
    assert again.recipe == prepared.loaded.recipe
    assert prepare(str(run.path / "recipe.yaml")).args.argv == prepared.args.argv
    assert "extends" not in yaml.safe_load((run.path / "recipe.yaml").read_text())
    ended(run)


@pytest.mark.parametrize(
    "backend", ["local", "memory", "sbatch", pytest.param("submitit", marks=pytest.mark.needs_plugin("submitit"))]
)
def test_a_secret_is_written_nowhere(
    home: Path, write: Write, backend: str, monkeypatch: pytest.MonkeyPatch, slurm_that_takes_all: None, memory: Memory
) -> None:
    monkeypatch.setenv("X_TOKEN", SECRET)
    recipe = write("mine.yaml", "extends: tiny_cpu\nname: mine\nsecrets: [X_TOKEN]\n")
    run = submit_run(single(prepare(recipe)), QUICK, home / "runs", schedulers.by_name(backend))
    if backend == "local":
        assert ended(run).status == "completed"
    assert run.manifest()["secrets"] == ["X_TOKEN"]
    held = [f for f in home.rglob("*") if f.is_file() and SECRET.encode() in f.read_bytes()]
    assert held == []


def test_a_secret_that_is_not_set_stops_before_anything_is_made(
    home: Path, write: Write, monkeypatch: pytest.MonkeyPatch, scheduler: Scheduler
) -> None:
    monkeypatch.delenv("X_TOKEN", raising=False)
    recipe = write("mine.yaml", "extends: tiny_cpu\nname: mine\nsecrets:\n  - HOME\n  - X_TOKEN\n")
    problem = only(refused(submit_run, single(prepare(recipe)), QUICK, home / "runs", scheduler))
    assert (problem.code, problem.where) == ("secret-missing", f"{recipe}:5")
    assert not (home / "runs").exists()


def test_a_refusal_by_slurm_keeps_the_folder_and_names_the_script(
    home: Path, slurm_that_takes_all: None, tmp_path: Path
) -> None:
    (tmp_path / "bin/sbatch").write_text(
        "#!/bin/bash\necho 'sbatch: error: invalid partition specified: x' >&2; exit 1\n"
    )
    problem = only(
        refused(submit_run, single(prepare("tiny_cpu")), QUICK, home / "runs", SlurmScheduler(), exit_code=3)
    )
    assert str(problem.where).endswith("job.sbatch")
    assert Path(str(problem.where)).is_file()


def test_a_root_that_is_a_file(home: Path, scheduler: Scheduler) -> None:
    (home / "runs").touch()
    refused(submit_run, single(prepare("tiny_cpu")), QUICK, home / "runs", scheduler, exit_code=3)


def test_run_ids_differ_and_begin_with_the_name() -> None:
    ids = {new_run_id("a.b") for _ in range(5)}
    assert len(ids) == 5
    assert all(name.startswith("a.b-") for name in ids)


# --- where a run comes from -------------------------------------------------------------------------------------------


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "checkout"
    (folder / "sub").mkdir(parents=True)
    for name, value in (("GIT_CONFIG_GLOBAL", "/dev/null"), ("GIT_CONFIG_NOSYSTEM", "1")):
        monkeypatch.setenv(name, value)
    (folder / "sub/mine.yaml").write_text("extends: tiny_cpu\nname: mine\n")
    git(folder, "init", "-q", "-b", "trunk")
    git(folder, "add", ".")
    git(folder, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "-m", "first")
    return folder


def git(folder: Path, *arguments: str) -> str:
    return subprocess.run(["git", "-C", folder, *arguments], check=True, capture_output=True, text=True).stdout.strip()


def test_commit_and_uncommitted_changes_are_kept(home: Path, checkout: Path, scheduler: Scheduler) -> None:
    recipe = checkout / "sub/mine.yaml"
    clean = submit_run(single(prepare(str(recipe))), QUICK, home / "runs", scheduler)
    commit = git(checkout, "rev-parse", "HEAD")
    assert clean.manifest()["git"] == {"commit": commit, "branch": "trunk", "dirty": False}
    assert not (clean.path / "git.diff").exists()
    recipe.write_text("extends: tiny_cpu\nname: mine\ntrain: {iterations: 7}\n")
    changed = submit_run(single(prepare(str(recipe))), QUICK, home / "runs", scheduler)
    assert changed.manifest()["git"]["dirty"]
    git(checkout, "checkout", "-q", ".")
    git(checkout, "apply", str(changed.path / "git.diff"))
    assert "iterations: 7" in recipe.read_text()
    ended(clean)
    ended(changed)


def test_a_new_file_makes_a_checkout_dirty(checkout: Path) -> None:
    (checkout / "new").touch()
    state, diff = checkout_of(checkout / "sub/mine.yaml")
    assert state is not None
    assert (state["dirty"], diff) == (True, "")


def test_outside_a_checkout_and_without_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert checkout_of(tmp_path / "r.yaml") == (None, "")
    monkeypatch.setenv("PATH", "/nonexistent")
    assert checkout_of(tmp_path / "r.yaml") == (None, "")


def test_images_are_recorded_by_what_identifies_them(tmp_path: Path) -> None:
    assert image_record("nvcr.io#a/b:1") == {"image": "nvcr.io#a/b:1"}
    assert image_record("a/b@sha256:12") == {"image": "a/b@sha256:12", "digest": "sha256:12"}
    file = tmp_path / "x.sqsh"
    file.write_bytes(b"123")
    record = image_record(str(file))
    assert record is not None
    assert record["bytes"] == 3
    (tmp_path / "x.sqsh.sha256").write_text("abcd  x.sqsh\n")
    record = image_record(str(file))
    assert record is not None
    assert record["digest"] == "sha256:abcd"
    (tmp_path / "x.sqsh.sha256").write_text("")
    assert "digest" not in json.loads(json.dumps(image_record(str(file))))


def test_a_run_root_with_a_variable_that_is_not_set(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    profile = Cluster(run_root="/shared/runs/$USER")
    monkeypatch.setenv("USER", "ada")
    assert run_root(profile, None) == Path("/shared/runs/ada")
    monkeypatch.delenv("USER")
    problem = only(refused(run_root, profile, None))
    assert (problem.code, problem.where) == ("run-root-variable", "cluster profile: run_root")
    assert "USER" in problem.message and "export USER=" in str(problem.fix)
    assert only(refused(run_root, profile, "/x/${NOT_SET}/y")).where == "--run-root"


def test_the_manifest_has_a_scripts_own_arguments(in_memory: Any, write: Callable[[str, str], str]) -> None:
    script = write("train.py", "")
    text = (
        f"extends: tiny_cpu\nname: r\nlaunch: {{script: {script}, arguments: [--my-flag, 3, --bare, --list, a, b]}}\n"
    )
    run = find_run(in_memory.submit(recipe=write("r.yaml", text)).name)
    arguments = run.manifest()["arguments"]
    own = {"my_flag": "3", "bare": True, "list": ["a", "b"]}
    assert {name: arguments[name] for name in own} == own
    assert arguments["train_iters"] == stated_arguments(run.manifest())["train_iters"]

"""The folder that a portable script makes: a run folder of this user alone, whose manifest says what was started."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from script_harness import Harness, Outcome
from support import only, refused

from fp8launch.engines.base import Entry
from fp8launch.job.job import Container, Job, Resources
from fp8launch.megatron.arguments import Argument
from fp8launch.report.read_run import run_from_folder
from fp8launch.rundir.names import recipe_named
from fp8launch.rundir.registry import all_runs, find_run, job_ids, need_mine
from fp8launch.rundir.run_dir import RunFolder
from fp8launch.schedulers import of_run
from fp8launch.schedulers.slurm.batch_script import batch_script
from fp8launch.submit.resume import resume

ROOT = Path(__file__).parents[2]
PLAIN = Job(
    name="tiny", description="", folder=None, resources=Resources(tasks_per_node=2), processes_per_node=2, mode="srun",
    python="python3",
    arguments=(Argument("lr", ("--lr", "0.01")), Argument("swiglu", ("--swiglu",))), environment=(("X_A", "a b"),),
    gpu="h100", megatron="0.19.2", recipe_digest="ab12",
)  # fmt: skip
RUN = "runs/tiny-4242"


@pytest.fixture
def place(tmp_path: Path) -> Harness:
    return Harness(tmp_path / "h")


def start(place: Harness, job: Job = PLAIN, **environment: str) -> Outcome:
    return place.run(batch_script(job), FP8LAUNCH_HOME=str(ROOT), FP8LAUNCH_PYTHON=sys.executable, **environment)


def test_the_manifest_is_read_as_that_of_any_run(place: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    job = replace(PLAIN, secrets=("X_TOKEN",), entry=Entry(title="train.py"))
    outcome = start(place, job, SLURM_JOB_NUM_NODES="2", SLURM_NTASKS="8", SLURM_JOB_NAME="other", X_TOKEN="t")
    assert (outcome.status, outcome.stderr) == (0, "")
    run = RunFolder(place.work / RUN)
    manifest = run.manifest()
    assert run.is_mine
    assert job_ids(run) == ["4242"]
    assert manifest["recipe_digest"] == "ab12"
    assert manifest["secrets"] == ["X_TOKEN"]
    assert manifest["slurm"] == {"job-name": "other"}
    data = run_from_folder(run)
    assert data.setup.world_size == 8
    assert data.command == "sbatch tiny.sbatch"
    expected = {"nodes": 2, "recipe": "tiny", "lr": 0.01, "swiglu": True, "env X_A": "a b", "gpu": "h100"}
    assert {name: data.facts[name] for name in expected} == expected
    assert data.facts["script"] == "train.py"
    # The list of run roots in the home folder makes the run known by its id.
    monkeypatch.setenv("HOME", str(place.home))
    for name in ("FP8LAUNCH_RUNS", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert find_run("4242") == run
    assert all_runs() == [run]


def test_what_sbatch_s_command_line_adds_is_recorded(place: Harness) -> None:
    (place.bin / "scontrol").write_text(
        "#!/bin/bash\ncase $* in\n*hostnames*) echo node-a;;\n*'show job'*) printf '%s\\n' 'JobId=4242' "
        "'   Command=/co/my scripts/tiny.sbatch --lr 0.02' '   Comment=of mine';;\n"
        f'update*) printf "%s\\n" "$@" > "{place.work}/update";;\nesac\n'
    )
    script = place.work / "tiny.sbatch"
    script.write_text(batch_script(PLAIN))
    outcome = place.run(f'exec bash "{script}" --lr 0.02', FP8LAUNCH_HOME=str(ROOT), FP8LAUNCH_PYTHON=sys.executable)
    assert (outcome.status, outcome.stderr) == (0, "")
    manifest = RunFolder(place.work / RUN).manifest()
    assert manifest["megatron"]["argv"] == ["--lr", "0.01", "--swiglu", "--lr", "0.02"]
    assert manifest["command"] == ["sbatch", "/co/my scripts/tiny.sbatch", "--lr", "0.02"]
    assert (place.work / "update").read_text().splitlines() == [
        "update", "JobId=4242", "Comment=fp8launch:tiny-4242 of mine",
    ]  # fmt: skip


def test_a_relative_folder_for_runs_is_below_the_folder_of_the_submission(place: Harness) -> None:
    assert start(place, FP8LAUNCH_RUNS="my runs").status == 0
    assert (place.work / "my runs/tiny-4242/logs/4242-0.exit").is_file()


def test_torchrun_starts_several_processes_per_task(place: Harness) -> None:
    job = replace(PLAIN, mode="torchrun")
    start(place, job, SLURM_JOB_NUM_NODES="3", SLURM_NTASKS="3")
    assert RunFolder(place.work / RUN).manifest()["layout"] == {"world": 6}


def test_a_container_and_its_image_are_recorded(place: Harness) -> None:
    start(place, replace(PLAIN, container=Container("pyxis", "a:b")), FP8LAUNCH_IMAGE="/i.sqsh")
    manifest = RunFolder(place.work / RUN).manifest()
    assert (manifest["runtime"], manifest["image"]) == ("pyxis", {"image": "/i.sqsh"})


def test_whatever_the_umask_nobody_else_can_write_to_the_folder(place: Harness) -> None:
    before = os.umask(0)
    try:
        assert start(place).status == 0
    finally:
        os.umask(before)
    made = [place.work / "runs", *(place.work / "runs/tiny-4242").rglob("*"), *place.home.rglob("*")]
    assert [path for path in made if path.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH)] == []
    need_mine(RunFolder(place.work / RUN))


def test_values_of_secret_variables_that_a_user_wrote_into_the_script_are_left_out(place: Harness) -> None:
    job = replace(PLAIN, environment=(("HF_TOKEN", "hf_x"), ("X_TOKENIZER", "t")))
    start(place, job)
    manifest = (place.work / RUN / "manifest.json").read_text()
    assert "hf_x" not in manifest
    assert '"X_TOKENIZER": "t"' in manifest


def a_folder(folder: Path) -> None:
    (folder / "logs").mkdir(parents=True)
    (folder / "manifest.json").write_text("{}\n")


def a_link(folder: Path) -> None:
    folder.parent.mkdir()
    (folder.parent.parent / "theirs").mkdir()
    folder.symlink_to(folder.parent.parent / "theirs")


def a_dangling_link(folder: Path) -> None:
    folder.parent.mkdir()
    folder.symlink_to(folder.parent.parent / "theirs")


@pytest.mark.parametrize(
    ("make", "restarts"),
    [(a_folder, "0"), (a_link, "0"), (a_link, "1"), (a_dangling_link, "0"), (a_dangling_link, "1")],
)
def test_a_folder_of_that_name_is_left_alone(place: Harness, make: Callable[[Path], None], restarts: str) -> None:
    make(place.work / RUN)
    before = sorted(place.work.rglob("*"))
    outcome = start(place, SLURM_RESTART_COUNT=restarts)
    assert outcome.status == 2
    assert "fix: set FP8LAUNCH_RUNS to another folder" in outcome.stderr
    assert outcome.calls == []
    assert sorted(place.work.rglob("*")) == before


def test_a_requeued_job_keeps_its_manifest(place: Harness) -> None:
    start(place)
    before = (place.work / RUN / "manifest.json").read_bytes()
    assert start(place, SLURM_RESTART_COUNT="1").status == 0
    assert (place.work / RUN / "manifest.json").read_bytes() == before
    assert (place.work / RUN / "logs/4242-1.exit").is_file()


def test_without_a_python_the_training_still_starts(place: Harness) -> None:
    """The batch host's Python may be too old; in a container the training has another one."""
    (place.bin / "python3").write_text("#!/bin/sh\nexit 1\n")
    (place.bin / "python3").chmod(0o755)
    job = replace(PLAIN, container=Container("pyxis", "a:b"))
    outcome = place.run(batch_script(job), FP8LAUNCH_HOME=str(ROOT))
    assert outcome.status == 0
    assert [call.argv[0] for call in outcome.calls] == ["srun"]
    log = place.work / RUN / "logs/4242-0.log"
    assert f"has no manifest: use {log} instead of the folder" in outcome.stderr


def failing(place: Harness, *lines: str, status: int = 1) -> None:
    """Let srun write these lines to the log, and fail."""
    (place.bin / "srun").write_text(
        "#!/bin/bash\nfor word; do [[ $word == --output=* ]] && log=${word#--output=}; done\n"
        f"cat >> \"$log\" << 'END'\n{chr(10).join(lines)}\nEND\nexit {status}\n"
    )


def test_the_job_s_own_output_names_the_folder_and_the_cause(place: Harness) -> None:
    failing(place, "0: [rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", status=7)
    outcome = start(place)
    assert outcome.status == 7
    assert outcome.stderr.splitlines()[:2] == [
        "fp8launch: the training failed with exit status 7: out-of-memory",
        "fp8launch: cause: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
    ]
    assert outcome.stderr.splitlines()[-1] == f"fp8launch: log: {place.work}/{RUN}/logs/4242-0.log"


def test_an_unknown_cause_names_the_log(place: Harness) -> None:
    failing(place, "something", status=9)
    outcome = start(place)
    assert outcome.stderr.splitlines() == [
        "fp8launch: the training failed with exit status 9; its log shows no known cause",
        f"fp8launch: log: {place.work}/{RUN}/logs/4242-0.log",
    ]


def test_the_batch_script_s_output_is_in_the_run_folder_as_well(place: Harness) -> None:
    output, script = place.work / "tiny-4242.out", place.work / "tiny.sbatch"
    script.write_text(batch_script(PLAIN))
    where = f'"{output}" 2>&1'
    outcome = place.run(f'exec bash "{script}" > {where}', FP8LAUNCH_HOME=str(ROOT), FP8LAUNCH_PYTHON=sys.executable)
    assert outcome.status == 0
    run = RunFolder(place.work / RUN)
    assert [file.read_text() for file in run.batch_output()] == [f"fp8launch: run folder {run.path}\n"]


def test_what_needs_the_launcher_s_record_says_so(place: Harness) -> None:
    start(place)
    run = RunFolder(place.work / RUN)
    problem = only(refused(resume, run, of_run(run), exit_code=1))
    assert problem.code == "plain-sbatch"
    assert "was started by a portable script" in problem.message
    assert "--load" in str(problem.fix)
    problem = only(refused(recipe_named, str(run.path)))
    assert problem.code == "plain-sbatch"
    assert "'tiny'" in str(problem.fix)


def test_a_manifest_of_somebody_else_is_data(place: Harness) -> None:
    start(place)
    run = RunFolder(place.work / RUN)
    text = (run.path / "manifest.json").read_text()
    (run.path / "manifest.json").write_text(text.replace('"started_by": "sbatch"', '"started_by": ["x"]'))
    assert only(refused(run.manifest)).code == "bad-manifest"

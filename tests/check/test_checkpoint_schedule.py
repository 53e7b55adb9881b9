"""A run that continues another run's schedule is compared with it before it is submitted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from continued_runs import continued, written_by

from fp8launch.check.checker import check
from fp8launch.diagnostics import Problem
from fp8launch.injob.supervisor.checkpoint_owner import RECORD
from fp8launch.job.prepared import prepare

CREATED = "2026-11-24T06:03:07.325+00:00"


def write_run(root: Path, *settings: str, phases: bool = False) -> Path:
    """A run folder as `submit` leaves it, with the arguments of tiny_cpu."""
    arguments = dict(prepare("tiny_cpu", settings).args.attributes)
    run = root / "earlier-1"
    run.mkdir(parents=True)
    manifest = {"run_id": run.name, "created": CREATED, "arguments": arguments, "phases": []}
    if phases:
        manifest["phases"] = [{"name": "then", "begin": 5, "end": 10, "arguments": arguments}]
    (run / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    return run


def write_checkpoint(folder: Path, owner: str | None = None, created: str = CREATED) -> Path:
    (folder / "iter_0000010").mkdir(parents=True)
    (folder / "iter_0000010" / "common.pt").touch()
    (folder / "latest_checkpointed_iteration.txt").write_text("10")
    if owner:
        (folder / RECORD).write_text(json.dumps({"run": owner, "recipe": "0", "created": created}), encoding="utf-8")
    return folder


def schedule_problem(load: Path, *settings: str) -> Problem | None:
    result = check(prepare("tiny_cpu", [f"checkpoint.load={load}", *settings]), layers=("machine",))
    return next((problem for problem in result.problems if problem.code == "checkpoint-schedule"), None)


def test_more_iterations_are_refused_with_the_two_ways_on(tmp_path: Path) -> None:
    load = write_checkpoint(write_run(tmp_path, "train.iterations=32") / "checkpoints")
    problem = schedule_problem(load, "train.iterations=64")
    assert problem is not None and problem.severity == "error"
    assert "train_iters is 64, but 32 in the run that wrote" in problem.message
    assert "override_opt_param_scheduler: true" in str(problem.fix)
    assert schedule_problem(load, "train.iterations=32") is None


@pytest.mark.parametrize(
    "choice",
    ["override_opt_param_scheduler", "use_checkpoint_opt_param_scheduler", "finetune", "no_load_optim"],
)
def test_a_run_that_does_not_compare_schedules_passes(tmp_path: Path, choice: str) -> None:
    load = write_checkpoint(write_run(tmp_path, "train.iterations=32") / "checkpoints")
    assert schedule_problem(load, "train.iterations=64", f"megatron.{choice}=true") is None


@pytest.mark.parametrize("change", ["train.warmup=3", "megatron.weight_decay=0.2", "megatron.lr_decay_style=linear"])
def test_every_part_of_the_schedule_counts(tmp_path: Path, change: str) -> None:
    load = write_checkpoint(write_run(tmp_path) / "checkpoints")
    assert schedule_problem(load, change) is not None


def test_one_schedule_written_in_two_ways_is_the_same(tmp_path: Path) -> None:
    load = write_checkpoint(write_run(tmp_path, "train.iterations=32") / "checkpoints")
    assert schedule_problem(load, "train.iterations=32", "megatron.lr_decay_iters=32") is None


def test_a_checkpoint_outside_the_run_folder_names_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP8LAUNCH_RUNS", str(tmp_path / "runs"))
    owner = write_run(tmp_path / "runs", "train.iterations=32").name
    load = write_checkpoint(tmp_path / "shared", owner)
    assert schedule_problem(load, "train.iterations=64") is not None
    # A run of the same id, but not the one that wrote it.
    other = write_checkpoint(tmp_path / "copied", owner, created="2020-01-01T00:00:00+00:00")
    assert schedule_problem(other, "train.iterations=64") is None
    for damaged in ("[1]", "{", '{"run": 3}', '{"run": "../.."}'):
        (load / RECORD).write_text(damaged)
        assert schedule_problem(load, "train.iterations=64") is None


def test_a_new_run_in_the_folder_of_an_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP8LAUNCH_RUNS", str(tmp_path / "runs"))
    owner = write_run(tmp_path / "runs", "train.iterations=32").name
    load = write_checkpoint(tmp_path / "shared", owner)
    assert schedule_problem(load, "train.iterations=64", f"checkpoint.dir={load}") is not None


def test_which_phase_a_run_resumes_in_is_not_guessed(tmp_path: Path) -> None:
    load = write_checkpoint(write_run(tmp_path, "train.iterations=32", phases=True) / "checkpoints")
    assert schedule_problem(load, "train.iterations=64", f"checkpoint.dir={load}") is None
    assert schedule_problem(load, "train.iterations=64") is not None


def test_0_19_refuses_a_checkpoint_with_another_rate(tmp_path: Path) -> None:
    load = written_by(tmp_path)
    found = continued(load, "train.lr=0.02", "train.min_lr=0.001", version="0.19.2")
    assert found["checkpoint-learning-rate"].severity == "error"
    assert "0.02" in found["checkpoint-learning-rate"].message
    assert "override-sched-ignored" not in found
    weights = continued(load, "train.lr=0.02", "train.min_lr=0.001", "megatron.finetune=true", version="0.19.2")
    assert "checkpoint-learning-rate" not in weights


def test_a_damaged_manifest_next_to_a_checkpoint_says_nothing(tmp_path: Path) -> None:
    load = written_by(tmp_path)
    for text in ("[1]", "{", '{"arguments": {"lr": "fast"}, "phases": [3], "layout": 2, "megatron": []}'):
        (load.parent / "manifest.json").write_text(text, encoding="utf-8")
        for version in ("0.18.2", "0.19.2"):
            found = continued(load, version=version)
            assert "checkpoint-learning-rate" not in found


def test_experts_that_become_parallel_lose_their_states(tmp_path: Path) -> None:
    """EP 2 as EP 1 ended as `Could not find parameter group` in the job."""
    load = written_by(tmp_path, num_experts=4, expert_model_parallel_size=2, moe_router_topk=2)
    experts = ("megatron.num_experts=4", "megatron.moe_router_topk=2", "resources.gpus_per_node=2")
    found = continued(load, *experts)
    assert found["checkpoint-expert-groups"].severity == "error"
    assert "EP is 1, but 2 in the run" in found["checkpoint-expert-groups"].message
    assert "checkpoint-expert-groups" not in continued(load, *experts, "parallel.ep=2")
    assert "checkpoint-expert-groups" not in continued(load, *experts, "megatron.finetune=true")

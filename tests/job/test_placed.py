"""A job that is planned before it has a run folder, and gets one later."""

from __future__ import annotations

from pathlib import Path

import pytest

from fp8launch.cluster.profile import Cluster
from fp8launch.diagnostics import UserError
from fp8launch.job.build_job import UNPLACED, placed, plan
from fp8launch.job.job import Job
from fp8launch.job.prepared import prepare

FOLDER = Path("/somewhere/else/tiny-1")
CHECKPOINTS = ("checkpoint.dir=checkpoints", "checkpoint.interval=5")
PHASES = ("phases.one.iterations=5", "phases.two.train.lr=1e-4")
CASES: dict[str, tuple[str, tuple[str, ...], dict[str, object]]] = {
    "one attempt": ("llama8b_fp8", (), {}),
    "checkpoints in the run folder": ("llama8b_fp8", (*CHECKPOINTS, "survive.attempts=3"), {}),
    "checkpoints elsewhere": ("tiny_cpu", ("checkpoint.dir=/checkpoints", "checkpoint.interval=5"), {}),
    "phases": ("tiny_cpu", (*CHECKPOINTS, *PHASES), {}),
    "a profile's own comment": ("tiny_cpu", (), {"options": {"comment": "project 7"}}),
    "a profile without comments": ("tiny_cpu", (), {"options": {"comment": False}}),
    "a profile's own output": ("tiny_cpu", (), {"options": {"output": "/logs/%j.out", "comment": 7}}),
    "a profile that drops the output": ("tiny_cpu", (), {"options": {"output": False}}),
}


def planned(name: str, folder: Path) -> Job:
    recipe, overrides, profile = CASES[name]
    run, cluster = prepare(recipe, overrides), Cluster.model_validate(profile)
    return plan(run, cluster, folder, runtime="pyxis", check_paths=False)


@pytest.mark.parametrize("name", CASES)
def test_placed_is_as_planned_there(name: str) -> None:
    job = planned(name, UNPLACED)
    there = planned(name, FOLDER)
    assert placed(job, FOLDER) == there
    assert str(UNPLACED) not in repr(placed(job, FOLDER))


def test_a_folder_that_slurm_would_read_otherwise() -> None:
    job = planned("one attempt", UNPLACED)
    with pytest.raises(UserError, match="special meaning"):
        placed(job, Path("/runs/100%"))

"""Runs on slow hosts, with the step time that the speed model predicts on the slowest measured one: host_bound.md."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from measured_runs import SLOW_HOSTS, sittings
from published_runs import Run

from fp8launch.check.resolved_run import resolve_run
from fp8launch.hardware.gpus import gpu
from fp8launch.job.prepared import prepare
from fp8launch.plugins.plan.step_time import step_time

FOLDER = Path(__file__).resolve().parent / "host_bound"


def slow_host_runs() -> Iterator[Run]:
    """Yield the measured steps. The family says whether the speeds of the slow host were fitted to the run."""
    for row in json.loads((FOLDER / "measured.json").read_text()):
        run = resolve_run(prepare(str(FOLDER / f"{row['recipe']}.yaml"), row["set"]))
        world, batch = run.layout.world, run.layout.global_batch
        args = {**run.defaults, **run.given}
        tokens = batch * int(str(args["seq_length"]))
        speed = tokens / world / row["step_time_ms"] * 1000
        yield Run(row["name"], row["use"], run.gpu.name, world, batch, args, speed)
    for run in sittings(lambda sitting: sitting in SLOW_HOSTS):
        yield replace(run, family="predicted first")


def slow_host_errors(runs: Sequence[Run]) -> list[float]:
    """Return the relative error of the predicted tokens/s/GPU of each run on the slow host."""
    found = []
    for run in runs:
        step = step_time(run.args, run.gpus, run.global_batch, gpu(run.gpu))
        assert step is not None and step.slow_host_ms is not None, run.name
        predicted = step.tokens / step.gpus / step.slow_host_ms * 1000
        found.append(predicted / run.measured - 1)
    return found

"""The report of one run: what `parse` shows and what everything else in this package is made from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from fp8launch.logs import Failure
from fp8launch.report.machines import Machines
from fp8launch.report.selection import RULE, ranges
from fp8launch.report.statistics import Statistic

Status = Literal["ok", "incomplete", "failed", "no_data"]


@dataclass(frozen=True)
class Attempt:
    """One start of the training program: the iterations that it logged, and how it ended."""

    log: str
    iterations: str
    finished: bool
    exit_line: str | None
    failure: Failure | None

    def as_json(self) -> dict[str, object]:
        failure = self.failure.as_json() if self.failure else None
        return {
            "log": self.log,
            "iterations": self.iterations,
            "finished": self.finished,
            "exit": self.exit_line,
            "failure": failure,
        }


@dataclass(frozen=True)
class RunReport:
    """`mfu_denominator` is what `mfu` divides by. A statistic is None where the log does not determine it."""

    status: Status
    iterations: int
    iteration_last: int | None
    iterations_planned: int | None
    lines: int
    step_time_ms: Statistic | None
    tflops_per_gpu: Statistic | None
    tflops_source: Literal["logged", "recomputed"] | None
    tflops_per_gpu_recomputed: Statistic | None
    tokens_per_s_per_gpu: Statistic | None
    tokens_source: Literal["step time", "logged"] | None
    mfu: Statistic | None
    mfu_denominator: Mapping[str, object] | None
    peak_memory_mib: float | None
    energy_j_per_gpu: Statistic | None
    loss_first: float | None
    loss_last: float | None
    grad_norm_last: float | None
    nan_iterations: int
    skipped_iterations: int
    warmup_dropped: int
    dropped: Mapping[str, tuple[int, ...]]
    validations: tuple[Mapping[str, object], ...]
    fp8: Mapping[str, object] | None
    gpu: str | None
    machines: Machines
    world_size: int | None
    seq_length: int | None
    global_batch_size: int | None
    flops_per_token: float | None
    parameters: int | None
    versions: Mapping[str, str]
    arguments: Mapping[str, object]
    attempts: tuple[Attempt, ...]
    failure: Failure | None
    notes: tuple[str, ...]
    rule: str = field(default=RULE)
    tensor_stats: Mapping[str, object] | None = None
    phases: tuple[PhaseReport, ...] = ()

    def as_json(self) -> dict[str, object]:
        """The contract of `parse --json`, and more; `failure` is there only for a failed run."""
        out: dict[str, object] = {}
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if isinstance(value, Statistic | Failure | Machines):
                value = value.as_json()
            out[name] = value
        out["dropped"] = {reason: ranges(numbers) for reason, numbers in self.dropped.items()}
        out["validations"] = list(self.validations)
        out["attempts"] = [a.as_json() for a in self.attempts]
        out["notes"] = list(self.notes)
        out["phases"] = [phase.as_json() for phase in self.phases]
        if self.status != "failed":
            del out["failure"]
        return {name: _plain(value) for name, value in out.items()}


@dataclass(frozen=True)
class PhaseReport:
    """One phase of a run, iterations `begin` + 1 to `end`, with the report of its processes alone."""

    name: str
    begin: int
    end: int | None
    report: RunReport

    @property
    def span(self) -> str:
        return f"{self.begin + 1}-{self.end}"

    @property
    def precision(self) -> str:
        """In a word, and for FP8 whether it is shown to have run."""
        fp8 = self.report.fp8
        if not fp8 or not fp8["requested"]:
            return "not asked for" if fp8 else "unknown"
        return f"{fp8['recipe']}, {fp8['verdict']}"

    def as_json(self) -> dict[str, object]:
        kept = (
            "status", "iterations", "iteration_last", "step_time_ms", "tflops_per_gpu", "tokens_per_s_per_gpu", "mfu",
            "mfu_denominator", "peak_memory_mib", "loss_first", "loss_last", "warmup_dropped", "fp8",
        )  # fmt: skip
        whole = self.report.as_json()
        return {"name": self.name, "begin": self.begin, "end": self.end, **{name: whole[name] for name in kept}}


def _plain(value: object) -> object:
    """JSON knows neither NaN nor infinity."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set):
        return [_plain(v) for v in value]
    return value if value is None or isinstance(value, str | int) else str(value)

"""The report of one run: `parse` prints it, and the other parts of this package start from it."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from fp8launch.injob.supervisor.health_rules import HealthProblem
from fp8launch.logs import Failure
from fp8launch.report.goodput import Goodput
from fp8launch.report.json_values import json_mapping
from fp8launch.report.machines import Machines
from fp8launch.report.steady_state import RULE, SteadyState, ranges

Status = Literal["ok", "unhealthy", "incomplete", "failed", "no_data"]
# A larger number is garbage, and its square overflows.
LARGEST = 1e150


@dataclass(frozen=True)
class Statistic:
    """The summary of `n` values. `iqr` is the interquartile range (linear interpolation, both ends included)."""

    median: float
    mean: float
    min: float
    max: float
    iqr: float
    n: int

    def as_json(self) -> dict[str, float | int]:
        return dict(vars(self))


def statistic(values: Iterable[float]) -> Statistic | None:
    """Summarise the finite values; None without any."""
    finite = sorted([v for v in values if -LARGEST < v < LARGEST])
    if not finite:
        return None
    low = high = finite[0]
    if finite[0] != finite[-1]:
        low, _, high = statistics.quantiles(finite, n=4, method="inclusive")
    middle = statistics.median(finite)
    return Statistic(middle, statistics.fmean(finite), finite[0], finite[-1], high - low, len(finite))


@dataclass(frozen=True)
class AttemptReport:
    """One start of the training program: the iterations that it logged, and how it ended."""

    log: str
    iterations: str
    finished: bool
    exit_line: str | None
    failure: Failure | None

    def as_json(self) -> dict[str, object]:
        failure = None
        if self.failure:
            failure = self.failure.as_json()
        return {
            "log": self.log,
            "iterations": self.iterations,
            "finished": self.finished,
            "exit": self.exit_line,
            "failure": failure,
        }


@dataclass(frozen=True)
class RunReport:
    """The numbers of one run and their sources.

    `timers_ms` has Megatron's own timers by their names, on the slowest rank, if `--timing-log-level` asked for them.
    A statistic is None where the log does not determine it. `mfu` divides by `mfu_denominator`. Not part of the
    JSON: `steady_state`, the iteration lines themselves, and `argument_dump`, all of Megatron's arguments as logged.
    """

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
    argument_dump: Mapping[str, object]
    attempts: tuple[AttemptReport, ...]
    failure: Failure | None
    notes: tuple[str, ...]
    steady_state: SteadyState
    rule: str = field(default=RULE)
    tensor_stats: Mapping[str, object] | None = None
    timers_ms: Mapping[str, Statistic] = field(default_factory=dict)
    phases: tuple[PhaseReport, ...] = ()
    health: tuple[HealthProblem, ...] = ()
    goodput: Goodput | None = None

    def as_json(self) -> dict[str, object]:
        """Return the contract of `parse --json`, and more; `failure` is there only for a failed run."""
        out = dict(vars(self))
        del out["steady_state"], out["argument_dump"]
        out["dropped"] = {reason: ranges(numbers) for reason, numbers in self.dropped.items()}
        if self.status != "failed":
            del out["failure"]
        return json_mapping(out)


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
        """The precision in a word; for FP8 also whether it is shown to have run."""
        fp8 = self.report.fp8
        if fp8 is None:
            return "unknown"
        if not fp8["requested"]:
            return "not asked for"
        return f"{fp8['recipe']}, {fp8['verdict']}"

    def as_json(self) -> dict[str, object]:
        kept = (
            "status", "iterations", "iteration_last", "step_time_ms", "tflops_per_gpu", "tokens_per_s_per_gpu", "mfu",
            "mfu_denominator", "peak_memory_mib", "loss_first", "loss_last", "warmup_dropped", "fp8",
        )  # fmt: skip
        whole = self.report.as_json()
        fields: dict[str, object] = {"name": self.name, "begin": self.begin, "end": self.end}
        for name in kept:
            fields[name] = whole[name]
        return fields

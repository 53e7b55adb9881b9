"""The report of one run. `parse` prints it; comparisons and exports build on it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from typing import Any, Literal, NamedTuple, Protocol

from fp8launch import plugin_registry
from fp8launch.hardware.gpus import Dtype
from fp8launch.hardware.gpus import gpu as find_gpu
from fp8launch.injob.supervisor.health_rules import HealthProblem
from fp8launch.logs import Failure, IterationTable
from fp8launch.report.goodput import Goodput
from fp8launch.report.intervals import Interval, mean_interval
from fp8launch.report.machines import Machines
from fp8launch.report.shared_gpus import GpuUse
from fp8launch.report.steady_state import RULE, SteadyState, numbers_of, ranges

Status = Literal["ok", "unhealthy", "incomplete", "failed", "no_data"]
# Megatron's arguments that are part of the JSON report.
NOTEWORTHY = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "seq_length",
    "num_experts", "micro_batch_size", "global_batch_size", "tensor_model_parallel_size",
    "pipeline_model_parallel_size", "context_parallel_size", "expert_model_parallel_size", "data_parallel_size",
    "use_distributed_optimizer", "use_megatron_fsdp", "recompute_granularity", "train_iters", "log_interval",
    "transformer_impl", "attention_backend",
)  # fmt: skip
# Larger numbers in a log are garbage, and squaring them would overflow.
LARGEST = 1e150


class HasJson(Protocol):
    def as_json(self) -> Mapping[str, object]: ...


def json_list(items: Iterable[HasJson]) -> list[Mapping[str, object]]:
    return [item.as_json() for item in items]


def json_mapping(fields: Mapping[str, object]) -> dict[str, object]:
    return {str(name): json_value(value) for name, value in fields.items()}


def json_value(value: object) -> object:
    """Replace values that JSON cannot represent: NaN and infinity become None, anything else its text."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Mapping):
        return json_mapping(value)
    if isinstance(value, list | tuple | set):
        return list(map(json_value, value))
    if hasattr(value, "as_json"):
        return json_mapping(value.as_json())
    if is_dataclass(value):
        return json_mapping(vars(value))
    return str(value)


@dataclass(frozen=True)
class Statistic:
    """The summary of `n` values. `iqr` is the interquartile range (linear interpolation, inclusive method).

    In a comparison, it summarizes repeats of a run, whose medians are in `runs`. Then `iqr` is the median of the
    runs' interquartile ranges, `n` the sum over the runs, and `interval` the confidence interval of the mean of the
    medians.
    """

    median: float
    mean: float
    min: float
    max: float
    iqr: float
    n: int
    runs: tuple[float, ...] = ()
    interval: Interval | None = None

    @property
    def spread(self) -> float:
        """The ± in tables and error bars: the standard deviation over runs, or half the IQR of a single run."""
        if len(self.runs) > 1:
            return statistics.stdev(self.runs)
        return self.iqr / 2

    def over(self, whole: float) -> Statistic:
        """Divide by `whole`. The result has no interval."""
        return Statistic(
            self.median / whole,
            self.mean / whole,
            self.min / whole,
            self.max / whole,
            self.iqr / whole,
            self.n,
            tuple(median / whole for median in self.runs),
        )

    def as_json(self) -> dict[str, object]:
        if self.runs:
            return {
                "median": self.median,
                "runs": list(self.runs),
                "iqr": self.iqr,
                "n": self.n,
                "ci95_mean": self.interval,
            }
        return {name: getattr(self, name) for name in ("median", "mean", "min", "max", "iqr", "n")}


def statistic(values: Iterable[float]) -> Statistic | None:
    """Summarize the finite values. Return None if there are none."""
    finite = sorted([v for v in values if -LARGEST < v < LARGEST])
    if not finite:
        return None
    low = high = finite[0]
    if finite[0] != finite[-1]:
        low, _, high = statistics.quantiles(finite, n=4, method="inclusive")
    middle = statistics.median(finite)
    return Statistic(middle, statistics.fmean(finite), finite[0], finite[-1], high - low, len(finite))


def over_runs(repeats: Sequence[Statistic]) -> Statistic | None:
    """Summarize the statistics of several runs. Return None if there are none."""
    if not repeats:
        return None
    medians = [one.median for one in repeats]
    return Statistic(
        statistics.median(medians),
        statistics.fmean(medians),
        min(medians),
        max(medians),
        statistics.median(one.iqr for one in repeats),
        sum(one.n for one in repeats),
        tuple(medians),
        mean_interval(medians),
    )


@dataclass(frozen=True)
class AttemptReport:
    """One start of the training program: the iterations it logged, and how it ended."""

    log: str
    iterations: str
    finished: bool
    exit_line: str | None
    failure: Failure | None

    def as_json(self) -> dict[str, object]:
        return {
            "log": self.log,
            "iterations": self.iterations,
            "finished": self.finished,
            "exit": self.exit_line,
            "failure": self.failure and self.failure.as_json(),
        }


@dataclass(frozen=True)
class Speed:
    """The speed over the iterations that count. Statistics that the log does not determine are None.

    Each `..._source` says where its statistic comes from, and is None if the statistic is. `mfu` is relative to
    `mfu_denominator`. `timers_ms` has Megatron's timers by name, from the slowest rank, if the run had
    `--timing-log-level`.
    """

    step_time_ms: Statistic | None
    tflops_per_gpu: Statistic | None
    tflops_source: Literal["logged", "recomputed"] | None
    tflops_per_gpu_recomputed: Statistic | None
    tokens_per_s_per_gpu: Statistic | None
    tokens_source: Literal["step time", "logged"] | None
    mfu: Statistic | None
    mfu_denominator: Mapping[str, object] | None
    energy_j_per_gpu: Statistic | None
    timers_ms: Mapping[str, Statistic]


@dataclass(frozen=True)
class Training:
    """Progress and losses of the training: first and last values, and totals."""

    iterations: int
    iteration_last: int | None
    iterations_planned: int | None
    lines: int
    loss_first: float | None
    loss_last: float | None
    grad_norm_last: float | None
    nan_iterations: int
    skipped_iterations: int
    validations: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True)
class RunSetup:
    """The setup of a run: Megatron's arguments, the sizes derived from them, the GPU, and software versions.

    `dump` is the argument list that Megatron prints, empty if no log contains it.
    """

    arguments: Mapping[str, object]
    dump: Mapping[str, object]
    world_size: int | None
    seq_length: int | None
    global_batch_size: int | None
    flops_per_token: float | None
    parameters: int | None
    gpu: str | None
    dtype: Dtype
    versions: Mapping[str, str]

    @property
    def peak_tflops(self) -> float | None:
        return None if self.gpu is None else find_gpu(self.gpu).peak(self.dtype)

    def tokens_per_s_per_gpu(self, lines: IterationTable) -> list[float]:
        """Return the speed at each line, from its step time; NaN if the time or a size is unknown."""
        return self._per_s_per_gpu(lines, self.seq_length or math.nan)

    def samples_per_s_per_gpu(self, lines: IterationTable) -> list[float]:
        return self._per_s_per_gpu(lines, 1)

    def _per_s_per_gpu(self, lines: IterationTable, of_a_sample: float) -> list[float]:
        speeds = []
        for samples, ms in zip(lines.column("global_batch_size"), lines.column("step_time_ms"), strict=True):
            seconds = ms / 1e3 * (self.world_size or 0)
            speeds.append(samples * of_a_sample / seconds if seconds > 0 else math.nan)
        return speeds

    def as_json(self) -> dict[str, object]:
        fields = {name: value for name, value in vars(self).items() if name not in ("dump", "dtype")}
        fields["arguments"] = {name: self.arguments[name] for name in NOTEWORTHY if name in self.arguments}
        return fields


# Units of speed, most meaningful first. A ratio uses the first one that all runs of both rows have.
Unit = Literal["tokens/s/GPU", "samples/s/GPU", "iterations/s"]
UNITS: tuple[Unit, ...] = ("tokens/s/GPU", "samples/s/GPU", "iterations/s")


@dataclass(frozen=True)
class StudyPoint:
    """A run's position in its study: its value on each axis by recipe key, and the number of the repeat."""

    name: str
    point: Mapping[str, object]
    repeat: int = 1


class ReportField(NamedTuple):
    """A field that a plugin adds to `parse --json`, and the lines of text that show it."""

    value: Mapping[str, object]
    lines: tuple[str, ...]


@dataclass(frozen=True)
class RunReport:
    """Everything known about one run: its numbers, how they were obtained, and their sources.

    `steady_state` has the iteration lines themselves, and `more` has what plugins read from the logs. The fields from
    `name` on are for comparisons. `facts` has everything known about the setup: Megatron's arguments by name, gpu,
    world_size, nodes, precision, image, commit, software versions, `script`, `env NAME`, `config NAME` from
    `launch.config`, and `node set`, `GPU` and `driver` as reported by the nodes. `reference` is the speed quoted by
    the recipe, `sources` are the run folder or the logs, and `absent` says why a planned run never ran.
    """

    status: Status
    training: Training
    speed: Speed
    peak_memory_mib: float | None
    fp8: Mapping[str, object] | None
    setup: RunSetup
    machines: Machines
    attempts: tuple[AttemptReport, ...]
    failure: Failure | None
    notes: tuple[str, ...]
    steady_state: SteadyState
    more: Mapping[str, ReportField | None] = field(default_factory=dict)
    phases: tuple[PhaseReport, ...] = ()
    health: tuple[HealthProblem, ...] = ()
    goodput: Goodput | None = None
    gpu_use: tuple[GpuUse, ...] = ()
    name: str = ""
    facts: Mapping[str, object] = field(default_factory=dict)
    study: StudyPoint | None = None
    reference: Mapping[str, Any] | None = None
    command: str = ""
    sources: tuple[str, ...] = ()
    absent: str = ""

    @property
    def good(self) -> bool:
        """Whether the run has numbers to show: it ended as planned, with steady iterations left.

        Numbers of unhealthy runs are shown too, with a mark.
        """
        return self.status in ("ok", "unhealthy") and self.speed.step_time_ms is not None

    @property
    def why_no_number(self) -> str:
        """The reason why a run that is not `good` has no numbers."""
        if self.absent:
            return self.absent
        if self.status == "failed" and self.failure:
            return f"failed: {self.failure.code}"
        if self.status in ("ok", "unhealthy"):
            return "no steady iterations"
        return self.status.replace("_", " ")

    def speeds(self, unit: Unit) -> list[float]:
        """Return the speed at every kept line, or an empty list if the log does not determine it in this unit."""
        kept = self.steady_state.kept
        if unit == "tokens/s/GPU":
            speeds = self.tokens_per_s_per_gpu(kept)
        elif unit == "samples/s/GPU":
            speeds = self.setup.samples_per_s_per_gpu(kept)
        else:
            speeds = [1e3 / ms for ms in kept.column("step_time_ms") if ms]
        return [speed for speed in speeds if math.isfinite(speed) and speed > 0]

    def tokens_per_s_per_gpu(self, lines: IterationTable) -> Sequence[float]:
        """Return the speed at each line, computed as in `speed`; NaN if the log does not determine it."""
        if self.speed.tokens_source == "logged" or not self.setup.seq_length:
            return lines.column("tokens_per_s_per_gpu")
        return self.setup.tokens_per_s_per_gpu(lines)

    def tokens_until(self, iteration: int) -> int | None:
        """Return the number of tokens in the iterations up to this one, or None if the log does not determine it."""
        lines, samples, before = self.steady_state.lines, 0.0, 0
        # The batch size may ramp up: each line's batch size applies to the iterations since the line before it.
        for number, batch in zip(numbers_of(lines), lines.column("global_batch_size"), strict=True):
            samples += batch * (min(number, iteration) - before)
            before = min(number, iteration)
        known = 0 < samples < math.inf and self.setup.seq_length
        return int(samples) * known if known else None

    def as_json(self) -> dict[str, object]:
        """Return the flat fields of `parse --json`. Only failed runs have `failure`."""
        fields = {
            "status": self.status,
            **vars(self.training),
            **vars(self.speed),
            **self.setup.as_json(),
            "warmup_dropped": self.steady_state.warmup_dropped,
            "dropped": {reason: ranges(numbers) for reason, numbers in self.steady_state.dropped.items()},
            "rule": RULE,
        }
        for name in (
            "peak_memory_mib", "fp8", "machines", "attempts", "failure", "notes", "phases", "health",
            "goodput",
        ):  # fmt: skip
            fields[name] = getattr(self, name)
        fields |= dict.fromkeys(plugin_registry.absent("report_fields"))
        for name, more in self.more.items():
            fields[name] = more and more.value
        if self.status != "failed":
            del fields["failure"]
        return json_mapping(fields)


@dataclass(frozen=True)
class PhaseReport:
    """One phase of a run, iterations `begin` + 1 to `end`, with a report on its own processes only."""

    name: str
    begin: int
    end: int | None
    report: RunReport

    @property
    def span(self) -> str:
        return f"{self.begin + 1}-{self.end}"

    @property
    def precision(self) -> str:
        """The precision and, for FP8, whether it verifiably ran."""
        fp8 = self.report.fp8
        if fp8 is None:
            return "unknown"
        if not fp8["requested"]:
            return "not requested"
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

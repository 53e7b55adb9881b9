"""Logs of one run -> the numbers of that run, with everything that they rest on.

Units: milliseconds, dense model TFLOP/s per GPU, tokens per second per GPU, MiB; MFU is a fraction of the stated peak.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import starmap
from pathlib import Path
from typing import Literal

from fp8launch.diagnostics import error
from fp8launch.injob.supervisor.health_rules import LIMITS, HealthLimits, HealthProblem
from fp8launch.logs import ParsedLog, attempts_of, read_log
from fp8launch.logs.field_names import TIMER_PREFIX
from fp8launch.report.health import health_of
from fp8launch.report.machines import machines_of
from fp8launch.report.phases import PhaseSpan, by_phase
from fp8launch.report.run_notes import run_notes
from fp8launch.report.run_report import PhaseReport, RunReport, Statistic, statistic
from fp8launch.report.run_setup import RunSetup, positive, setup_of
from fp8launch.report.run_status import attempt_of, status_of, status_of_phases
from fp8launch.report.run_totals import count_of, nan_lines, parameters_of, peak_memory_mib, validations_of
from fp8launch.report.steady_state import Line, SteadyState, field_names, select_steady_state, values
from fp8launch.report.tensor_stats import tensor_stats_of
from fp8launch.report.verify import precision_asked_for, verify
from fp8launch.rundir.attempts import HealthAction

_NOTEWORTHY = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "seq_length",
    "num_experts", "micro_batch_size", "global_batch_size", "tensor_model_parallel_size",
    "pipeline_model_parallel_size", "context_parallel_size", "expert_model_parallel_size", "data_parallel_size",
    "use_distributed_optimizer", "use_megatron_fsdp", "recompute_granularity", "train_iters", "log_interval",
    "transformer_impl", "attention_backend",
)  # fmt: skip
# Fields that belong to one precision: a run in phases takes them from its longest phase.
_FROM_LONGEST_PHASE = (
    "step_time_ms", "tflops_per_gpu", "tflops_source", "tflops_per_gpu_recomputed", "tokens_per_s_per_gpu",
    "tokens_source", "mfu", "mfu_denominator", "energy_j_per_gpu", "timers_ms", "warmup_dropped", "dropped", "fp8",
    "seq_length", "flops_per_token", "arguments", "argument_dump", "notes",
)  # fmt: skip


def _noteworthy(arguments: Mapping[str, object]) -> dict[str, object]:
    return {name: arguments[name] for name in _NOTEWORTHY if name in arguments}


def _timers(lines: Sequence[Line]) -> dict[str, Statistic]:
    """Megatron's timers over the iterations that count, by Megatron's names."""
    found = {}
    for name in field_names(lines, TIMER_PREFIX):
        value = statistic(values(lines, name))
        if value:
            found[name.removeprefix(TIMER_PREFIX)] = value
    return found


def read_logs(paths: Sequence[Path]) -> list[ParsedLog]:
    """Read logs. Raises UserError for one that cannot be read."""
    logs = []
    for path in paths:
        try:
            logs.append(read_log(path))
        except OSError as problem:
            reason = problem.strerror or str(problem)
            raise error("unreadable-log", f"cannot read {path}: {reason}", where=str(path)) from None
    return logs


def parse_paths(
    paths: Sequence[Path],
    *,
    gpu: str | None = None,
    world_size: int | None = None,
    arguments: Mapping[str, object] | None = None,
) -> RunReport:
    """Report on a run from its logs, one per attempt, oldest first. Raises UserError for an unreadable log."""
    return summarise(read_logs(paths), gpu=gpu, world_size=world_size, arguments=arguments)


def summarise_run(
    logs: Sequence[ParsedLog],
    spans: Sequence[PhaseSpan] = (),
    *,
    gpu: str | None = None,
    world_size: int | None = None,
    arguments: Mapping[str, object] | None = None,
    limits: HealthLimits = LIMITS,
    actions: Sequence[HealthAction] = (),
) -> RunReport:
    """Report on a run that may have phases: its speed is that of the longest phase, and each has its own report.

    `actions` are what its jobs did about its health.
    """
    whole = summarise(logs, gpu=gpu, world_size=world_size, arguments=arguments, limits=limits, actions=actions)
    parts = by_phase(logs, spans)
    if not parts:
        return whole
    reports = []
    for span, mine in parts:
        stated = span.arguments or arguments
        report = summarise(mine, gpu=gpu, world_size=world_size, arguments=stated, actions=actions)
        reports.append(PhaseReport(span.name, span.begin, span.end, report))
    longest = max(reports, key=lambda phase: (phase.report.step_time_ms is not None, phase.report.iterations))
    numbers = {name: getattr(longest.report, name) for name in _FROM_LONGEST_PHASE}
    if len(reports) > 1:
        note = f"speed is that of phase {longest.name}, iterations {longest.span}; each phase has its own"
        numbers["notes"] = (note, *longest.report.notes)
    planned = None
    if spans:
        planned = spans[-1].name
    status, failure = status_of_phases(attempts_of(logs), whole.steady_state, reports, planned, whole.health)
    steady = replace(whole.steady_state, kept=longest.report.steady_state.kept)
    return replace(whole, status=status, failure=failure, phases=tuple(reports), steady_state=steady, **numbers)


def summarise(
    logs: ParsedLog | Sequence[ParsedLog],
    *,
    gpu: str | None = None,
    world_size: int | None = None,
    arguments: Mapping[str, object] | None = None,
    limits: HealthLimits = LIMITS,
    actions: Sequence[HealthAction] = (),
) -> RunReport:
    """Report on a run of one precision.

    `gpu` names a GPU of `hardware.gpus`; without it, the one that the nodes reported counts. `world_size` and
    `arguments` (Megatron's names) say what the run was started with, where the log does not.
    """
    if isinstance(logs, ParsedLog):
        logs = [logs]
    attempts = attempts_of(logs)
    given_up = {action.attempt: action.rewound_to for action in actions if action.rewound_to is not None}
    steady = select_steady_state(attempts, given_up)
    machines = machines_of(logs)
    logged_length = None
    if steady.lines:
        logged_length = steady.lines[-1].value("seq_length")
    setup = setup_of(attempts, logged_length, gpu or machines.gpu, world_size, arguments)
    verification = verify(attempts, arguments)
    fp8 = precision_asked_for(setup.arguments, verification)
    if fp8 and fp8["requested"] and setup.dtype == "bf16":
        setup = replace(setup, dtype="fp8")  # the job's probe reports it; the arguments are not known
    speed = _speed(steady.kept, setup)
    validations = [one for log in logs for one in log.validations]
    health = (*health_of(steady, validations, setup.arguments, limits), *map(_acted_upon, actions))
    status, failure = status_of(attempts, steady, verification, health)
    ends = _ends(steady, setup)
    return RunReport(
        status=status,
        iterations=steady.iterations_covered,
        iteration_last=ends.iteration,
        iterations_planned=ends.planned,
        lines=len(steady.lines),
        step_time_ms=statistic(line.step_time_ms for line in steady.kept),
        tflops_per_gpu=speed.tflops,
        tflops_source=speed.tflops_source,
        tflops_per_gpu_recomputed=speed.tflops_recomputed,
        tokens_per_s_per_gpu=speed.tokens,
        tokens_source=speed.tokens_source,
        mfu=speed.mfu,
        mfu_denominator=setup.mfu_denominator(),
        peak_memory_mib=peak_memory_mib(logs, steady.kept),
        energy_j_per_gpu=statistic(values(steady.kept, "energy_j_per_gpu")),
        timers_ms=_timers(steady.kept),
        loss_first=ends.loss_first,
        loss_last=ends.loss_last,
        grad_norm_last=ends.grad_norm,
        nan_iterations=max(count_of(attempts, steady.lines, "nan_iterations"), nan_lines(steady.lines)),
        skipped_iterations=count_of(attempts, steady.lines, "skipped_iterations"),
        warmup_dropped=steady.warmup_dropped,
        dropped=steady.dropped,
        validations=validations_of(logs),
        fp8=fp8,
        gpu=setup.gpu,
        machines=machines,
        tensor_stats=tensor_stats_of(logs),
        world_size=setup.world_size,
        seq_length=setup.seq_length,
        global_batch_size=ends.global_batch_size,
        flops_per_token=setup.flops_per_token,
        parameters=parameters_of(attempts),
        versions=setup.versions,
        arguments=_noteworthy(setup.arguments),
        argument_dump=setup.dump,
        attempts=tuple(starmap(attempt_of, attempts)),
        failure=failure,
        notes=tuple(run_notes(logs, attempts, steady, setup, gpu, machines)),
        steady_state=steady,
        health=health,
    )


def _acted_upon(action: HealthAction) -> HealthProblem:
    """Return a problem that the job has dealt with."""
    return HealthProblem(action.code, "warning", action.sentence, action.first, action.last)


@dataclass(frozen=True)
class _Ends:
    """Values of the first and the last line of a run."""

    iteration: int | None
    planned: int | None
    loss_first: float | None
    loss_last: float | None
    grad_norm: float | None
    global_batch_size: int | None


def _ends(steady: SteadyState, setup: RunSetup) -> _Ends:
    if not steady.lines:
        planned = positive(setup.arguments.get("train_iters"))
        batch = positive(setup.arguments.get("global_batch_size"))
        return _Ends(None, planned, None, None, None, batch)
    last = steady.lines[-1]
    record = last.record()
    return _Ends(
        iteration=last.number,
        planned=record.planned,
        loss_first=steady.lines[0].record().loss,
        loss_last=record.loss,
        grad_norm=_finite(last.value("grad_norm")),
        global_batch_size=positive(last.global_batch_size),
    )


@dataclass(frozen=True)
class _Speed:
    """The speed of a run. A source belongs to its statistic: it is None without that."""

    tokens: Statistic | None
    tokens_source: Literal["step time", "logged"] | None
    tflops: Statistic | None
    tflops_source: Literal["logged", "recomputed"] | None
    tflops_recomputed: Statistic | None
    mfu: Statistic | None


def _speed(kept: Sequence[Line], setup: RunSetup) -> _Speed:
    """Tokens/s from the step time, else as logged; TFLOP/s as logged, else from tokens/s and the FLOPs per token."""
    tokens = [_tokens_per_s_per_gpu(line, setup) for line in kept]
    tokens_source: Literal["step time", "logged"] | None = "step time"
    if not any(map(math.isfinite, tokens)):
        tokens = values(kept, "tokens_per_s_per_gpu")
        tokens_source = "logged"
    tokens_statistic = statistic(tokens)
    if tokens_statistic is None:
        tokens_source = None
    per_token = setup.flops_per_token
    recomputed: list[float] = []
    if per_token:
        recomputed = [t * per_token / 1e12 for t in tokens]
    # A CPU run prints 0.0 for a throughput too small to show.
    tflops = [v for v in values(kept, "tflops_per_gpu") if v > 0]
    tflops_source: Literal["logged", "recomputed"] | None = "logged"
    if not any(map(math.isfinite, tflops)):
        tflops_source, tflops = "recomputed", recomputed
    tflops_statistic = statistic(tflops)
    if tflops_statistic is None:
        tflops_source = None
    peak = setup.peak_tflops
    mfu = None
    if peak:
        mfu = statistic(t / peak for t in tflops)
    return _Speed(
        tokens=tokens_statistic,
        tokens_source=tokens_source,
        tflops=tflops_statistic,
        tflops_source=tflops_source,
        tflops_recomputed=statistic(recomputed),
        mfu=mfu,
    )


def _tokens_per_s_per_gpu(line: Line, setup: RunSetup) -> float:
    if not setup.seq_length or not setup.world_size:
        return math.nan
    return line.global_batch_size * setup.seq_length / (line.step_time_ms / 1e3 * setup.world_size)


def _finite(value: float) -> float | None:
    if math.isfinite(value):
        return value
    return None

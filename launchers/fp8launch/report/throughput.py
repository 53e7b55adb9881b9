"""Compute a run's speed, losses and status from its logs.

Units: milliseconds, dense model TFLOP/s per GPU, tokens per second per GPU, MiB. MFU is a fraction of the stated peak.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import starmap
from pathlib import Path
from typing import Literal

from fp8launch import plugin_registry
from fp8launch.diagnostics import error
from fp8launch.hardware.gpus import Dtype
from fp8launch.injob.supervisor.health_rules import IS_NAN, LIMITS, SLOW_NODE, HealthLimits
from fp8launch.logs import Iteration, IterationTable, LoggedProcesses, ParsedLog, attempts_of, read_log
from fp8launch.logs.field_names import NOT_FINITE, TIMER_PREFIX
from fp8launch.logs.identify import foreign_program, why_no_iterations
from fp8launch.megatron.flops import flops_per_token, miscounted
from fp8launch.report.machines import Machines, machines_of
from fp8launch.report.outcome import attempt_of, contradiction, health_of, status_of
from fp8launch.report.phases import PhaseSpan, by_phase
from fp8launch.report.run_report import (
    LARGEST,
    PhaseReport,
    RunReport,
    RunSetup,
    Speed,
    Statistic,
    Training,
    statistic,
)
from fp8launch.report.shared_gpus import gpu_use
from fp8launch.report.steady_state import SteadyState, select_steady_state
from fp8launch.report.verify import NOT_PARTITIONED, NOT_RUNNING, precision_asked_for, verify
from fp8launch.rundir.attempts import HealthAction
from fp8launch.wording import counted


def setup_of(
    attempts: LoggedProcesses,
    last: Iteration | None,
    gpu: str | None,
    world_size: int | None,
    stated: Mapping[str, object] | None,
) -> RunSetup:
    """Determine the setup of a run from its logs and from the arguments it was started with (`stated`).

    `last` is the last iteration line. It has the sizes for logs that do not contain the arguments.
    """
    dump: Mapping[str, object] = {}
    versions: Mapping[str, str] = {}
    padded = printed = parameters = None
    for _, process in attempts:
        head = process.head
        dump = head.arguments or dump
        versions = head.versions or versions
        if head.padded_vocab_size is not None:
            padded = head.padded_vocab_size
        if head.world_size is not None:
            printed = head.world_size
        if head.parameters:
            # Each model-parallel rank prints its own count, without the experts of other ranks.
            parameters = sum(head.parameters.values())
    arguments = {**(stated or {}), **dump}
    model = {**arguments, "padded_vocab_size": padded} if padded else arguments
    seq_length = positive(arguments.get("seq_length"))
    if seq_length is None:
        seq_length = positive(last.values.get("seq_length")) if last else None
    # fp16 has the same peak as bf16 on every GPU in the table.
    dtype: Dtype = "bf16"
    if arguments.get("fp4"):
        dtype = "fp4"
    elif arguments.get("fp8") or arguments.get("fp8_format"):
        dtype = "fp8"
    return RunSetup(
        arguments=arguments,
        dump=dump,
        world_size=printed or positive(arguments.get("world_size")) or world_size,
        seq_length=seq_length,
        global_batch_size=positive((last.values if last else arguments).get("global_batch_size")),
        flops_per_token=flops_per_token(model),
        parameters=parameters,
        gpu=gpu,
        dtype=dtype,
        versions=versions,
    )


def positive(value: object) -> int | None:
    """Return a positive number as an integer, or None for anything else."""
    if isinstance(value, int | float) and math.isfinite(value) and value > 0:
        return int(value)
    return None


def count_of(attempts: LoggedProcesses, lines: IterationTable, name: str) -> int:
    """Sum a counter over all lines.

    Megatron does not reset its counters after the first line of a process, so the second line includes the first.
    """
    second = {}
    for i, (log, process) in enumerate(attempts):
        number = log.iterations.column("number")
        if len(process.rows) > 1:
            second[i, number[process.rows[0]]] = (i, number[process.rows[1]])
    counts = {}
    for attempt, number, count in zip(*map(lines.column, ("attempt", "number", name)), strict=True):
        if 0 < count < LARGEST:
            counts[attempt, number] = count
    total = 0
    for key, count in counts.items():
        if key not in second or counts.get(second[key], 0.0) < count:
            total += int(count)
    return total


def peak_memory_mib(attempts: LoggedProcesses, kept: IterationTable) -> float | None:
    """Return the largest peak in MiB that a rank printed, else the memory in a fork's iteration lines."""
    # Attempts without lines that count may have had another size.
    counting = set(kept.column("attempt")) or range(len(attempts))
    peaks: list[float] = []
    for i, (log, process) in enumerate(attempts):
        if i in counting:
            peaks += (mib for offset, mib in log.memory if process.begin <= offset < process.end)
    peak = max(peaks, default=0.0)
    if not peak:
        used = list(filter(math.isfinite, kept.column("memory_used_gib")))
        peak = max(used, default=0.0) * 1024
    return peak or None


def run_notes(
    logs: Sequence[ParsedLog],
    steady: SteadyState,
    setup: RunSetup,
    speed: Speed,
    stated_gpu: str | None,
    machines: Machines,
) -> list[str]:
    """Return notes on a run. `stated_gpu` is the GPU given by the user."""
    notes = list(steady.notes)
    if setup.gpu and not setup.peak_tflops:
        notes.append(f"{setup.gpu} has no {setup.dtype} tensor cores, so no MFU")
    if speed.mfu and speed.mfu.median > 1:
        notes.append("an MFU above 100 % is impossible: the GPU model, the number of GPUs or the TFLOP/s are wrong")
    missing = []
    if not setup.world_size:
        missing.append("world size")
    if not setup.seq_length:
        missing.append("sequence length")
    if steady.lines and missing:
        given = "" if speed.tokens_per_s_per_gpu else ", so tokens/s is unknown (`parse` has an option for each)"
        notes.append(f"the log does not contain the {' and '.join(missing)}{given}")
    duplicates = sum(log.duplicates for log in logs)
    if duplicates:
        notes.append(f"{counted(duplicates, 'repeated iteration line')} left out")
    if stated_gpu and machines.gpu not in (None, stated_gpu):
        notes.append(f"the GPU is set to {stated_gpu}, but the nodes have {', '.join(machines.gpus)}")
    if steady.lines:
        notes += miscounted(setup.arguments)
    else:
        notes += _without_iterations(logs)
    return notes


def _without_iterations(logs: Sequence[ParsedLog]) -> Iterator[str]:
    """Describe each log without iterations. A log with a failure needs that only if another program wrote it."""
    for log in logs:
        failed = any(process.ending.failure for process in log.processes)
        with suppress(OSError):  # the log may have been removed since it was read
            if not failed:
                yield f"{log.path.name}: {why_no_iterations(log.path)}"
            elif program := foreign_program(log.path):
                yield f"{log.path.name}: this is a log of {program}, from which only failures are read"


def _timers(lines: IterationTable) -> dict[str, Statistic]:
    """Return statistics of Megatron's timers over the iterations that count, by timer name."""
    found = {}
    for name in lines.names_with(TIMER_PREFIX):
        value = statistic(lines.column(name))
        if value:
            found[name.removeprefix(TIMER_PREFIX)] = value
    return found


def read_logs(paths: Sequence[Path]) -> list[ParsedLog]:
    """Read logs. Raises UserError if one cannot be read."""
    logs = []
    for path in paths:
        try:
            logs.append(read_log(path))
        except OSError as problem:
            reason = problem.strerror or str(problem)
            raise error("unreadable-log", f"cannot read {path}: {reason}", where=str(path)) from None
    return logs


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
    """Report on a run that may have phases. Each phase gets a report, and the longest one provides the run's speed.

    `actions` are the actions that the run's jobs took because of its health.
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
    longest = max(
        reports, key=lambda phase: (phase.report.speed.step_time_ms is not None, phase.report.training.iterations)
    )
    notes = longest.report.notes
    if len(reports) > 1:
        note = f"the speed is from phase {longest.name}, iterations {longest.span}; each phase has its own"
        notes = (note, *notes)
    failures = [phase.report.failure for phase in reports if phase.report.failure]
    contradicted = next((one for one in failures if one.code in (NOT_RUNNING, NOT_PARTITIONED)), None)
    to_come = bool(spans) and reports[-1].name != spans[-1].name
    status, failure = status_of(attempts_of(logs), whole.steady_state, contradicted, whole.health, to_come)
    # Results that depend on the precision come from the longest phase.
    steady, setup = longest.report.steady_state, longest.report.setup
    return replace(
        whole,
        status=status,
        failure=failure,
        phases=tuple(reports),
        speed=longest.report.speed,
        fp8=longest.report.fp8,
        notes=notes,
        setup=replace(
            whole.setup,
            arguments=setup.arguments,
            dump=setup.dump,
            seq_length=setup.seq_length,
            flops_per_token=setup.flops_per_token,
        ),
        steady_state=replace(whole.steady_state, kept=steady.kept, dropped=steady.dropped),
    )


def summarise(
    logs: Sequence[ParsedLog],
    *,
    gpu: str | None = None,
    world_size: int | None = None,
    arguments: Mapping[str, object] | None = None,
    limits: HealthLimits = LIMITS,
    actions: Sequence[HealthAction] = (),
) -> RunReport:
    """Report on a run of one precision.

    `gpu` names a GPU in `hardware.gpus`; by default, it is the GPU that the nodes report. `world_size` and `arguments`
    (Megatron's names) are what the run was started with, for logs that do not contain them.
    """
    attempts = attempts_of(logs)
    given_up = {action.attempt: action.rewound_to for action in actions if action.rewound_to is not None}
    steady = select_steady_state(attempts, given_up)
    machines = machines_of(logs)
    last = steady.lines[-1] if steady.lines else None
    # Use the sizes of the attempt that logged the last line. A later one may have failed with other sizes.
    measured = [*attempts, attempts[int(steady.lines.column("attempt")[-1])]] if last else attempts
    setup = setup_of(measured, last, gpu or machines.gpu, world_size, arguments)
    verification = verify(attempts, arguments)
    fp8 = precision_asked_for(setup.arguments, verification)
    if fp8 and fp8["requested"] and setup.dtype == "bf16":
        setup = replace(setup, dtype="fp8")  # reported by the job's probe; the arguments are unknown
    validations = [one for log in logs for one in log.validations]
    acted_upon = [action.problem for action in actions]
    if any(problem.code == SLOW_NODE for problem in acted_upon):
        # The job saw the slow node as it happened. The whole log may no longer show it clearly.
        limits = replace(limits, ignore=(*limits.ignore, SLOW_NODE))
    health = (*health_of(steady, attempts, validations, setup.arguments, limits), *acted_upon)
    status, failure = status_of(attempts, steady, contradiction(logs, verification), health)
    speed = _speed(steady.kept, setup)
    return RunReport(
        status=status,
        training=_training(logs, attempts, steady, setup),
        speed=speed,
        peak_memory_mib=peak_memory_mib(attempts, steady.kept),
        fp8=fp8,
        setup=setup,
        machines=machines,
        attempts=tuple(starmap(attempt_of, attempts)),
        failure=failure,
        notes=tuple(run_notes(logs, steady, setup, speed, gpu, machines)),
        steady_state=steady,
        more={name: read(logs) for name, read in plugin_registry.loaded("report_fields")},
        health=health,
        gpu_use=tuple(filter(None, map(gpu_use, logs))),
    )


def _training(logs: Sequence[ParsedLog], attempts: LoggedProcesses, steady: SteadyState, setup: RunSetup) -> Training:
    lines = steady.lines
    first = last = grad_norm = None
    if lines:
        first, last = lines[0], lines[-1]
        grad_norm = last.values.get("grad_norm")
    nan_lines = lines.column(NOT_FINITE).count(IS_NAN)  # not every program counts such iterations
    return Training(
        iterations=steady.iterations_covered,
        iteration_last=last.number if last else None,
        iterations_planned=last.planned if last else positive(setup.arguments.get("train_iters")),
        lines=len(lines),
        loss_first=first.loss if first else None,
        loss_last=last.loss if last else None,
        grad_norm_last=grad_norm if grad_norm is not None and math.isfinite(grad_norm) else None,
        nan_iterations=max(count_of(attempts, lines, "nan_iterations"), nan_lines),
        skipped_iterations=count_of(attempts, lines, "skipped_iterations"),
        validations=tuple(
            {"iteration": one.iteration, "name": one.name, "losses": dict(one.losses)}
            for log in logs
            for one in log.validations
        ),
    )


def _speed(kept: IterationTable, setup: RunSetup) -> Speed:
    """Compute tokens/s from the step time, else take the logged value. Take TFLOP/s as logged, else compute it."""
    tokens = [t for t in setup.tokens_per_s_per_gpu(kept) if t > 0]
    tokens_source: Literal["step time", "logged"] = "step time"
    if not any(map(math.isfinite, tokens)):
        tokens_source, tokens = "logged", [t for t in kept.column("tokens_per_s_per_gpu") if t > 0]
    tokens_statistic = statistic(tokens)
    per_token = setup.flops_per_token
    recomputed = [t * per_token / 1e12 for t in tokens] if per_token else []
    # CPU runs print 0.0 if the throughput is too small to show.
    tflops = [v for v in kept.column("tflops_per_gpu") if v > 0]
    tflops_source: Literal["logged", "recomputed"] = "logged"
    if not any(map(math.isfinite, tflops)):
        tflops_source, tflops = "recomputed", recomputed
    tflops_statistic = statistic(tflops)
    peak = setup.peak_tflops
    return Speed(
        step_time_ms=statistic(kept.column("step_time_ms")),
        tflops_per_gpu=tflops_statistic,
        tflops_source=tflops_source if tflops_statistic else None,
        tflops_per_gpu_recomputed=statistic(recomputed),
        tokens_per_s_per_gpu=tokens_statistic,
        tokens_source=tokens_source if tokens_statistic else None,
        mfu=statistic(t / peak for t in tflops) if peak else None,
        mfu_denominator={"gpu": setup.gpu, "dtype": setup.dtype, "peak_tflops": peak} if peak else None,
        energy_j_per_gpu=statistic(kept.column("energy_j_per_gpu")),
        timers_ms=_timers(kept),
    )

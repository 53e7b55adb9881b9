"""Logs of one run -> the numbers of that run, with everything that they rest on.

Units: milliseconds, dense model TFLOP/s per GPU, tokens per second per GPU, MiB; MFU is a fraction of the stated peak.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

from fp8launch.hardware.gpus import Dtype
from fp8launch.hardware.gpus import gpu as find_gpu
from fp8launch.logs import Failure, ParsedLog, Process, read_log
from fp8launch.logs.regions import line_number
from fp8launch.megatron.flops import flops_per_token, miscounted
from fp8launch.problems import error
from fp8launch.report.selection import RULE, Line, Selection, ranges, select, values
from fp8launch.report.statistics import LARGEST, Statistic, statistic
from fp8launch.report.verify import NOT_RUNNING, Verification, verify

T = TypeVar("T")
Status = Literal["ok", "incomplete", "failed", "no_data"]

_NOTEWORTHY = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "seq_length",
    "num_experts", "micro_batch_size", "global_batch_size", "tensor_model_parallel_size",
    "pipeline_model_parallel_size", "context_parallel_size", "expert_model_parallel_size", "data_parallel_size",
    "use_distributed_optimizer", "use_megatron_fsdp", "recompute_granularity", "train_iters", "log_interval",
    "transformer_impl", "attention_backend",
)  # fmt: skip


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

    def as_json(self) -> dict[str, object]:
        """The contract of `parse --json`, and more; `failure` is there only for a failed run."""
        out: dict[str, object] = {}
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if isinstance(value, Statistic | Failure):
                value = value.as_json()
            out[name] = value
        out["dropped"] = {reason: ranges(numbers) for reason, numbers in self.dropped.items()}
        out["validations"] = list(self.validations)
        out["attempts"] = [a.as_json() for a in self.attempts]
        out["notes"] = list(self.notes)
        if self.status != "failed":
            del out["failure"]
        return {name: _plain(value) for name, value in out.items()}


def parse_paths(
    paths: Sequence[Path],
    *,
    gpu: str | None = None,
    world_size: int | None = None,
    arguments: Mapping[str, object] | None = None,
) -> RunReport:
    """The report of a run from its logs, one per attempt, oldest first. UserError for a log that cannot be read."""
    return summarise(read_logs(paths), gpu=gpu, world_size=world_size, arguments=arguments)


def read_logs(paths: Sequence[Path]) -> list[ParsedLog]:
    """UserError for a log that cannot be read."""
    logs = []
    for path in paths:
        try:
            logs.append(read_log(path))
        except OSError as problem:
            reason = problem.strerror or str(problem)
            raise error("unreadable-log", f"cannot read {path}: {reason}", where=str(path)) from None
    return logs


def summarise(
    logs: ParsedLog | Sequence[ParsedLog],
    *,
    gpu: str | None = None,
    world_size: int | None = None,
    arguments: Mapping[str, object] | None = None,
) -> RunReport:
    """What the logs of one run say. `gpu` names a GPU of `hardware.gpus`; the log itself never does.

    `world_size` and `arguments` (Megatron's names) are what the run was started with, used where the log does not
    say so.
    """
    logs = [logs] if isinstance(logs, ParsedLog) else list(logs)
    attempts = [(log, process) for log in logs for process in log.processes]
    selection = select(attempts)
    args = {**(arguments or {}), **_last_arguments(attempts)}
    world = _last(p.head.world_size for _, p in attempts) or _positive(args.get("world_size")) or world_size
    padded = _last(p.head.padded_vocab_size for _, p in attempts)
    per_token = flops_per_token({**args, "padded_vocab_size": padded} if padded else args)
    seq_length = _positive(args.get("seq_length"))
    verification = verify(attempts)
    requested = _fp8(args, verification)

    kept = selection.kept
    tokens_per_s = [_tokens_per_s_per_gpu(line, seq_length, world) for line in kept]
    tokens_source: Literal["step time", "logged"] | None = "step time"
    if not any(map(math.isfinite, tokens_per_s)):
        tokens_per_s = values(kept, "tokens_per_s_per_gpu")
        tokens_source = "logged"
    # A CPU run prints 0.0 where it means too little to show.
    logged = [v if v > 0 else math.nan for v in values(kept, "tflops_per_gpu")]
    recomputed = [t * per_token / 1e12 if per_token else math.nan for t in tokens_per_s]
    tflops_source: Literal["logged", "recomputed"] = "logged" if any(map(math.isfinite, logged)) else "recomputed"
    tflops = logged if tflops_source == "logged" else recomputed
    dtype: Dtype = "fp4" if args.get("fp4") else "fp8" if requested and requested["requested"] else "bf16"
    peak = find_gpu(gpu).peak(dtype) if gpu else None
    tokens = statistic(tokens_per_s)
    status, failure = _status(attempts, selection)
    if status in ("ok", "incomplete") and verification.refuted:
        status, failure = "failed", _fp8_not_running(logs, verification)
    lines = selection.lines
    last = lines[-1] if lines else None

    return RunReport(
        status=status,
        iterations=_iterations_covered(selection),
        iteration_last=last.number if last else None,
        iterations_planned=_planned(last, args),
        lines=len(lines),
        step_time_ms=statistic(line.step_time_ms for line in kept),
        tflops_per_gpu=statistic(tflops),
        tflops_source=tflops_source if statistic(tflops) else None,
        tflops_per_gpu_recomputed=statistic(recomputed),
        tokens_per_s_per_gpu=tokens,
        tokens_source=tokens_source if tokens else None,
        mfu=statistic(t / peak for t in tflops) if peak else None,
        mfu_denominator={"gpu": gpu, "dtype": dtype, "peak_tflops": peak} if peak else None,
        peak_memory_mib=_peak_memory(logs, kept),
        energy_j_per_gpu=statistic(values(kept, "energy_j_per_gpu")),
        loss_first=lines[0].record().loss if lines else None,
        loss_last=last.record().loss if last else None,
        grad_norm_last=_finite(last.value("grad_norm")) if last else None,
        nan_iterations=_count(attempts, lines, "nan_iterations"),
        skipped_iterations=_count(attempts, lines, "skipped_iterations"),
        warmup_dropped=selection.warmup_dropped,
        dropped=selection.dropped,
        validations=tuple(
            {"iteration": v.iteration, "name": v.name, "losses": dict(v.losses)}
            for log in logs
            for v in log.validations
        ),
        fp8=requested,
        gpu=gpu,
        world_size=world,
        seq_length=seq_length,
        global_batch_size=_positive(last.global_batch_size) if last else _positive(args.get("global_batch_size")),
        flops_per_token=per_token,
        parameters=_parameters(attempts),
        versions=_last(p.head.versions or None for _, p in attempts) or {},
        arguments={k: args[k] for k in _NOTEWORTHY if k in args},
        attempts=tuple(_attempt(log, process) for log, process in attempts),
        failure=failure,
        notes=(
            *_notes(logs, selection, attempts, gpu, dtype, peak, world, seq_length),
            *(miscounted(args) if lines else ()),
        ),
    )


def _status(attempts: Sequence[tuple[ParsedLog, Process]], selection: Selection) -> tuple[Status, Failure | None]:
    """ok: the end was as planned; failed: the log shows why it died; incomplete: neither; no_data: nothing at all.

    The last process decides. A file without any sign of training, such as the log of a rank that prints nothing,
    does not.
    """
    telling = [(log, p) for log, p in attempts if p.rows or p.head.arguments or p.ending.failure or p.ending.finished]
    if not telling:
        return "no_data", None
    ending = telling[-1][1].ending
    if ending.failure:
        return "failed", ending.failure
    if not selection.lines:
        return "no_data", None
    diverged = _diverged(selection.lines)
    if diverged:
        return "failed", diverged
    last = selection.lines[-1].record()
    planned_exit = ending.exit_line is not None and not re.search("SIGTERM|signal", ending.exit_line)
    done = ending.finished and ending.exit_line is None
    return ("ok" if done or planned_exit or last.number >= last.planned else "incomplete"), None


def _diverged(lines: Sequence[Line]) -> Failure | None:
    """A run whose last line is NaN trained nothing since the first NaN that it did not recover from."""

    def is_nan(line: Line) -> bool:
        values = line.record().values
        # Megatron leaves a NaN loss out of its line; forks print it.
        return values.get("nan_iterations", 0) > 0 or any(math.isnan(v) for v in values.values())

    bad = None
    for line in reversed(lines):
        if not is_nan(line):
            break
        bad = line
    if bad is None:
        return None
    text = f"loss or gradient is NaN from iteration {bad.number} to the end"
    advice = "lower the learning rate, lengthen the warm-up, or use a finer FP8 recipe"
    offset = int(bad.value("offset"))
    return Failure("nan", text, advice, depth=0, offset=offset, line=line_number(bad.log.path, offset))


def _iterations_covered(selection: Selection) -> int:
    """How many iterations the lines stand for: with a log interval of 10 a line stands for ten."""
    spans: dict[int, list[int]] = {}
    for line in selection.lines:
        spans.setdefault(line.attempt, [line.number, line.number])[1] = line.number
    covered, end = 0, -1
    for first, last in sorted(spans.values()):
        covered += max(0, last - max(first, end + 1) + 1)
        end = max(end, last)
    return covered


def _tokens_per_s_per_gpu(line: Line, seq_length: int | None, world: int | None) -> float:
    if not seq_length or not world:
        return math.nan
    return line.global_batch_size * seq_length / (line.step_time_ms / 1e3 * world)


def _fp8(args: Mapping[str, object], found: Verification) -> dict[str, object] | None:
    """What the arguments asked for, whether it ran, and how we know; None where the log says nothing of either."""
    kind = args.get("fp8", args.get("fp8_format"))
    fp4 = args.get("fp4")
    if not found.findings and not {"fp8", "fp4", "fp8_format"} & set(args):
        return None
    bf16_layers = None
    if args.get("first_last_layers_bf16"):
        bf16_layers = {"start": args.get("num_layers_at_start_in_bf16"), "end": args.get("num_layers_at_end_in_bf16")}
    return {
        "requested": found.asked or bool(kind or fp4),
        "recipe": args.get("fp4_recipe") if fp4 else args.get("fp8_recipe") if kind else None,
        "format": fp4 or kind or None,
        "param_gather": bool((args.get("fp8_param_gather") or args.get("fp4_param_gather")) and (kind or fp4)),
        "bf16_layers": bf16_layers,
        "verified": found.verdict == "verified",
        "verdict": found.verdict,
        "evidence": found.strongest.kind if found.strongest else "arguments",
        "findings": [f.as_json() for f in found.findings],
        "warnings": list(found.warnings),
    }


def _fp8_not_running(logs: Sequence[ParsedLog], found: Verification) -> Failure:
    finding = found.strongest
    place = next(
        ((log, e.offset) for log in logs for e in log.evidence if finding and e.offset == finding.offset), None
    )
    text = f"{found.recipe} was asked for and did not run: {finding.text if finding else ''}"
    advice = "the speed is that of bf16: see `fp8launch verify`; Transformer Engine's layers alone look at the format"
    line = line_number(place[0].path, place[1]) if place else None
    return Failure(NOT_RUNNING, text, advice, depth=0, offset=place[1] if place else 0, line=line)


def _count(attempts: Sequence[tuple[ParsedLog, Process]], lines: Sequence[Line], name: str) -> int:
    """The sum of a counter. The first line of a process does not reset it, so the second one holds it as well."""
    second = {(i, p.rows[0]): (i, p.rows[1]) for i, (_, p) in enumerate(attempts) if len(p.rows) > 1}
    counts = {(x.attempt, x.row): v for x, v in zip(lines, values(lines, name), strict=True) if 0 < v < LARGEST}
    return sum(int(v) for key, v in counts.items() if key not in second or counts.get(second[key], 0.0) < v)


def _peak_memory(logs: Sequence[ParsedLog], kept: Sequence[Line]) -> float | None:
    """Megatron's `max allocated` in MiB over all ranks that print it, else the memory in a fork's own lines."""
    peak = max((log.peak_memory.get("max allocated", 0.0) for log in logs), default=0.0)
    if not peak:
        used = [v for v in values(kept, "memory_used_gib") if math.isfinite(v)]
        peak = max(used, default=0.0) * 1024
    return peak or None


def _parameters(attempts: Sequence[tuple[ParsedLog, Process]]) -> int | None:
    """Parameters as printed, summed over model-parallel ranks (experts of other ranks are not printed)."""
    printed = _last(p.head.parameters or None for _, p in attempts)
    return sum(printed.values()) if printed else None


def _attempt(log: ParsedLog, process: Process) -> Attempt:
    numbers = log.iterations.column("number")
    first_last = sorted({int(numbers[r]) for r in (process.rows[:1] + process.rows[-1:])})
    span = "-".join(map(str, first_last))
    return Attempt(log.path.name, span, process.ending.finished, process.ending.exit_line, process.ending.failure)


def _planned(last: Line | None, args: Mapping[str, object]) -> int | None:
    return last.record().planned if last else _positive(args.get("train_iters"))


def _notes(
    logs: Sequence[ParsedLog],
    selection: Selection,
    attempts: Sequence[tuple[ParsedLog, Process]],
    gpu: str | None,
    dtype: Dtype,
    peak: float | None,
    world: int | None,
    seq_length: int | None,
) -> tuple[str, ...]:
    notes = list(selection.notes)
    if gpu and not peak:
        notes.append(f"{gpu} has no {dtype} tensor cores, so no MFU")
    missing = [n for n, v in (("world size", world), ("sequence length", seq_length)) if not v]
    if selection.lines and missing:
        notes.append(f"the log does not say the {' and '.join(missing)}")
    sizes = {p.head.world_size for _, p in attempts if p.head.world_size}
    if len(sizes) > 1:
        notes.append(f"the attempts ran on different world sizes: {sorted(sizes)}")
    duplicates = sum(log.duplicates for log in logs)
    if duplicates:
        notes.append(f"{duplicates} iteration lines were printed by more than one rank and counted once")
    return tuple(notes)


def _last_arguments(attempts: Sequence[tuple[ParsedLog, Process]]) -> Mapping[str, object]:
    return _last(p.head.arguments or None for _, p in attempts) or {}


def _last(values: Iterable[T | None]) -> T | None:
    return next((v for v in reversed(list(values)) if v is not None), None)


def _positive(value: object) -> int | None:
    return int(value) if isinstance(value, int | float) and math.isfinite(value) and value > 0 else None


def _plain(value: object) -> object:
    """JSON knows neither NaN nor infinity."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set):
        return [_plain(v) for v in value]
    return value if value is None or isinstance(value, str | int) else str(value)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None

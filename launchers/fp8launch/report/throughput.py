"""Logs of one run -> the numbers of that run, with everything that they rest on.

Units: milliseconds, dense model TFLOP/s per GPU, tokens per second per GPU, MiB; MFU is a fraction of the stated peak.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal, TypeVar

from fp8launch.hardware.gpus import Dtype
from fp8launch.hardware.gpus import gpu as find_gpu
from fp8launch.logs import ParsedLog, Process, read_log
from fp8launch.megatron.flops import flops_per_token, miscounted
from fp8launch.problems import error
from fp8launch.report.machines import Machines, machines_of
from fp8launch.report.outcome import attempt_of, not_running, status_of
from fp8launch.report.run_report import RunReport
from fp8launch.report.selection import Line, Selection, select, values
from fp8launch.report.statistics import LARGEST, statistic
from fp8launch.report.tensor_stats import tensor_stats_of
from fp8launch.report.verify import Verification, verify

T = TypeVar("T")

_NOTEWORTHY = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "seq_length",
    "num_experts", "micro_batch_size", "global_batch_size", "tensor_model_parallel_size",
    "pipeline_model_parallel_size", "context_parallel_size", "expert_model_parallel_size", "data_parallel_size",
    "use_distributed_optimizer", "use_megatron_fsdp", "recompute_granularity", "train_iters", "log_interval",
    "transformer_impl", "attention_backend",
)  # fmt: skip


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
    """What the logs of one run say. `gpu` names a GPU of `hardware.gpus`; else it is what the nodes said, if they did.

    `world_size` and `arguments` (Megatron's names) are what the run was started with, used where the log does not
    say so.
    """
    logs = [logs] if isinstance(logs, ParsedLog) else list(logs)
    attempts = [(log, process) for log in logs for process in log.processes]
    selection = select(attempts)
    machines = machines_of(logs)
    stated_gpu, gpu = gpu, gpu or machines.gpu
    args = {**(arguments or {}), **_last_arguments(attempts)}
    world = _last(p.head.world_size for _, p in attempts) or _positive(args.get("world_size")) or world_size
    padded = _last(p.head.padded_vocab_size for _, p in attempts)
    per_token = flops_per_token({**args, "padded_vocab_size": padded} if padded else args)
    lines = selection.lines
    seq_length = _positive(args.get("seq_length")) or (_positive(lines[-1].value("seq_length")) if lines else None)
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
    status, failure = status_of(attempts, selection)
    if status in ("ok", "incomplete") and verification.refuted:
        status, failure = "failed", not_running(logs, verification)
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
        machines=machines,
        tensor_stats=tensor_stats_of(logs),
        world_size=world,
        seq_length=seq_length,
        global_batch_size=_positive(last.global_batch_size) if last else _positive(args.get("global_batch_size")),
        flops_per_token=per_token,
        parameters=_parameters(attempts),
        versions=_last(p.head.versions or None for _, p in attempts) or {},
        arguments={k: args[k] for k in _NOTEWORTHY if k in args},
        attempts=tuple(attempt_of(log, process) for log, process in attempts),
        failure=failure,
        notes=(
            *_notes(logs, selection, attempts, gpu, dtype, peak, world, seq_length),
            *_other_gpu(stated_gpu, machines),
            *(miscounted(args) if lines else ()),
        ),
    )


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


def _other_gpu(stated: str | None, machines: Machines) -> list[str]:
    if not stated or machines.gpu in (None, stated):
        return []
    return [f"the GPU is said to be {stated}, and the nodes have {', '.join(machines.gpus)}"]


def _last_arguments(attempts: Sequence[tuple[ParsedLog, Process]]) -> Mapping[str, object]:
    return _last(p.head.arguments or None for _, p in attempts) or {}


def _last(values: Iterable[T | None]) -> T | None:
    return next((v for v in reversed(list(values)) if v is not None), None)


def _positive(value: object) -> int | None:
    return int(value) if isinstance(value, int | float) and math.isfinite(value) and value > 0 else None


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None

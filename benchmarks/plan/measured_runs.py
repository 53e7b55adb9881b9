"""Our own measurements on H100 and H200 as Megatron's arguments, from the logs of benchmarks/h200."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from published_runs import Run

from fp8launch.logs import read_log
from fp8launch.logs.open_log import log_name
from fp8launch.report.throughput import read_logs, summarise

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "h200"))
from memory import argument_values, logs

# Measurements whose runs shared a GPU or its host, and runs of models too small to measure a GPU by.
SHARED = (
    *("2026-11-21-numerics", "2026-11-21-numerics2", "2026-11-21-plateau"),
    *("2026-11-22-cross-entropy", "2026-11-23-levels-small", "2026-11-27-convergence", "2026-11-29-convergence"),
)
# A precision file turned FP8 off, which the arguments do not show. NaN values take less power and time.
NOT_AS_ASKED = ("asked_but_bf16", "o3")
# Logs do not show environment variables. These runs set NVTE_USE_CUTLASS_GROUPED_GEMM.
GROUPED = (
    *("2026-11-27-peers-moe ours_cutlass", "2026-11-27-startup cutlass"),
    *(f"2026-11-28-peers-moe ours_{run}" for run in (1, 2, 3)),
    *(f"2026-11-28-tune-moe {run}" for run in ("cutlass", "graphs_1", "graphs_2", "te_swiglu")),
    *(f"2026-11-28-tune-moe flash_{run}" for run in (1, 2, 3)),
)

# Measurements on hosts as slow as the slowest known one: slow_host_runs.py compares them.
SLOW_HOSTS = ("2026-11-28-host-h100", "2026-11-28-host-h100x2", "2026-11-28-several-x2")


def measured_runs() -> Iterator[Run]:
    """Yield the runs of our measurements, except those that shared a GPU and those on slow hosts."""
    return sittings(lambda sitting: sitting not in (*SHARED, *SLOW_HOSTS))


def sittings(wanted: Callable[[str], bool]) -> Iterator[Run]:
    """Yield every log of these measurements that has iterations after the warm-up."""
    for sitting, log in logs():
        if not wanted(sitting) or log_name(log) in NOT_AS_ASKED:
            continue
        run = measured_run(log, f"{sitting} {log_name(log)}")
        if run is not None:
            yield run


def measured_run(log: Path, name: str) -> Run | None:
    """Return the run of a log; None if it has no step time or does not show its arguments."""
    processes = read_log(log).processes
    dumped = next((p.head.arguments for p in reversed(processes) if p.head.arguments), {})
    report = summarise(read_logs([log]))
    if not dumped or not report.speed.step_time_ms or not report.setup.world_size or not report.setup.global_batch_size:
        return None
    args = {**argument_values(dumped, log), "cutlass_grouped_gemm": name in GROUPED}
    tokens = report.setup.global_batch_size * int(str(args["seq_length"]))
    return Run(
        name=name,
        family="experts" if args.get("num_experts") else "dense",
        gpu=report.setup.gpu or "h200",  # the first logs do not name it
        gpus=report.setup.world_size,
        global_batch=report.setup.global_batch_size,
        args=args,
        measured=tokens / report.setup.world_size / report.speed.step_time_ms.median * 1000,
        untrained_router=bool(args.get("num_experts")) and not args.get("moe_router_force_load_balancing"),
    )

"""Real logs, and lines as Megatron and its forks print them."""

from __future__ import annotations

from support import log_bytes, real_logs

DATA = real_logs("runs")
H200 = sorted(DATA.glob("llama8b_*.log"))
REAL = sorted(DATA.glob("*.log"))
WITH_ITERATIONS = [p for p in REAL if b"elapsed time per iteration" in log_bytes(p)]


def line(
    number: int,
    planned: int = 50,
    *,
    ms: float = 1000.0,
    batch: int = 8,
    loss: float | None = 2.5,
    nan: int = 0,
    skipped: int = 0,
    stamp: str = "2026-11-20 09:40:33.207963",
) -> str:
    """An iteration line of megatron-core 0.16 to 0.19; a NaN loss is left out, as Megatron does."""
    lm_loss = "" if loss is None else f" lm loss: {loss:.6E} |"
    return (
        f" [{stamp}] iteration {number:8d}/{planned:8d} | consumed samples: {number * batch:12d} |"
        f" elapsed time per iteration (ms): {ms:.1f} | throughput per GPU (TFLOP/s/GPU): {500.0:.1f} |"
        f" learning rate: 1.000000E-04 | global batch size: {batch:5d} |{lm_loss} loss scale: 1.0 | grad norm: 1.234 |"
        f" number of skipped iterations: {skipped:3d} | number of nan iterations: {nan:3d} |"
    )


def dump(**arguments: object) -> str:
    rows = [f"  {k} {'.' * (48 - len(k))} {v}" for k, v in sorted(arguments.items())]
    title = "------------------------ arguments ------------------------"
    return "\n".join([title, *rows, "-------------------- end of arguments ---------------------"])

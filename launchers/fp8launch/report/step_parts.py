"""Where a step's time goes by Megatron's own timers, in the parts that people ask for.

Names of the timers: training_log of megatron/training/training.py (0.17 to 0.19). Timers that lie within others are
left out or taken off, so that the parts add up to the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from fp8launch.report.run_report import RunReport, Statistic

_PIPELINE = (
    "forward-recv",
    "forward-send",
    "backward-recv",
    "backward-send",
    "forward-send-forward-recv",
    "forward-send-backward-recv",
    "backward-send-forward-recv",
    "backward-send-backward-recv",
    "forward-backward-send-forward-backward-recv",
)
_GRADIENTS = ("all-grads-sync", "embedding-grads-all-reduce", "non-tensor-parallel-grads-all-reduce")


class StepPart(NamedTuple):
    """`ms` is the median over the iterations that count, on the slowest rank; `share` a fraction of the step."""

    name: str
    ms: float
    share: float


def step_parts(report: RunReport) -> Iterator[StepPart]:
    """The parts of a step, empty unless the run had Megatron's timers of level 2."""
    timers, step = report.timers_ms, report.step_time_ms
    if step is None or "forward-compute" not in timers or "backward-compute" not in timers:
        return
    loading = _sum(timers, ("batch-generator",))
    parts = {
        "data loading": loading,
        # Megatron loads a batch within its forward pass.
        "forward": _sum(timers, ("forward-compute",)) - loading,
        "backward": _sum(timers, ("backward-compute",)),
        "pipeline communication": _sum(timers, _PIPELINE),
        "gradient communication that is not hidden": _sum(timers, _GRADIENTS),
        "optimizer": _sum(timers, ("optimizer",)),
    }
    parts["rest"] = max(0.0, step.median - sum(parts.values()))
    for name, ms in parts.items():
        if ms > 0:
            yield StepPart(name, ms, ms / step.median)


def _sum(timers: Mapping[str, Statistic], names: tuple[str, ...]) -> float:
    return sum(timers[name].median for name in names if name in timers)

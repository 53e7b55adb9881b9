"""A row of a comparison with the numbers that tables and pictures show."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fp8launch.report.grouping import ComparisonRow, Measure
from fp8launch.report.json_values import json_mapping
from fp8launch.report.loss_summary import LossSummary, ranked_by_loss
from fp8launch.report.scaling import Ratio, ScalingEfficiency


@dataclass(frozen=True)
class Published:
    """The speed that the recipe quotes; `ratio` is the measured speed over it, in tokens/s/GPU."""

    tokens_per_s_per_gpu: float
    tflops_per_gpu: float | None
    gpus: int | None
    source: str
    ratio: float | None
    notes: tuple[str, ...]

    def as_json(self) -> dict[str, object]:
        return json_mapping(vars(self))


@dataclass(frozen=True)
class Entry:
    """A row with its numbers. Units: tokens/s/GPU, ms, dense model TFLOP/s/GPU, MiB, J/token, currency/million."""

    row: ComparisonRow
    tokens: Measure | None
    step_time: Measure | None
    tflops: Measure | None
    mfu: Measure | None
    peak_tflops: float | None
    peak_memory_mib: float | None
    tokens_total: float | None
    energy_per_token: float | None
    cost_per_million_tokens: float | None
    speedup: Ratio | None
    efficiency: ScalingEfficiency | None
    published: Published | None
    notes: tuple[str, ...]
    loss: LossSummary | None = None
    goodput: float | None = None


def about_loss(entries: Sequence[Entry]) -> bool:
    """Return whether the loss is a result of these rows: several seeds, or different ways to learn the same task."""
    if any(entry.loss and entry.loss.seeds > 1 for entry in entries):
        return True
    return bool(ranked_by_loss([entry.row for entry in entries]))


def scaling_modes(entries: Iterable[Entry]) -> list[str]:
    """Return how rows of the same variant grow with the number of GPUs: weak, strong or neither."""
    return sorted({entry.efficiency.mode for entry in entries if entry.efficiency})

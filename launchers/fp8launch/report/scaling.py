"""Ratios of speeds, and scaling efficiency: the speed of each GPU when there are more of them.

Weak scaling keeps the work per GPU, so the global batch grows with the GPUs; strong scaling keeps the global batch.
In both, the efficiency is the speed per GPU over that on the fewest GPUs: with a fixed batch, the total speed-up
divided by the number of times more GPUs is the same quotient.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fp8launch.report.differences import Comparability, speed_comparability
from fp8launch.report.grouping import ComparisonRow, labels_of
from fp8launch.report.intervals import Interval, interval_json, ratio_interval
from fp8launch.report.run_data import UNITS, Unit

ScalingMode = Literal["weak", "strong", "neither"]


@dataclass(frozen=True)
class Ratio:
    """The speed of a row over another's, both in `unit`.

    `value` is None where there is none to give: `comparability` or `missing` says why. Between two single runs, `noise`
    is the sum of the interquartile ranges of their steps, relative to the medians: the interval of a median over many
    steps is narrow, but does not cover the difference between two runs of the same thing.
    """

    value: float | None
    interval: Interval | None
    against: str
    comparability: Comparability
    missing: str = ""
    unit: Unit | None = None
    noise: float = 0.0

    @property
    def excludes_one(self) -> bool:
        return self.interval is not None and not self.interval.low <= 1 <= self.interval.high

    @property
    def distinguishable(self) -> bool:
        """Whether the ratio differs from 1 by more than chance: beyond its interval, and beyond `noise`."""
        return self.excludes_one and self.value is not None and abs(self.value - 1) > self.noise

    def as_json(self) -> dict[str, object]:
        return {
            "value": self.value,
            "unit": self.unit,
            "ci95": interval_json(self.interval),
            "distinguishable": self.distinguishable if self.interval else None,
            "against": self.against,
            "comparable": self.comparability.comparable,
            "reasons": list(self.comparability.unlike),
            "noted": list(self.comparability.noted),
            "missing": self.missing or None,
        }


def ratio(row: ComparisonRow, base: ComparisonRow, comparability: Comparability, force: bool = False) -> Ratio:
    """Divide the speed of a row by that of `base`. Between unlike rows the number is given only by force."""
    for one in (row, base):
        if not one.good:
            whose = "" if one is row else f"{one.name}: "
            return Ratio(None, None, base.name, comparability, f"{whose}{one.status}")
    unit = _common_unit(row, base)
    if unit is None:
        return Ratio(None, None, base.name, comparability, "the logs do not contain speeds in a common unit")
    if not (comparability.comparable or force):
        return Ratio(None, None, base.name, comparability, unit=unit)
    mine, theirs = row.speeds(unit), base.speeds(unit)
    interval, noise = None, 0.0
    if row is not base:
        interval = ratio_interval(mine, theirs)
        if len(mine) == len(theirs) == 1:
            noise = _relative_iqr(mine[0]) + _relative_iqr(theirs[0])
    value = _median_of_medians(mine) / _median_of_medians(theirs)
    return Ratio(value, interval, base.name, comparability, unit=unit, noise=noise)


def _relative_iqr(speeds: Sequence[float]) -> float:
    if len(speeds) < 2:
        return 0.0
    low, median, high = statistics.quantiles(speeds, n=4, method="inclusive")
    return (high - low) / median


def _common_unit(row: ComparisonRow, base: ComparisonRow) -> Unit | None:
    """The first unit in which every run on both sides has a speed: only like units make a ratio."""
    runs = (*row.good, *base.good)
    for unit in UNITS:
        if all(run.speeds(unit) for run in runs):
            return unit
    return None


def _median_of_medians(speeds: Sequence[Sequence[float]]) -> float:
    return statistics.median(map(statistics.median, speeds))


@dataclass(frozen=True)
class ScalingEfficiency:
    mode: ScalingMode
    ratio: Ratio

    def as_json(self) -> dict[str, object]:
        return {"scaling": self.mode, **self.ratio.as_json()}


def efficiencies(rows: Sequence[ComparisonRow], force: bool = False) -> dict[str, ScalingEfficiency]:
    """Return by row name the efficiency of every variant that was run on several numbers of GPUs."""
    found: dict[str, ScalingEfficiency] = {}
    for label in labels_of(rows):
        sized = [row for row in rows if row.label == label and row.world]
        sized.sort(key=lambda row: row.world or 0)
        good = [row for row in sized if row.good]
        if not good or len(sized) < 2:
            continue
        mode = _mode(good)
        for row in sized:
            comparability = _comparability(row, good[0], mode)
            found[row.name] = ScalingEfficiency(mode, ratio(row, good[0], comparability, force))
    return found


def _mode(rows: Sequence[ComparisonRow]) -> ScalingMode:
    totals, per_gpu = set(), set()
    for row in rows:
        batch = row.facts.get("global_batch_size")
        totals.add(batch)
        if isinstance(batch, int | float) and row.world:
            per_gpu.add(batch / row.world)
    if len(per_gpu) == 1:
        return "weak"
    if len(totals) == 1 and None not in totals:
        return "strong"
    return "neither"


def _comparability(row: ComparisonRow, base: ComparisonRow, mode: ScalingMode) -> Comparability:
    found = speed_comparability(row.facts, base.facts, axes={"world_size", "global_batch_size"})
    # These differ by intention: the mode names the difference in sizes, and more nodes are other nodes.
    noted = tuple(n for n in found.noted if not n.startswith(("number of GPUs", "global batch ", "node set ")))
    if mode != "neither" or row is base:
        return Comparability(found.unlike, noted)
    batches = f"{row.facts.get('global_batch_size')} against {base.facts.get('global_batch_size')}"
    return Comparability((*found.unlike, f"global batch {batches}: neither weak nor strong scaling"), noted)

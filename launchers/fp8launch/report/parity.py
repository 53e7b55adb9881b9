"""Loss parity: does a variant learn what its baseline learns, on the same data in the same order?

Two curves of the same data share most of their noise, so their relative difference is far steadier than either curve.
The verdict takes its mean over the last quarter of the compared iterations. Repeats of one variant differ too: their
spread gives the 95 % interval of that mean, and parity is decided only where the interval lies on one side of the
tolerance. The sources of this project, and NVIDIA's own evaluations, use a tolerance of 1 to 2 %.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from fp8launch.report.differences import initialisation_differences, parity_differences
from fp8launch.report.intervals import t_quantile
from fp8launch.report.json_values import json_mapping
from fp8launch.report.loss_curves import Curve, average, first_loss_gone, losses, mean, relative, smooth
from fp8launch.report.run_data import RunData

TOLERANCE = 0.02
# In its first steps every model only learns word frequencies: all recipes agree there, and none is tested.
FEWEST_ITERATIONS = 200
FEWEST_LINES = 20
ParityVerdict = Literal["within tolerance", "undecided", "lower", "apart", "diverged", "too short", "not comparable"]
# How the sentence calls a verdict, where that is not its own name.
_WORDS: Mapping[str, str] = {"lower": "lower loss", "apart": "higher loss"}


@dataclass(frozen=True)
class Parity:
    """The verdict on a variant and its baseline.

    `difference` is relative, positive where the variant's loss is higher; `iterations` are those compared.
    `last_quarter` is its mean over the last quarter, and `noise` half the 95 % interval of that mean, from the spread
    of repeats (None without repeats). `diverged_at` is the iteration from which the smoothed difference stays beyond
    the tolerance, or from which one run's loss is gone (NaN). `runs` counts those of the variant and of the baseline.
    """

    variant: str
    baseline: str
    verdict: ParityVerdict
    tolerance: float
    iterations: tuple[int, ...] = ()
    difference: tuple[float, ...] = ()
    smoothed: tuple[float, ...] = ()
    window: int = 1
    last_quarter: float | None = None
    diverged_at: int | None = None
    reasons: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    runs: tuple[int, int] = (1, 1)
    noise: float | None = None

    @property
    def word(self) -> str:
        """The verdict for people."""
        return _WORDS.get(self.verdict, self.verdict)

    def sentence(self) -> str:
        """Put the verdict in a sentence."""
        text = f"{self.variant} against {self.baseline}: {self.word}"
        if self.last_quarter is not None and self.verdict not in ("too short", "not comparable"):
            text += f", {100 * self.last_quarter:+.2f} %"
            if self.noise is not None:
                text += f" ± {100 * self.noise:.2f} % between repeats"
            text += f" over the last quarter (tolerance {100 * self.tolerance:g} %"
            if self.noise is not None:
                text += f", {self.runs[0]} against {self.runs[1]} runs"
            text += ")"
        if self.diverged_at is not None:
            text += f", beyond it from iteration {self.diverged_at} on"
        return "; ".join([text, *self.reasons, *self.notes])

    def as_json(self) -> dict[str, object]:
        return json_mapping(vars(self))


def parity(variant: Sequence[RunData], base: Sequence[RunData], tolerance: float, names: tuple[str, str]) -> Parity:
    """Judge the runs of a variant against those of its baseline, at least one each, called by `names`.

    `tolerance` is relative: 0.02 for 2 %. Each run is held against those runs of the baseline that had the same data
    in the same order; the difference is the mean over them.
    """
    variant, base = _conclusive(variant), _conclusive(base)
    pairs = _pairs(variant, base)
    if not pairs:
        reasons = parity_differences(variant[0].facts, base[0].facts)
        return Parity(*names, "not comparable", tolerance, reasons=tuple(reasons))
    curves: dict[int, Curve] = {}
    for run in (*variant, *base):
        curves[id(run)] = losses(run)
    paired: list[RunData] = []
    partners: set[int] = set()
    for run, others in pairs:
        paired.append(run)
        partners.update(map(id, others))
    notes = []
    for difference in initialisation_differences(paired[0].facts, base[0].facts):
        notes.append(f"other initial weights: {difference}")
    if len(paired) < len(variant):
        notes.append(f"{len(variant) - len(paired)} of {len(variant)} runs had other data or another schedule")
    found = _compared(pairs, base, curves)
    verdict, reasons = _judge(found, tolerance)
    lost_at, whose = first_loss_gone([(run.name, curves[id(run)]) for run in (*paired, *base)])
    if lost_at is not None:
        verdict, reasons = "diverged", [f"{whose}: the loss is NaN from iteration {lost_at} on"]
    if found is None:
        return Parity(*names, verdict, tolerance, diverged_at=lost_at, reasons=tuple(reasons), notes=tuple(notes))
    beyond = None
    if verdict in ("apart", "lower", "diverged"):
        beyond = lost_at or _beyond_to_the_end(found.iterations, found.smoothed, tolerance)
    return Parity(
        *names,
        verdict,
        tolerance,
        iterations=tuple(found.iterations),
        difference=tuple(found.difference),
        smoothed=tuple(found.smoothed),
        window=found.window,
        last_quarter=found.last_quarter,
        diverged_at=beyond,
        reasons=tuple(reasons),
        notes=tuple(notes),
        runs=(len(paired), len(partners)),
        noise=found.noise,
    )


@dataclass(frozen=True)
class _Compared:
    """The mean relative difference of the pairs over their common iterations; the names are those of Parity."""

    iterations: Sequence[int]
    difference: Sequence[float]
    smoothed: Sequence[float]
    window: int
    last_quarter: float
    noise: float | None


def _compared(
    pairs: Sequence[tuple[RunData, Sequence[RunData]]], base: Sequence[RunData], curves: Mapping[int, Curve]
) -> _Compared | None:
    """None where fewer than two iterations are common to all."""
    each = []
    for run, partners in pairs:
        each.append(relative(curves[id(run)], _mean_of(partners, curves)))
    points = sorted(mean(each).items())
    if len(points) < 2:
        return None
    common, difference = zip(*points, strict=True)
    last = common[-max(1, len(common) // 4) :]
    window = max(1, len(common) // 20) | 1
    noise = _noise([average(one, last) for one in each], _own_spread(base, curves, last))
    quarter = statistics.fmean(difference[-len(last) :])
    return _Compared(common, difference, smooth(difference, window), window, quarter, noise)


def _mean_of(runs: Sequence[RunData], curves: Mapping[int, Curve]) -> Curve:
    return mean([curves[id(run)] for run in runs])


def _conclusive(runs: Sequence[RunData]) -> list[RunData]:
    """The runs that decide for a variant: those that ended as planned or lost their loss; without any, all."""
    ended = []
    for run in runs:
        failure = run.report.failure
        if run.report.status in ("ok", "unhealthy") or (failure and failure.code == "nan"):
            ended.append(run)
    return ended or list(runs)


def _pairs(variant: Sequence[RunData], base: Sequence[RunData]) -> list[tuple[RunData, list[RunData]]]:
    """Each run with those of the baseline that had the same data and schedule; runs without any are left out."""
    found = []
    for run in variant:
        partners = [other for other in base if not parity_differences(run.facts, other.facts)]
        if partners:
            found.append((run, partners))
    return found


def _own_spread(base: Sequence[RunData], curves: Mapping[int, Curve], last: Sequence[int]) -> list[list[float]]:
    """For each set of like runs of the baseline: the difference of each from their mean, over the last quarter."""
    sets: list[list[RunData]] = []
    for run in base:
        for alike in sets:
            if not parity_differences(alike[0].facts, run.facts):
                alike.append(run)
                break
        else:
            sets.append([run])
    found = []
    for alike in sets:
        middle = _mean_of(alike, curves)
        averages = []
        for run in alike:
            difference = relative(curves[id(run)], middle)
            if difference.keys() >= set(last):
                averages.append(average(difference, last))
        found.append(averages)
    return found


def _noise(variant: Sequence[float], base: Sequence[Sequence[float]]) -> float | None:
    """Half the 95 % interval of the mean difference, from the spread of repeats of one variant; None without any."""
    groups = list(filter(None, (variant, *base)))
    freedom = sum(map(len, groups)) - len(groups)
    if not freedom:
        return None
    squares = 0.0
    for group in groups:
        mean = statistics.fmean(group)
        squares += sum((value - mean) ** 2 for value in group)
    sides = 1 / len(variant) + 1 / max(1, sum(map(len, base)))
    return t_quantile(freedom) * math.sqrt(squares / freedom * sides)


def _judge(found: _Compared | None, tolerance: float) -> tuple[ParityVerdict, list[str]]:
    """Decide by the interval around the last quarter's difference: inside the tolerance, outside it, or neither."""
    if found is None:
        return "too short", ["fewer than two iterations with both"]
    lines = len(found.iterations)
    span = found.iterations[-1] - found.iterations[0] + 1
    if span < FEWEST_ITERATIONS or lines < FEWEST_LINES:
        need = f"{FEWEST_ITERATIONS} iterations and {FEWEST_LINES} lines"
        return "too short", [f"{span} iterations with {lines} lines are too few: parity needs {need}"]
    half = found.noise or 0.0
    if abs(found.last_quarter) + half <= tolerance:
        return "within tolerance", []
    if abs(found.last_quarter) - half > tolerance:
        if found.last_quarter < 0:
            return "lower", []
        return "apart", []
    return "undecided", ["repeats differ too much; more repeats are needed"]


def _beyond_to_the_end(numbers: Sequence[int], smoothed: Sequence[float], tolerance: float) -> int | None:
    first = None
    for number, value in zip(reversed(numbers), reversed(smoothed), strict=True):
        if abs(value) <= tolerance:
            break
        first = number
    return first

"""Losses by iteration, and arithmetic on such curves."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from itertools import accumulate

from fp8launch.logs.field_names import LOSS_PREFIX
from fp8launch.report.run_data import RunData
from fp8launch.report.steady_state import NUMBER, field_names, values

_LM_LOSS = f"{LOSS_PREFIX}lm loss"
Curve = dict[int, float]  # loss, or a difference of it, by iteration
Point = tuple[int, float]


def relative(mine: Curve, theirs: Curve) -> Curve:
    """Return (mine - theirs) / theirs at the iterations that have both."""
    found = {}
    for number, loss in mine.items():
        other = theirs.get(number, math.nan)
        if math.isfinite(loss) and math.isfinite(other) and other > 0:
            found[number] = (loss - other) / other
    return found


def mean(curves: Sequence[Curve]) -> Curve:
    """Return the mean of curves at the iterations that all have."""
    found = {}
    for number in set(curves[0]).intersection(*curves[1:]):
        found[number] = statistics.fmean([curve[number] for curve in curves])
    return found


def average(curve: Curve, numbers: Sequence[int]) -> float:
    """Return the mean of a curve over these iterations."""
    return statistics.fmean(curve[number] for number in numbers)


def losses(run: RunData) -> Curve:
    """Return the loss by iteration, NaN where a line has none; without lines that may mix two iterations."""
    lines = run.steady_state.lines
    names = field_names(lines, LOSS_PREFIX)
    if not names and run.report.nan_iterations:
        # A loss that was NaN from the start has never been printed.
        return dict.fromkeys(map(NUMBER, lines), math.nan)
    if not names:
        return {}
    name = names[0]
    if _LM_LOSS in names:
        name = _LM_LOSS
    curve = {}
    for line, loss in zip(lines, values(lines, name), strict=True):
        if line.row not in line.log.mixed_rows:
            curve[line.number] = loss
    return curve


def finite_losses(run: RunData) -> list[Point]:
    """Return the losses of a run by iteration, without those that are missing or NaN."""
    return [(number, loss) for number, loss in sorted(losses(run).items()) if math.isfinite(loss)]


def values_of(points: Iterable[Point]) -> list[float]:
    """Return the values of a curve, without their iterations."""
    return [value for _, value in points]


def first_loss_gone(curves: Sequence[tuple[str, Curve]]) -> tuple[int | None, str]:
    """Find the first iteration from which a curve has no value to its end, and whose curve it is."""
    starts = []
    for name, curve in curves:
        gone = None
        for number in sorted(curve, reverse=True):
            if math.isfinite(curve[number]):
                break
            gone = number
        if gone is not None:
            starts.append((gone, name))
    return min(starts, default=(None, ""))


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Return the centred mean over `window` values, over fewer near the ends."""
    sums = [0.0, *accumulate(values)]
    half = window // 2
    found = []
    for i in range(len(values)):
        first, last = max(0, i - half), min(len(values), i + half + 1)
        found.append((sums[last] - sums[first]) / (last - first))
    return found

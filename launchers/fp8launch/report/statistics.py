"""Statistics of a handful to a million values, each with its count: a median without n is half a number."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

LARGEST = 1e150


@dataclass(frozen=True)
class Statistic:
    """`iqr` is the distance of the quartiles (linear interpolation, both ends included)."""

    median: float
    mean: float
    min: float
    max: float
    iqr: float
    n: int

    def as_json(self) -> dict[str, float | int]:
        return asdict(self)


def statistic(values: Iterable[float]) -> Statistic | None:
    """The statistic of the finite values, None if there are none. Beyond LARGEST is garbage, and would overflow."""
    finite = sorted([v for v in values if -LARGEST < v < LARGEST])
    if not finite:
        return None
    low, middle, high = (_quantile(finite, quarter / 4) for quarter in (1, 2, 3))
    return Statistic(middle, statistics.fmean(finite), finite[0], finite[-1], high - low, len(finite))


def _quantile(ordered: Sequence[float], part: float) -> float:
    """By linear interpolation, both ends included."""
    place = part * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    # Between equals nothing is rounded.
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])

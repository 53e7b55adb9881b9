"""Statistics of a handful to a million values, each with its count: a median without n is half a number."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
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
    finite = [v for v in values if -LARGEST < v < LARGEST]
    if not finite:
        return None
    low, _, high = statistics.quantiles(finite, n=4, method="inclusive") if len(finite) > 1 else [finite[0]] * 3
    return Statistic(
        statistics.median(finite), statistics.fmean(finite), min(finite), max(finite), high - low, len(finite)
    )

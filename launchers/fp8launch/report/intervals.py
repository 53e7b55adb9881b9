"""Confidence intervals of the ratio of two medians.

Iterations of one run share nodes, clocks, neighbours and allocator. So they show how much a run varies, never how much
the next run will differ. With repeats the interval is Student's t on the logarithm of the
runs' medians and covers another run; with one run on each side it is a bootstrap of blocks of consecutive iterations
and covers these two runs only. The result says which one it is.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import truediv
from typing import Literal

CONFIDENCE = 0.95
RESAMPLES = 1000
# Fewer consecutive values than this cannot show their correlation.
FEWEST = 4
# More batches than this do not improve the interval, and take longer.
MOST_BATCHES = 200


@dataclass(frozen=True)
class Interval:
    """A 95 % interval. `covers` is `runs` (what another pair of runs would give) or `iterations` (these runs only)."""

    low: float
    high: float
    covers: Literal["runs", "iterations"]
    method: str


def ratio_interval(ours: Sequence[Sequence[float]], base: Sequence[Sequence[float]]) -> Interval | None:
    """The interval of median(ours) / median(base). Each argument holds one sequence of positive values per run."""
    mine, theirs = _medians(ours), _medians(base)
    if not mine or not theirs:
        return None
    if len(mine) + len(theirs) >= 3:
        return _over_runs(mine, theirs)
    return _within_runs(ours[0], base[0])


def difference_interval(ours: Sequence[float], base: Sequence[float]) -> Interval:
    """Welch's interval of mean(ours) - mean(base). Both need two values at least."""
    m, n = len(ours), len(base)
    vm, vn = statistics.variance(ours) / m, statistics.variance(base) / n
    spread = vm**2 / (m - 1) + vn**2 / (n - 1)
    freedom = (vm + vn) ** 2 / spread if spread else m + n - 2
    half = t_quantile(freedom) * math.sqrt(vm + vn)
    centre = statistics.fmean(ours) - statistics.fmean(base)
    return Interval(centre - half, centre + half, "runs", f"Welch t over {m} and {n} runs")


def mean_interval(runs: Sequence[float]) -> Interval | None:
    """The t interval of the mean of the runs' medians; None for a single run."""
    if len(runs) < 2:
        return None
    half = t_quantile(len(runs) - 1) * statistics.stdev(runs) / math.sqrt(len(runs))
    mean = statistics.fmean(runs)
    return Interval(mean - half, mean + half, "runs", f"t over {len(runs)} runs")


def _medians(runs: Sequence[Sequence[float]]) -> list[float]:
    return list(map(statistics.median, filter(None, runs)))


def _over_runs(mine: Sequence[float], theirs: Sequence[float]) -> Interval:
    """Welch's interval; if one side has a single run, the other side's relative spread is used for both."""
    a, b = list(map(math.log, mine)), list(map(math.log, theirs))
    if len(a) > 1 and len(b) > 1:
        of_logarithms = difference_interval(a, b)
        return replace(of_logarithms, low=math.exp(of_logarithms.low), high=math.exp(of_logarithms.high))
    several = a if len(a) > 1 else b
    error = statistics.stdev(several) * math.sqrt(1 / len(a) + 1 / len(b))
    centre = statistics.fmean(a) - statistics.fmean(b)
    half = t_quantile(len(several) - 1) * error
    method = f"t over {len(a)} and {len(b)} runs, the spread of the repeated side taken for both"
    return Interval(math.exp(centre - half), math.exp(centre + half), "runs", method)


def _within_runs(ours: Sequence[float], base: Sequence[float]) -> Interval | None:
    if min(len(ours), len(base)) < FEWEST:
        return None
    # A fixed seed: the same logs give the same report.
    dice = random.Random(20)
    a, b = _resampled_medians(ours, dice), _resampled_medians(base, dice)
    ratios = sorted(map(truediv, a, b))
    edge = int(RESAMPLES * (1 - CONFIDENCE) / 2)
    method = f"block bootstrap over {len(ours)} and {len(base)} iteration lines"
    return Interval(ratios[edge], ratios[-1 - edge], "iterations", method)


def _resampled_medians(values: Sequence[float], dice: random.Random) -> list[float]:
    """Medians of resamples by circular blocks of about n^(1/3), the length that keeps short-range correlation."""
    size = -(-len(values) // MOST_BATCHES)
    batches = [statistics.median(values[begin : begin + size]) for begin in range(0, len(values), size)]
    n = len(batches)
    length = max(1, round(n ** (1 / 3)))
    ring = [*batches, *batches[: length - 1]]
    blocks = [ring[start : start + length] for start in range(n)]
    # Inlined randrange and median: a search for settings needs millions of blocks.
    bits = n.bit_length()
    medians = []
    for _ in range(RESAMPLES):
        sample: list[float] = []
        while len(sample) < n:
            start = dice.getrandbits(bits)
            if start < n:
                sample += blocks[start]
        del sample[n:]
        sample.sort()
        medians.append((sample[(n - 1) // 2] + sample[n // 2]) / 2)
    return medians


def t_quantile(freedom: float) -> float:
    """Return the two-sided quantile of Student's t at CONFIDENCE for `freedom` >= 1, to six digits.

    With x = sqrt(freedom) tan(a) the density becomes cos(a)^(freedom - 1), smooth on a finite range: Simpson's rule
    gives the probability, bisection its inverse.
    """
    if freedom > 200:
        # The quantile's expansion in 1/freedom (Abramowitz and Stegun 26.7.5): exact to 1e-7 from here on.
        z = statistics.NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
        return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    scale = 2 * math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(math.pi)

    def probability(angle: float) -> float:
        steps = 200
        width = angle / steps
        inner = 0.0
        for i in range(1, steps):
            weight = 2 + 2 * (i % 2)  # 4, 2, 4, ..., 4
            inner += weight * math.cos(i * width) ** (freedom - 1)
        return float(scale * width / 3 * (1 + inner + math.cos(angle) ** (freedom - 1)))

    low, high = 0.0, math.pi / 2
    for _ in range(50):
        middle = (low + high) / 2
        if probability(middle) < CONFIDENCE:
            low = middle
        else:
            high = middle
    return math.sqrt(freedom) * math.tan(low)

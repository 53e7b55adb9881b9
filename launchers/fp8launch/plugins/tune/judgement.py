"""Judge measured variants by the confidence interval of their speed relative to the best so far."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from fp8launch.plugins.tune.state import State, Variant
from fp8launch.report.intervals import Interval, ratio_interval

# A smaller gain is not worth another run.
LEAST_GAIN = 0.003
# A variant that is still undecided after this many runs is not kept.
MOST_RUNS = 3

Verdict = Literal["start", "better", "worse", "same", "undecided", "not settled", "failed"]


@dataclass(frozen=True)
class Judgement:
    """A variant compared with the best one at that time. `ratio` is its speed divided by the best's."""

    variant: Variant
    against: Variant | None
    verdict: Verdict
    ratio: float | None = None
    interval: Interval | None = None
    why: str = ""

    @property
    def new_changes(self) -> tuple[str, ...]:
        """The changes that the variant adds to the one that it was compared with."""
        before: tuple[str, ...] = ()
        if self.against is not None and self.against.start == self.variant.start:
            before = self.against.changes
        return tuple(name for name in self.variant.changes if name not in before)


@dataclass(frozen=True)
class Standing:
    """The best variant, the judgement of each variant, and the variant that is still undecided."""

    best: Variant | None
    judgements: Mapping[Variant, Judgement]
    undecided: Variant | None
    runs: Mapping[Variant, tuple[tuple[float, ...], ...]]


def standing(state: State) -> Standing:
    """Judge the results in the order of the trials."""
    best: Variant | None = None
    open_: Variant | None = None
    judgements: dict[Variant, Judgement] = {}
    runs: dict[Variant, tuple[tuple[float, ...], ...]] = {}
    for trial, outcome in state.results:
        variant = trial.variant
        if outcome.status == "ok":
            runs[variant] = (*runs.get(variant, ()), outcome.speeds)
        elif variant not in runs:
            judgements[variant] = Judgement(variant, best, "failed", why=outcome.why)
            continue
        if best is None:
            best = variant
            judgements[variant] = Judgement(variant, None, "start", 1.0)
            continue
        if variant != best:
            open_ = variant
        if open_ is None:
            continue
        failed_again = outcome.status != "ok"
        found = _judged(open_, best, runs, failed_again)
        judgements[open_] = found
        if found.verdict == "better":
            best = open_
        if found.verdict != "undecided":
            open_ = None
    return Standing(best, judgements, open_, runs)


def _judged(
    variant: Variant, best: Variant, runs: Mapping[Variant, tuple[tuple[float, ...], ...]], last: bool
) -> Judgement:
    mine, theirs = runs[variant], runs[best]
    interval = _interval(mine, theirs)
    ratio = _median(mine) / _median(theirs)
    if interval is None:
        return Judgement(variant, best, "failed", ratio, why="too few iterations to judge")
    verdict: Verdict = "undecided"
    if interval.low > 1:
        verdict = "better"
    elif interval.high < 1:
        verdict = "worse"
    elif min(ratio, interval.high) < 1 + LEAST_GAIN:
        # The most likely gain is not worth another run, even if the interval includes a larger one.
        verdict = "same"
    elif last or min(len(mine), len(theirs)) >= MOST_RUNS:
        verdict = "not settled"
    return Judgement(variant, best, verdict, ratio, interval)


@functools.lru_cache(maxsize=4096)
def _interval(mine: tuple[tuple[float, ...], ...], theirs: tuple[tuple[float, ...], ...]) -> Interval | None:
    return ratio_interval(mine, theirs)


def _median(runs: tuple[tuple[float, ...], ...]) -> float:
    return statistics.median(map(statistics.median, runs))

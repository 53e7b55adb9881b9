"""Loss curves of runs by iteration, and the final loss of a row of the comparison."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple, TypeVar

from fp8launch.logs.field_names import LOSS_PREFIX
from fp8launch.report.differences import LEARNING, TASK, HasFacts, differing_facts, settings_change_speed
from fp8launch.report.intervals import Interval, mean_interval
from fp8launch.report.run_report import RunReport, json_mapping
from fp8launch.report.steady_state import loss_of, numbers_of

Curve = dict[int, float]  # loss, or a difference of losses, by iteration
Point = tuple[int, float]


def relative(mine: Curve, theirs: Curve) -> Curve:
    """Return (mine - theirs) / theirs at the iterations that both curves have."""
    found = {}
    for number, loss in mine.items():
        other = theirs.get(number, math.nan)
        if math.isfinite(loss) and math.isfinite(other) and other > 0:
            found[number] = (loss - other) / other
    return found


def mean(curves: Sequence[Curve]) -> Curve:
    """Return the mean of the curves at the iterations that all of them have."""
    found = {}
    for number in set(curves[0]).intersection(*curves[1:]):
        found[number] = statistics.fmean([curve[number] for curve in curves])
    return found


def average(curve: Curve, numbers: Sequence[int]) -> float:
    """Return the mean of a curve over these iterations."""
    return statistics.fmean(curve[number] for number in numbers)


def losses(run: RunReport) -> Curve:
    """Return the loss by iteration, NaN where a line has none. Lines that may average two iterations are left out."""
    lines = run.steady_state.lines
    numbers = numbers_of(lines)
    if not lines.names_with(LOSS_PREFIX):
        # Megatron prints no loss for NaN iterations, so a run that was NaN from the start has no loss column.
        return dict.fromkeys(numbers, math.nan) if run.training.nan_iterations else {}
    every = zip(numbers, loss_of(lines), lines.column("mixed"), strict=True)
    return {number: loss for number, loss, mixed in every if not mixed}


def finite_losses(run: RunReport) -> list[Point]:
    """Return the finite losses of a run with their iterations, in order."""
    return [(number, loss) for number, loss in sorted(losses(run).items()) if math.isfinite(loss)]


def values_of(points: Iterable[Point]) -> list[float]:
    """Return the values of a curve, without their iterations."""
    return [value for _, value in points]


def first_loss_gone(curves: Sequence[tuple[str, Curve]]) -> tuple[int | None, str]:
    """Find the curve whose values end first. Return the iteration from which it has none, and its name."""
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
    """Return the centred moving average over `window` values, over fewer values near the ends."""
    sums = [0.0, *accumulate(values)]
    half = window // 2
    found = []
    for i in range(len(values)):
        first, last = max(0, i - half), min(len(values), i + half + 1)
        found.append((sums[last] - sums[first]) / (last - first))
    return found


Row = TypeVar("Row", bound=HasFacts)

# The final loss is averaged over this share of the iterations, but at least over this many.
SHARE, LEAST = 0.1, 5
# Above this loss (in nats) the perplexity is too large to be readable.
_LARGEST = 50.0


@dataclass(frozen=True)
class LossSummary:
    """The final loss of a row's runs, in nats.

    `values` has one smoothed loss per run, the mean over its last `iterations`. `last` and `smoothed` are medians over
    the runs. `seed_values` has the mean over the runs of each seed. `mean`, `std` (of the sample), the 95 % `interval`
    of the mean and the range `spread` are computed over these seeds, because repeats of one seed compute the same
    except for the order of additions. With a single seed, `std`, `interval` and `spread` are None.
    """

    last: float
    smoothed: float
    perplexity: float | None
    spread: float | None
    iterations: int
    runs: int
    values: tuple[float, ...] = ()
    seed_values: tuple[float, ...] = ()
    mean: float | None = None
    std: float | None = None
    interval: Interval | None = None

    @property
    def seeds(self) -> int:
        return len(self.seed_values)

    @property
    def end(self) -> float:
        """The loss by which rows are ranked: the mean over several seeds, or the smoothed loss of a single one."""
        if self.seeds > 1 and self.mean is not None:
            return self.mean
        return self.smoothed

    def as_json(self) -> dict[str, object]:
        return {**json_mapping(vars(self)), "seeds": self.seeds}

    @property
    def text(self) -> str:
        """The final loss with the standard deviation over several seeds, and the perplexity."""
        return self.end_text if self.perplexity is None else f"{self.end_text} ({self.perplexity:,.2f})"

    @property
    def end_text(self) -> str:
        """The final loss with the standard deviation over several seeds."""
        return f"{self.end:.4f}" if self.std is None else f"{self.end:.4f} ± {self.std:.4f}"


class RunEnd(NamedTuple):
    """The final loss of one run: its last value, and the mean over its last `averaged` iterations."""

    seed: str
    last: float
    smoothed: float
    averaged: int = 1


def loss_summary(runs: Sequence[RunReport]) -> LossSummary | None:
    """Summarize the losses of a row's runs. Return None if none of them logged a finite loss."""
    ends = []
    for run in runs:
        curve = losses(run)
        values = values_of(finite_losses(run))
        count = min(len(curve), max(LEAST, round(SHARE * len(curve))))
        at_end = sorted(curve)[-count:] if count else []
        # If most of the final losses are NaN or infinite, the few finite ones do not represent the run.
        if 2 * sum(math.isfinite(curve[number]) for number in at_end) > count:
            count = min(count, len(values))
            ends.append(RunEnd(str(run.facts.get("seed")), values[-1], statistics.fmean(values[-count:]), count))
    return summary_over_seeds(ends) if ends else None


def summary_over_seeds(ends: Sequence[RunEnd]) -> LossSummary:
    """Summarize the final losses of at least one run."""
    by_seed = list(seed_means(ends).values())
    interval = mean_interval(by_seed)
    if interval and interval.low < 0 <= min(by_seed):
        # A cross entropy is never negative.
        interval = replace(interval, low=0.0, method=f"{interval.method}, cut off at 0")
    found = LossSummary(
        last=statistics.median(end.last for end in ends),
        smoothed=statistics.median(end.smoothed for end in ends),
        perplexity=None,
        spread=max(by_seed) - min(by_seed) if len(by_seed) > 1 else None,
        iterations=min(end.averaged for end in ends),
        runs=len(ends),
        values=tuple(end.smoothed for end in ends),
        seed_values=tuple(by_seed),
        mean=statistics.fmean(by_seed),
        std=statistics.stdev(by_seed) if len(by_seed) > 1 else None,
        interval=interval,
    )
    if found.end < _LARGEST:
        found = replace(found, perplexity=math.exp(found.end))
    return found


def seed_means(ends: Iterable[RunEnd]) -> dict[str, float]:
    """Return the mean final loss of each seed's runs."""
    of_seed: dict[str, list[float]] = {}
    for end in ends:
        of_seed.setdefault(end.seed, []).append(end.smoothed)
    return {seed: statistics.fmean(same) for seed, same in of_seed.items()}


def end_words(summaries: Iterable[LossSummary | None]) -> str:
    """Say over how many values these losses are averaged, such as `last 6 logged iterations`."""
    counts = [loss.iterations for loss in summaries if loss] or [LEAST]
    return f"last {' to '.join(map(str, sorted({min(counts), max(counts)})))} logged iterations"


def by_task(rows: Sequence[Row]) -> list[list[Row]]:
    """Group rows that train the same model on the same data: only their losses can be ranked."""
    names = sorted(TASK.intersection(differing_facts(rows)))
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(str(row.facts.get(name)) for name in names), []).append(row)
    return list(groups.values())


def ranked_by_loss(rows: Sequence[Row]) -> list[list[Row]]:
    """Return the tasks whose rows learn differently, which makes their losses a result worth ranking.

    Unless all tasks do, those whose rows also differ in settings that change the speed are left out: they are part of
    a comparison of speeds, such as a collection of logs of different experiments.
    """
    tasks = by_task(rows)
    found = [task for task in tasks if swept_learning(task)]
    if len(found) == len(tasks):
        return found
    return [task for task in found if not settings_change_speed(task)]


def learning_settings(rows: Sequence[HasFacts]) -> list[str]:
    """Return the facts that affect the loss and differ between rows of one task. Rows equal in all share a loss."""
    differ = differing_facts(rows)
    return [*swept_learning(rows), *(name for name in ("precision", "train_iters") if name in differ)]


def swept_learning(rows: Sequence[HasFacts]) -> list[str]:
    """Return the arguments that differ between rows of one task and affect what they learn."""
    differ = differing_facts(rows)
    found = [name for name in LEARNING if name in differ]
    if "world_size" in differ and "global_batch_size" in found:
        found.remove("global_batch_size")  # weak scaling
    return found

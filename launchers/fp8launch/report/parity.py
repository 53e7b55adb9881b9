"""Loss parity: does a variant learn what its baseline learns, on the same data in the same order?

Two curves of the same data share most of their noise, so their relative difference is far less noisy than either curve.
The verdict takes its mean over the last quarter of the compared iterations. Repeats of one variant differ too: their
spread gives the 95 % interval of that mean, and parity is decided only if the interval lies on one side of the
tolerance. The sources of this project, and NVIDIA's own evaluations, use a tolerance of 1 to 2 %.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from fp8launch.report.differences import initialisation_differences, parity_differences
from fp8launch.report.intervals import t_quantile
from fp8launch.report.losses import Curve, average, first_loss_gone, losses, mean, relative, smooth
from fp8launch.report.run_report import RunReport
from fp8launch.wording import signed_percent

TOLERANCE = 0.02
# In its first steps every model only learns word frequencies: all recipes agree there, and none is tested.
FEWEST_ITERATIONS = 200
FEWEST_LINES = 20
ParityVerdict = Literal["within tolerance", "undecided", "lower", "apart", "diverged", "too short", "not comparable"]
# Verdicts that the sentence does not call by their own names.
_WORDS: Mapping[str, str] = {"lower": "lower loss", "apart": "higher loss"}


@dataclass(frozen=True)
class Parity:
    """The verdict on a variant and its baseline.

    `difference` is relative, and positive if the variant's loss is higher; `iterations` are the compared ones.
    `last_quarter` is its mean over the last quarter, and `noise` half the 95 % interval of that mean, from the spread
    of repeats (None without repeats). `diverged_at` is the iteration from which the smoothed difference stays beyond
    the tolerance, or from which one run's loss is gone (NaN). `runs` counts the runs of variant and baseline.
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
        """The verdict in the words of reports."""
        return _WORDS.get(self.verdict, self.verdict)

    def sentence(self) -> str:
        """Put the verdict in a sentence."""
        text = f"{self.variant} against {self.baseline}: {self.word}"
        if self.last_quarter is not None and self.verdict not in ("too short", "not comparable"):
            text += f", {signed_percent(self.last_quarter)} %"
            if self.noise is not None:
                text += f" ± {100 * self.noise:.2f} % between repeats"
            text += f" over the last quarter (tolerance {100 * self.tolerance:g} %"
            if self.noise is not None:
                text += f", {self.runs[0]} against {self.runs[1]} runs"
            text += ")"
        if self.diverged_at is not None:
            text += f", beyond it from iteration {self.diverged_at} on"
        return "; ".join([text, *self.reasons, *self.notes])


def parity(variant: Sequence[RunReport], base: Sequence[RunReport], tolerance: float, names: tuple[str, str]) -> Parity:
    """Compare the runs of a variant with the runs of its baseline, at least one each. `names` are the names of both.

    `tolerance` is relative: 0.02 for 2 %. Each run is compared with the baseline's runs that had the same data in
    the same order; the difference is the mean over them.
    """
    variant, base = conclusive(variant), conclusive(base)
    pairs = _pairs(variant, base)
    if not pairs:
        reasons = parity_differences(variant[0].facts, base[0].facts)
        return Parity(*names, "not comparable", tolerance, reasons=tuple(reasons))
    curves = {id(run): losses(run) for run in (*variant, *base)}
    notes = []
    for difference in initialisation_differences(pairs[0][0].facts, base[0].facts):
        notes.append(f"other initial weights: {difference}")
    if len(pairs) < len(variant):
        notes.append(f"{len(variant) - len(pairs)} of {len(variant)} runs had other data or another schedule")
    found = _judged(_compared(Parity(*names, "too short", tolerance, notes=tuple(notes)), pairs, base, curves))
    compared = [run for run, _ in pairs]
    lost_at, whose = first_loss_gone([(run.name, curves[id(run)]) for run in (*compared, *base)])
    if lost_at is not None:
        reason = f"{whose}: the loss is NaN from iteration {lost_at} on"
        return replace(found, verdict="diverged", diverged_at=lost_at, reasons=(reason,))
    if found.verdict in ("apart", "lower"):
        return replace(found, diverged_at=_beyond_to_the_end(found.iterations, found.smoothed, tolerance))
    return found


def _compared(
    unjudged: Parity,
    pairs: Sequence[tuple[RunReport, Sequence[RunReport]]],
    base: Sequence[RunReport],
    curves: Mapping[int, Curve],
) -> Parity:
    """Add the mean relative difference of the pairs, unless they have fewer than two iterations in common."""
    each = [relative(curves[id(run)], _mean_of(partners, curves)) for run, partners in pairs]
    points = sorted(mean(each).items())
    if len(points) < 2:
        return unjudged
    common, difference = zip(*points, strict=True)
    last = common[-max(1, len(common) // 4) :]
    window = max(1, len(common) // 20) | 1
    return replace(
        unjudged,
        iterations=common,
        difference=difference,
        smoothed=tuple(smooth(difference, window)),
        window=window,
        last_quarter=statistics.fmean(difference[-len(last) :]),
        runs=(len(pairs), len({id(partner) for _, partners in pairs for partner in partners})),
        noise=_noise([average(one, last) for one in each], _own_spread(base, curves, last)),
    )


def _mean_of(runs: Sequence[RunReport], curves: Mapping[int, Curve]) -> Curve:
    return mean([curves[id(run)] for run in runs])


def conclusive(runs: Sequence[RunReport]) -> list[RunReport]:
    """Return the runs that ended as planned or whose loss became NaN; all if there are none."""
    ended = []
    for run in runs:
        failure = run.failure
        if run.status in ("ok", "unhealthy") or (failure and failure.code == "nan"):
            ended.append(run)
    return ended or list(runs)


def _pairs(variant: Sequence[RunReport], base: Sequence[RunReport]) -> list[tuple[RunReport, list[RunReport]]]:
    """Pair each run with the baseline's runs of the same data and schedule; leave out runs without any."""
    found = []
    for run in variant:
        partners = [other for other in base if not parity_differences(run.facts, other.facts)]
        if partners:
            found.append((run, partners))
    return found


def _own_spread(base: Sequence[RunReport], curves: Mapping[int, Curve], last: Sequence[int]) -> list[list[float]]:
    """Return, for each set of equal runs of the baseline, each run's difference from their mean in the last quarter."""
    sets: list[list[RunReport]] = []
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
    """Return half the 95 % interval of the mean difference, from the spread of repeats; None without repeats."""
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


def _judged(found: Parity) -> Parity:
    """Decide by the interval around the last quarter's difference: inside the tolerance, outside it, or neither."""
    if found.last_quarter is None:
        return replace(found, reasons=("fewer than two iterations with both",))
    lines = len(found.iterations)
    span = found.iterations[-1] - found.iterations[0] + 1
    if span < FEWEST_ITERATIONS or lines < FEWEST_LINES:
        need = f"{FEWEST_ITERATIONS} iterations and {FEWEST_LINES} lines"
        return replace(found, reasons=(f"{span} iterations with {lines} lines are too few: parity needs {need}",))
    half = found.noise or 0.0
    if abs(found.last_quarter) + half <= found.tolerance:
        return replace(found, verdict="within tolerance")
    if abs(found.last_quarter) - half > found.tolerance:
        return replace(found, verdict="lower" if found.last_quarter < 0 else "apart")
    return replace(found, verdict="undecided", reasons=("repeats differ too much; more repeats are needed",))


def _beyond_to_the_end(numbers: Sequence[int], smoothed: Sequence[float], tolerance: float) -> int | None:
    first = None
    for number, value in zip(reversed(numbers), reversed(smoothed), strict=True):
        if abs(value) <= tolerance:
            break
        first = number
    return first

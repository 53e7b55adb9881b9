"""Loss parity: does a variant learn what its baseline learns, on the same data in the same order?

Two curves of the same data share most of their noise, so their relative difference is far steadier than either. It is
smoothed by a centred mean; the verdict is its mean over the last quarter of the compared iterations against the
tolerance. Repeats of one variant differ too: their spread is the noise below which a difference means nothing. The
sources of this project, and NVIDIA's own evaluations, speak of 1 to 2 %.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from fp8launch.logs.labels import LOSS_PREFIX
from fp8launch.report.differences import initialisation_differences, parity_differences
from fp8launch.report.intervals import t_quantile
from fp8launch.report.measured import Measured
from fp8launch.report.selection import values

TOLERANCE = 0.02
# In its first steps every model only learns how often words come: all recipes agree there, and none is tested.
FEWEST_ITERATIONS = 200
FEWEST_LINES = 20
_LM_LOSS = f"{LOSS_PREFIX}lm loss"
Curve = dict[int, float]  # loss, or a difference of it, by iteration
Verdict = Literal["within tolerance", "within noise", "apart", "diverged", "too short", "not comparable"]


@dataclass(frozen=True)
class Parity:
    """`difference` is relative, positive where the variant's loss is higher; `iterations` are those compared.

    `diverged_at` is the iteration from which the smoothed difference stays beyond the tolerance, or from which one
    run's loss is gone (NaN). `runs` are how many of the variant and of the baseline; `noise` is half the 95 % interval
    of `last_quarter` that the spread of repeats gives, None without repeats.
    """

    variant: str
    baseline: str
    verdict: Verdict
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

    def says(self) -> str:
        """The verdict in a sentence."""
        text = f"{self.variant} against {self.baseline}: {self.verdict}"
        if self.last_quarter is not None and self.verdict not in ("too short", "not comparable"):
            noise = "" if self.noise is None else f" ± {100 * self.noise:.2f} % between repeats"
            text += f", {100 * self.last_quarter:+.2f} %{noise} over the last quarter"
            text += f" (tolerance {100 * self.tolerance:g} %"
            text += f", {self.runs[0]} against {self.runs[1]} runs)" if self.noise is not None else ")"
        if self.diverged_at is not None:
            text += f", beyond it from iteration {self.diverged_at} on"
        return "; ".join([text, *self.reasons, *self.notes])

    def as_json(self) -> dict[str, object]:
        out = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {k: list(v) if isinstance(v, tuple) else v for k, v in out.items()}


def parity(variant: Sequence[Measured], base: Sequence[Measured], tolerance: float, names: tuple[str, str]) -> Parity:
    """The verdict on the runs of a variant and of its baseline, at least one each, called by `names`.

    `tolerance` is relative: 0.02 for 2 %. Each run is held against those runs of the baseline that had the same data
    in the same order; the difference is the mean over them.
    """
    variant, base = _telling(variant), _telling(base)
    partners = {id(run): [b for b in base if not parity_differences(run.facts, b.facts)] for run in variant}
    paired = [run for run in variant if partners[id(run)]]
    if not paired:
        reasons = parity_differences(variant[0].facts, base[0].facts)
        return Parity(*names, "not comparable", tolerance, reasons=tuple(reasons))
    curves = {id(run): losses(run) for run in (*variant, *base)}
    gone, who = _gone([(run.name, curves[id(run)]) for run in (*paired, *base)])
    notes = [f"other initial weights: {x}" for x in initialisation_differences(paired[0].facts, base[0].facts)]
    if len(paired) < len(variant):
        notes.append(f"{len(variant) - len(paired)} of {len(variant)} runs had other data or another schedule")
    against = {id(run): _mean([curves[id(b)] for b in partners[id(run)]]) for run in paired}
    each = [_relative(curves[id(run)], against[id(run)]) for run in paired]
    common = sorted(set(each[0]).intersection(*each[1:]))
    if len(common) < 2:
        reason = f"{who}: the loss is gone from iteration {gone} on" if gone else "fewer than two iterations with both"
        verdict: Verdict = "diverged" if gone else "too short"
        return Parity(*names, verdict, tolerance, diverged_at=gone, reasons=(reason,), notes=tuple(notes))
    difference = [statistics.fmean(one[n] for one in each) for n in common]
    window = max(1, len(common) // 20) | 1
    smoothed = smooth(difference, window)
    last = common[-max(1, len(common) // 4) :]
    quarter = statistics.fmean(difference[-len(last) :])
    noise = _noise([_average(one, last) for one in each], _own_spread(base, curves, last))
    beyond = _beyond_to_the_end(common, smoothed, tolerance)
    verdict, reasons = _judge(common, quarter, noise, tolerance)
    if gone is not None:
        verdict, reasons = "diverged", [f"{who}: the loss is gone from iteration {gone} on"]
    if noise is not None and noise > tolerance and verdict in ("within tolerance", "within noise"):
        notes.append(f"repeats differ by ±{100 * noise:.2g} %, more than the tolerance: more repeats would tell")
    return Parity(
        *names,
        verdict,
        tolerance,
        tuple(common),
        tuple(difference),
        tuple(smoothed),
        window,
        quarter,
        gone or (beyond if verdict in ("apart", "diverged") else None),
        tuple(reasons),
        tuple(notes),
        (len(paired), len({id(b) for run in paired for b in partners[id(run)]})),
        noise,
    )


def _telling(runs: Sequence[Measured]) -> list[Measured]:
    """The runs that speak for a variant: those that came to their end or lost their loss; without any, all."""
    ended = [r for r in runs if r.report.status == "ok" or (r.report.failure and r.report.failure.code == "nan")]
    return ended or list(runs)


def _relative(mine: Curve, theirs: Curve) -> Curve:
    """(mine - theirs) / theirs at the iterations that have both."""
    both = (n for n in mine if math.isfinite(mine[n]) and math.isfinite(theirs.get(n, math.nan)) and theirs[n] > 0)
    return {n: (mine[n] - theirs[n]) / theirs[n] for n in both}


def _mean(curves: Sequence[Curve]) -> Curve:
    common = set(curves[0]).intersection(*curves[1:])
    return {n: statistics.fmean(curve[n] for curve in curves) for n in common}


def _average(curve: Curve, numbers: Sequence[int]) -> float:
    return statistics.fmean(curve[n] for n in numbers)


def _own_spread(base: Sequence[Measured], curves: Mapping[int, Curve], last: Sequence[int]) -> list[list[float]]:
    """For each set of alike runs of the baseline: by how much each differs from their mean, over the last quarter."""
    sets: list[list[Measured]] = []
    for run in base:
        mine = next((s for s in sets if not parity_differences(s[0].facts, run.facts)), None)
        if mine is None:
            sets.append([run])
        else:
            mine.append(run)
    found = []
    for alike in sets:
        mean = _mean([curves[id(run)] for run in alike])
        each = [_relative(curves[id(run)], mean) for run in alike]
        found.append([_average(one, last) for one in each if all(n in one for n in last)])
    return found


def _noise(variant: Sequence[float], base: Sequence[Sequence[float]]) -> float | None:
    """Half the 95 % interval of the mean difference, from the spread of repeats of one variant; None without any."""
    groups = [g for g in (variant, *base) if g]
    freedom = sum(len(g) - 1 for g in groups)
    if not freedom:
        return None
    squares = sum(sum((x - statistics.fmean(g)) ** 2 for x in g) for g in groups)
    sides = 1 / len(variant) + 1 / max(1, sum(map(len, base)))
    return t_quantile(freedom) * math.sqrt(squares / freedom * sides)


def losses(run: Measured) -> Curve:
    """Loss by iteration, NaN where a line has none; without the first two lines of a process, which mix iterations."""
    lines = run.selection.lines
    logs = {id(line.log): line.log for line in lines}.values()
    names = sorted({name for log in logs for name in log.iterations.names if name.startswith(LOSS_PREFIX)})
    if not names:
        # A loss that was NaN from the start has never been printed; other programs print none at all.
        return dict.fromkeys((x.number for x in lines), math.nan) if run.report.nan_iterations else {}
    name = _LM_LOSS if _LM_LOSS in names else names[0]
    mixed = set(run.selection.dropped.get("process start", ()))
    return {x.number: loss for x, loss in zip(lines, values(lines, name), strict=True) if x.number not in mixed}


def _gone(curves: Sequence[tuple[str, Curve]]) -> tuple[int | None, str]:
    """The first iteration from which a curve that had values has none to its end, and whose curve it is."""
    starts = []
    for name, curve in curves:
        numbers = sorted(curve)
        last = next((i for i in range(len(numbers) - 1, -1, -1) if math.isfinite(curve[numbers[i]])), None)
        if last is not None and last + 1 < len(numbers):
            starts.append((numbers[last + 1], name))
        elif last is None and numbers:
            starts.append((numbers[0], name))
    return min(starts, default=(None, ""))


def _judge(common: Sequence[int], quarter: float, noise: float | None, tolerance: float) -> tuple[Verdict, list[str]]:
    span = common[-1] - common[0] + 1
    if span < FEWEST_ITERATIONS or len(common) < FEWEST_LINES:
        need = f"{FEWEST_ITERATIONS} iterations and {FEWEST_LINES} lines"
        return "too short", [f"{span} iterations, {len(common)} lines say nothing of parity; it takes {need}"]
    if abs(quarter) <= tolerance:
        return "within tolerance", []
    return ("within noise" if noise is not None and abs(quarter) <= noise else "apart"), []


def smooth(values: Sequence[float], window: int) -> list[float]:
    """The centred mean over `window` values, over fewer near the ends."""
    sums = [0.0, *accumulate(values)]
    half = window // 2
    return [
        (sums[min(len(values), i + half + 1)] - sums[max(0, i - half)])
        / (min(len(values), i + half + 1) - max(0, i - half))
        for i in range(len(values))
    ]


def _beyond_to_the_end(numbers: Sequence[int], smoothed: Sequence[float], tolerance: float) -> int | None:
    first = None
    for number, value in zip(reversed(numbers), reversed(smoothed), strict=True):
        if abs(value) <= tolerance:
            break
        first = number
    return first

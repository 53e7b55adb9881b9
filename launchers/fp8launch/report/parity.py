"""Loss parity: does a variant learn what its baseline learns, on the same data in the same order?

Two curves of the same data share most of their noise, so their relative difference is far steadier than either. It is
smoothed by a centred mean; the verdict is its mean over the last quarter of the compared iterations against the
tolerance. The sources of this project, and NVIDIA's own evaluations, speak of 1 to 2 %.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from fp8launch.logs.labels import LOSS_PREFIX
from fp8launch.report.differences import initialisation_differences, parity_differences
from fp8launch.report.measured import Measured
from fp8launch.report.selection import values

TOLERANCE = 0.02
# In its first steps every model only learns how often words come: all recipes agree there, and none is tested.
FEWEST_ITERATIONS = 200
FEWEST_LINES = 20
_LM_LOSS = f"{LOSS_PREFIX}lm loss"
Verdict = Literal["within tolerance", "apart", "diverged", "too short", "not comparable"]


@dataclass(frozen=True)
class Parity:
    """`difference` is relative, positive where the variant's loss is higher; `iterations` are those compared.

    `diverged_at` is the iteration from which the smoothed difference stays beyond the tolerance, or from which one
    run's loss is gone (NaN).
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

    def says(self) -> str:
        """The verdict in a sentence."""
        text = f"{self.variant} against {self.baseline}: {self.verdict}"
        if self.last_quarter is not None and self.verdict in ("within tolerance", "apart", "diverged"):
            text += f", {100 * self.last_quarter:+.2f} % over the last quarter (tolerance {100 * self.tolerance:g} %)"
        if self.diverged_at is not None:
            text += f", beyond it from iteration {self.diverged_at} on"
        return "; ".join([text, *self.reasons, *self.notes])

    def as_json(self) -> dict[str, object]:
        out = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {k: list(v) if isinstance(v, tuple) else v for k, v in out.items()}


def parity(
    variant: Measured, base: Measured, tolerance: float = TOLERANCE, names: tuple[str, str] | None = None
) -> Parity:
    """The verdict on two runs, called by `names`. `tolerance` is relative: 0.02 for 2 %."""
    names = names or (variant.name, base.name)
    if reasons := parity_differences(variant.facts, base.facts):
        return Parity(*names, "not comparable", tolerance, reasons=tuple(reasons))
    mine, theirs = losses(variant), losses(base)
    gone = _gone(mine, theirs)
    common = [n for n in mine if n in theirs and math.isfinite(mine[n]) and math.isfinite(theirs[n]) and theirs[n] > 0]
    notes = tuple(f"other initial weights: {text}" for text in initialisation_differences(variant.facts, base.facts))
    if len(common) < 2:
        reason = f"the loss is gone from iteration {gone} on" if gone else "fewer than two iterations with both losses"
        return Parity(
            *names, "diverged" if gone else "too short", tolerance, diverged_at=gone, reasons=(reason,), notes=notes
        )
    difference = [(mine[n] - theirs[n]) / theirs[n] for n in common]
    window = max(1, len(common) // 20) | 1
    smoothed = smooth(difference, window)
    quarter = statistics.fmean(difference[-max(1, len(difference) // 4) :])
    beyond = _beyond_to_the_end(common, smoothed, tolerance)
    verdict, reasons = _judge(common, quarter, gone, tolerance)
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
        notes,
    )


def losses(run: Measured) -> dict[int, float]:
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


def _gone(*curves: dict[int, float]) -> int | None:
    """The iteration from which a curve that had values has none to its end."""
    starts = []
    for curve in curves:
        numbers = sorted(curve)
        last = next((i for i in range(len(numbers) - 1, -1, -1) if math.isfinite(curve[numbers[i]])), None)
        if last is not None and last + 1 < len(numbers):
            starts.append(numbers[last + 1])
        elif last is None and numbers:
            starts.append(numbers[0])
    return min(starts, default=None)


def _judge(common: Sequence[int], quarter: float, gone: int | None, tolerance: float) -> tuple[Verdict, list[str]]:
    if gone is not None:
        return "diverged", [f"the loss is gone from iteration {gone} on"]
    span = common[-1] - common[0] + 1
    if span < FEWEST_ITERATIONS or len(common) < FEWEST_LINES:
        need = f"{FEWEST_ITERATIONS} iterations and {FEWEST_LINES} lines"
        return "too short", [f"{span} iterations, {len(common)} lines say nothing of parity; it takes {need}"]
    return ("within tolerance" if abs(quarter) <= tolerance else "apart"), []


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

"""Scaling efficiency: what each GPU still does when there are more of them.

Weak scaling keeps the work per GPU, so the global batch grows with the GPUs; strong scaling keeps the global batch.
In both the efficiency is the speed per GPU over that on the fewest GPUs: with a fixed batch the total speed-up
divided by the number of times more GPUs is the same quotient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fp8launch.report.differences import Verdict, speed_verdict
from fp8launch.report.intervals import Interval, ratio_interval
from fp8launch.report.rows import Row

Mode = Literal["weak", "strong", "neither"]


@dataclass(frozen=True)
class Ratio:
    """Speed over another row's. `value` is None where there is none to give: `verdict` or `missing` says why."""

    value: float | None
    interval: Interval | None
    against: str
    verdict: Verdict
    missing: str = ""

    def as_json(self) -> dict[str, object]:
        return {
            "value": self.value,
            "ci95": self.interval.as_json() if self.interval else None,
            "against": self.against,
            "comparable": self.verdict.comparable,
            "reasons": list(self.verdict.unlike),
            "noted": list(self.verdict.noted),
            "missing": self.missing or None,
        }


def ratio(row: Row, base: Row, verdict: Verdict, force: bool = False) -> Ratio:
    """How many times as fast as `base` a row is, per GPU. Between unlike rows the number is given only by force."""
    mine, theirs = _median(row), _median(base)
    missing = "" if mine and theirs else f"{(row if not mine else base).name}: {(row if not mine else base).status}"
    if not mine or not theirs or not (verdict.comparable or force):
        return Ratio(None, None, base.name, verdict, missing)
    interval = None if row is base else ratio_interval(row.speeds(), base.speeds())
    return Ratio(mine / theirs, interval, base.name, verdict)


def _median(row: Row) -> float | None:
    measure = row.measure(lambda report: report.tokens_per_s_per_gpu)
    if measure:
        return measure.median
    steps = row.measure(lambda report: report.step_time_ms)
    return 1e3 / steps.median if steps else None


@dataclass(frozen=True)
class Efficiency:
    mode: Mode
    ratio: Ratio

    def as_json(self) -> dict[str, object]:
        return {"scaling": self.mode, **self.ratio.as_json()}


def efficiencies(rows: Sequence[Row], force: bool = False) -> dict[str, Efficiency]:
    """By row name, for variants that were run on several numbers of GPUs."""
    found: dict[str, Efficiency] = {}
    for label in dict.fromkeys(row.label for row in rows):
        sized = sorted((r for r in rows if r.label == label and r.world), key=lambda r: r.world or 0)
        base = next((r for r in sized if r.good), None)
        if base is None or len(sized) < 2:
            continue
        mode = _mode([row for row in sized if row.good])
        for row in sized:
            found[row.name] = Efficiency(mode, ratio(row, base, _verdict(row, base, mode), force))
    return found


def _mode(rows: Sequence[Row]) -> Mode:
    batches = [(row.facts.get("global_batch_size"), row.world) for row in rows]
    per_gpu = {b / w for b, w in batches if isinstance(b, int | float) and w}
    totals = {b for b, _ in batches}
    if len(per_gpu) == 1:
        return "weak"
    return "strong" if len(totals) == 1 and None not in totals else "neither"


def _verdict(row: Row, base: Row, mode: Mode) -> Verdict:
    verdict = speed_verdict(row.facts, base.facts, axes={"world_size", "global_batch_size"})
    # The sizes differ by intention, and the mode says how; more nodes cannot be the same nodes.
    noted = tuple(n for n in verdict.noted if not n.startswith(("number of GPUs", "global batch ", "node set ")))
    if mode == "neither" and row is not base:
        batches = f"{row.facts.get('global_batch_size')} against {base.facts.get('global_batch_size')}"
        unlike = (*verdict.unlike, f"global batch {batches}: neither weak nor strong scaling")
        return Verdict(unlike, noted)
    return Verdict(verdict.unlike, noted)

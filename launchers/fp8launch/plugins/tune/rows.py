"""The result of a search as rows for the table, the picture and JSON."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from fp8launch.plugins.tune.judgement import MOST_RUNS, Judgement, Standing, standing
from fp8launch.plugins.tune.knobs import Knob
from fp8launch.plugins.tune.memory_fit import misfit
from fp8launch.plugins.tune.record import Record
from fp8launch.plugins.tune.search import LEAST_PREDICTED
from fp8launch.plugins.tune.state import Outcome, Variant, describe, predicted_gain


@dataclass(frozen=True)
class Row:
    """A variant that was tried, or a change that was not.

    `predicted` and `measured` are speed ratios to `over`, the best variant at that time. `low` and `high` are the 95 %
    interval of `measured`; `covers` names the variation that it includes. `kept` changes are part of the best variant.
    """

    change: str
    why: str
    touches: tuple[str, ...]
    predicted: float | None
    over: str = ""
    measured: float | None = None
    low: float | None = None
    high: float | None = None
    covers: str | None = None
    tflops_per_gpu: float | None = None
    tokens_per_s_per_gpu: float | None = None
    step_time_ms: float | None = None
    predicted_step_time_ms: float | None = None
    peak_memory_gib: float | None = None
    predicted_memory_gib: float | None = None
    kept: bool = False
    runs: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def percent(ratio: float) -> str:
    """Format a ratio of speeds as a gain, such as `+1.9 %`."""
    return f"{100 * (ratio - 1):+.1f} %"


def judged_in_words(judged: Judgement) -> str:
    """Return the verdict on a variant with its interval, as text."""
    if judged.ratio is None or judged.interval is None:
        return judged.why or judged.verdict
    text = f"{percent(judged.ratio)} [{percent(judged.interval.low)}, {percent(judged.interval.high)}]"
    return f"{text}: {_WORDS[judged.verdict]}"


_WORDS: Mapping[str, str] = {
    "start": "the unchanged recipe",
    "better": "faster, kept",
    "worse": "slower, not kept",
    "same": "no gain, not kept",
    "undecided": "undecided, will run again",
    "not settled": f"still undecided after {MOST_RUNS} runs of each, not kept",
    "failed": "failed",
}


def rows(record: Record, knobs: Mapping[str, Knob], why_ended: str) -> list[Row]:
    """Return the trials in order, followed by the changes that were not tried, with the reason."""
    now = standing(record.state)
    outcomes: dict[Variant, list[Outcome]] = {}
    for trial, outcome in record.state.results:
        outcomes.setdefault(trial.variant, []).append(outcome)
    touched = {}
    for number, start in enumerate(record.state.starts):
        for candidate in start.candidates:
            knob = knobs.get(candidate.knob)
            touches = knob.touches if knob else ()
            touched[number, candidate.name] = tuple(sorted(touches))
    found = [_tried(record, now, judged, outcomes[judged.variant], touched) for judged in now.judgements.values()]
    return [*found, *_untried(record, now, touched, why_ended)]


Touched = Mapping[tuple[int, str], tuple[str, ...]]


def _tried(
    record: Record, now: Standing, judged: Judgement, outcomes: list[Outcome], touched: Touched
) -> Row:  # fmt: skip
    state, variant = record.state, judged.variant
    good = [outcome for outcome in outcomes if outcome.status == "ok"]
    last = (good or outcomes)[-1]
    new = judged.new_changes
    start = state.starts[variant.start].name
    predicted = None
    if judged.against is not None and judged.against.start == variant.start:
        predicted = known_gain(predicted_gain(state, judged.against, variant))
    speeds = list(itertools.chain.from_iterable(outcome.speeds for outcome in good))
    why, kept = _WORDS[judged.verdict], _is_kept(now, judged)
    if judged.verdict == "better" and not kept:
        why = "faster, then replaced"
    elif judged.verdict == "undecided":
        why = "undecided when the search ended, not kept"
    elif judged.verdict == "failed":
        why = f"{last.status.replace('_', ' ')}: {judged.why or last.why}"
    touches: set[str] = set()
    for name in new:
        touches.update(touched[variant.start, name])
    speed = None
    if speeds:
        speed = statistics.median(speeds)
    row = Row(
        change=" + ".join(new) or start,
        predicted=predicted,
        tflops_per_gpu=_median(outcome.tflops for outcome in good),
        tokens_per_s_per_gpu=speed,
        step_time_ms=_median(outcome.step_ms for outcome in good),
        predicted_step_time_ms=last.predicted_ms,
        peak_memory_gib=last.peak_gib,
        predicted_memory_gib=last.predicted_gib,
        kept=kept,
        why=why,
        touches=tuple(sorted(touches)),
        runs=tuple(outcome.run for outcome in outcomes if outcome.run),
    )
    if judged.against:
        row = replace(row, over=describe(judged.against), measured=judged.ratio)
    if judged.interval:
        row = replace(row, low=judged.interval.low, high=judged.interval.high, covers=judged.interval.covers)
    return row


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _is_kept(now: Standing, judged: Judgement) -> bool:
    """Return whether the changes that a variant added are part of the best variant."""
    best = now.best
    if best is None or judged.verdict not in ("better", "start") or judged.variant.start != best.start:
        return False
    return set(judged.new_changes) <= set(best.changes)


def _untried(record: Record, now: Standing, touched: Touched, why_ended: str) -> list[Row]:
    state, best = record.state, now.best
    tried = set().union(*(judged.new_changes for judged in now.judgements.values()))
    found = []
    start = 0
    if best:
        start = best.start
    for candidate in state.starts[start].candidates:
        if candidate.name in tried:
            continue
        variant = Variant(start, (candidate.name,))
        gain = candidate.gain
        why = f"not tried: {why_ended}"
        too_large = misfit(state, variant)
        if too_large is not None:
            why = f"not tried: {too_large}"
        elif gain < LEAST_PREDICTED:
            why = "not tried: predicted to be slower"
        found.append(_left_out(candidate.name, gain, why, touched[start, candidate.name]))
    for refused in record.refused[start]:
        found.append(_left_out(refused.name, None, f"refused by the check: {refused.why}", ()))
    return found


def known_gain(gain: float | None) -> float | None:
    """Return a predicted gain, or None if it is exactly 1: the speed model does not cover the change."""
    if gain == 1:
        return None
    return gain


def _left_out(name: str, gain: float | None, why: str, touches: tuple[str, ...]) -> Row:
    return Row(change=name, predicted=known_gain(gain), why=why, touches=touches)

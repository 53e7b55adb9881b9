"""The result of a comparison in one sentence: what was fastest and by how much, or which loss was lowest.

A difference is stated only if its 95 % interval excludes zero. Rows that cannot be compared are left out and named.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from fp8launch.report.comparison import Comparison
from fp8launch.report.differences import arguments_unknown, settings_change_speed
from fp8launch.report.entry import Entry
from fp8launch.report.intervals import Interval, difference_interval
from fp8launch.report.loss_summary import LossSummary, by_task
from fp8launch.report.parity import Parity

_MOST_NAMES = 3
# Longer lists of names, in letters, are counted as well.
_LONGEST = 90


def conclusion(comparison: Comparison) -> str:
    """Return the sentence that a report opens with."""
    text = _sentence(comparison, comparison.good)
    # The size is part of every name, and redundant if all rows have the same one.
    sizes = {entry.row.size for entry in comparison.entries}
    if len(comparison.entries) > 1 and len(sizes) == 1 and "" not in sizes:
        text = text.replace(f", {sizes.pop()}", "")
    return text


def _sentence(comparison: Comparison, good: Sequence[Entry]) -> str:
    if not good:
        return "No run has a number to compare."
    losses = _about_loss(good) if comparison.about_loss else []
    if losses and len(good) > 1 and not settings_change_speed([entry.row for entry in good]):
        return f"{'. '.join(losses)}."
    speed = [_about_speed(comparison, good), _about_parity(comparison)]
    out = unlike_rows(comparison)
    if out:
        speed.append(f"{names(list(out))} cannot be compared with the rest")
    return f"{'. '.join([*losses, '; '.join(filter(None, speed))])}."


def unlike_rows(comparison: Comparison) -> dict[str, str]:
    """Return the rows without a ratio to the baseline because other work or another machine was measured, and why."""
    found: dict[str, str] = {}
    for _, entry, ratio in comparison.ratios():
        if ratio.value is None and not ratio.missing and not ratio.comparability.comparable:
            found.setdefault(entry.row.name, "; ".join(ratio.comparability.unlike))
    return found


def names(rows: Sequence[str]) -> str:
    """Join names as a sentence does; many are counted."""
    if len(rows) > _MOST_NAMES or (len(rows) > 1 and sum(map(len, rows)) > _LONGEST):
        return f"{len(rows)} rows"
    comma = ", "
    if any(comma in row for row in rows):
        comma = "; "
    return " and ".join(filter(None, (comma.join(rows[:-1]), rows[-1])))


# --- Speed ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Rated:
    """A row with its speed relative to another row, `base`.

    `noise` is the sum of both interquartile ranges, relative to the medians, if each row is a single run, else 0: the
    interval of a median over many steps is narrow, but it does not cover the differences between runs.
    """

    name: str
    base: str
    value: float
    interval: Interval | None
    noise: float

    @property
    def excludes_one(self) -> bool:
        return self.interval is not None and not self.interval.low <= 1 <= self.interval.high

    @property
    def sure(self) -> bool:
        """Whether the difference is more than noise."""
        return self.excludes_one and abs(self.value - 1) > self.noise

    def may_equal(self, other: _Rated) -> bool:
        """Whether two ratios relative to the same row may be the same."""
        if self.interval is None or other.interval is None:
            return True
        return self.interval.high >= other.interval.low and other.interval.high >= self.interval.low


def _about_speed(comparison: Comparison, good: Sequence[Entry]) -> str:
    by_name = {entry.row.name: entry for entry in good}
    rated, unknown = [], False
    for entry in good:
        speedup = entry.speedup
        if speedup is None or speedup.value is None or speedup.against == entry.row.name:
            continue
        if arguments_unknown(speedup.comparability):
            unknown = True
            continue
        noise, base = 0.0, by_name.get(speedup.against)
        if base and speedup.interval and speedup.interval.covers == "iterations":
            noise = 2 * (_relative_spread(entry) + _relative_spread(base))
        rated.append(_Rated(entry.row.name, speedup.against, speedup.value, speedup.interval, noise))
    bases = {one.base for one in rated}
    if len(bases) == 1:
        return _fastest(rated, bases.pop())
    if bases:
        return _in_pairs(rated, comparison)
    if unknown:
        return "Which of these runs is faster cannot be said: the logs do not contain their arguments"
    scaled = [entry for entry in good if entry.efficiency and entry.efficiency.ratio.value]
    if len(scaled) > 1:
        return _scaling(scaled)
    if len(good) > 1:
        return "No two of these runs can be compared"
    return _alone(good[0])


def _alone(entry: Entry) -> str:
    if entry.tokens:
        speed = f"{entry.tokens.median:,.0f} ± {entry.tokens.spread:,.0f} tokens/s/GPU"
    elif entry.step_time:
        speed = f"{entry.step_time.median:,.1f} ± {entry.step_time.spread:,.1f} ms per iteration"
    else:
        return f"{entry.row.name}: no speed known"
    return f"{entry.row.name}: {speed}, with nothing to compare it to"


def _interval(interval: Interval | None) -> str:
    if interval is None:
        return "interval not known"
    return f"95 % interval {interval.low:.3f} to {interval.high:.3f}{_within(interval)}"


def _within(interval: Interval) -> str:
    if interval.covers == "iterations":
        return " within these single runs"
    return ""


def _relative_spread(entry: Entry) -> float:
    measure = entry.tokens or entry.step_time
    if measure is None or not measure.median:
        return 0.0
    return measure.spread / measure.median


def _fastest(rated: Sequence[_Rated], base: str) -> str:
    """Name the fastest row, `base` included, if the intervals support it."""
    rated = sorted(rated, key=lambda one: one.value, reverse=True)
    faster = [one for one in rated if one.sure and one.value > 1]
    if faster:
        best = faster[0]
        text = f"{best.name} was fastest: {best.value:.2f}× {base} ({_interval(best.interval)})"
        near = [one.name for one in rated if one is not best and (one.may_equal(best) or one.value >= best.value)]
        if near:
            text += f", not distinguishable from {names(near)}"
        return text
    unsure = [one for one in rated if not one.sure]
    if not unsure:
        next_best = rated[0]
        text = f"{base} was fastest: {next_best.name} reached {next_best.value:.2f}× of it"
        return f"{text} ({_interval(next_best.interval)})"
    if any(one.excludes_one for one in unsure):
        return (
            f"No winner can be named among {names([base, *(one.name for one in unsure)])}: single runs whose steps "
            f"vary by up to {max(one.noise for one in unsure) / 2:.0%}; --repeat 3 measures how much runs differ"
        )
    alike = names([base, *(one.name for one in unsure)])
    interval = unsure[0].interval
    if interval is None:
        return f"No difference in speed can be shown between {alike}: too few iterations"
    return f"No difference in speed seen between {alike} ({_interval(interval)})"


def _in_pairs(rated: Sequence[_Rated], comparison: Comparison) -> str:
    """Sum up many pairs of a row and its own baseline."""
    faster = [one.value for one in rated if one.sure and one.value > 1]
    slower = [one.value for one in rated if one.sure and one.value < 1]
    unsure = len(rated) - len(faster) - len(slower)
    base = comparison.baseline or "the baseline"
    parts = []
    if faster:
        parts.append(f"{len(faster)} faster ({_range(faster)})")
    if slower:
        parts.append(f"{len(slower)} slower ({_range(slower)})")
    if unsure:
        parts.append(f"{unsure} not distinguishable")
    text = f"Of {len(rated)} rows against {base} of the same work: {', '.join(parts)}"
    if not faster:
        return text
    best = max((one for one in rated if one.sure), key=lambda one: one.value)
    return f"{text}; the largest gain is {best.name} with {best.value:.2f}× ({_interval(best.interval)})"


def _range(ratios: Sequence[float]) -> str:
    low, high = f"{min(ratios):.2f}", f"{max(ratios):.2f}"
    if low == high:
        return f"{low}×"
    return f"{low} to {high}×, median {statistics.median(ratios):.2f}×"


def _scaling(scaled: Sequence[Entry]) -> str:
    last = scaled[-1]
    assert last.efficiency is not None
    ratio = last.efficiency.ratio
    text = f"{last.row.name} kept {100 * (ratio.value or 0):.1f} % of the speed per GPU of {ratio.against}"
    if ratio.interval:
        bounds = f"{100 * ratio.interval.low:.1f} to {100 * ratio.interval.high:.1f} %"
        text += f" (95 % interval {bounds}{_within(ratio.interval)})"
    return text


# --- Loss -----------------------------------------------------------------------------------------------------------


def _about_parity(comparison: Comparison) -> str:
    """Whether the losses of other precisions agree with their baseline's."""
    out = unlike_rows(comparison)
    parities = [one for one in comparison.parities if one.variant not in out]
    if not parities:
        return ""
    by_verdict: dict[str, list[Parity]] = {}
    for one in parities:
        by_verdict.setdefault(one.verdict, []).append(one)
    too_short = by_verdict.pop("too short", [])
    by_verdict.pop("not comparable", None)
    if len(too_short) == len(parities):
        return "losses not judged: too few iterations"
    judged = list(chain.from_iterable(by_verdict.values()))
    if not judged:
        return "losses not judged: the runs differ in what decides them"
    agree = by_verdict.get("within tolerance", [])
    tolerance = f"{100 * parities[0].tolerance:g} %"
    if len(agree) == len(judged):
        return _all_agree(judged, len(parities) - len(judged), tolerance)
    parts = []
    for verdict in ("apart", "diverged", "lower", "undecided"):
        if verdict in by_verdict:
            parts.append(_of_verdict(by_verdict[verdict]))
    if agree:
        parts.append(f"{len(agree)} of {len(judged)} losses agree within {tolerance}")
    return "; ".join(parts)


def _all_agree(judged: Sequence[Parity], not_judged: int, tolerance: str) -> str:
    text = "losses agree"
    if not_judged:
        text = f"{len(judged)} losses agree, {not_judged} not judged"
    baseline = "the baseline"
    if len(judged) == 1:
        baseline = judged[0].baseline
    return f"{text} (within {tolerance} of {baseline})"


def _of_verdict(parities: Sequence[Parity]) -> str:
    """Describe the parities that share a verdict."""
    rows = names([one.variant for one in parities])
    word = parities[0].word
    if parities[0].verdict == "undecided":
        return f"whether the loss of {rows} agrees is undecided"
    if parities[0].verdict == "diverged":
        return f"the loss of {rows} diverged"
    sizes = []
    for one in parities:
        if one.last_quarter is not None:
            sizes.append(100 * one.last_quarter)
    shown = f"{min(sizes):+.2f} to {max(sizes):+.2f} %"
    if len(sizes) == 1:
        shown = f"{sizes[0]:+.2f} %"
    return f"{rows}: {word} than the baseline ({shown})"


def _about_loss(good: Sequence[Entry]) -> list[str]:
    """Rank the losses at the end, separately for each task."""
    losses = {entry.row.name: entry.loss for entry in good if entry.loss}
    sentences = []
    for group in by_task([entry.row for entry in good if entry.loss]):
        ranked = sorted(((row.name, losses[row.name]) for row in group), key=lambda named: named[1].end)
        sentence = _alone_in_loss(*ranked[0]) if len(ranked) == 1 else _lowest_loss(ranked)
        if len({row.trained_tokens for row in group} - {None}) > 1:
            sentence += "; the rows were trained on different numbers of tokens"
        sentences.append(sentence)
    return sentences


def _alone_in_loss(name: str, loss: LossSummary) -> str:
    text = f"{name}: loss {loss.end_text} at the end"
    if loss.interval is None:
        return text
    bounds = f"{loss.interval.low:.4f} to {loss.interval.high:.4f}"
    return f"{text}, mean ± standard deviation of {loss.seeds} seeds (95 % interval of the mean {bounds})"


def _lowest_loss(ranked: Sequence[tuple[str, LossSummary]]) -> str:
    (first, lowest), (second, next_lowest) = ranked[:2]
    text = f"Lowest loss at the end: {first} with {lowest.end_text}"
    others = f"next {second} with {next_lowest.end_text}"
    if min(lowest.seeds, next_lowest.seeds) < 2:
        if len(ranked) > 2:
            last, highest = ranked[-1]
            others += f", highest {last} with {highest.end_text}"
        return f"{text}, {others}; single seeds do not show the noise between seeds (--seeds 1,2,3 measures it)"
    alike = []
    for name, loss in ranked[1:]:
        if loss.seeds > 1 and difference_interval(loss.seed_values, lowest.seed_values).low <= 0:
            alike.append(name)
    interval = difference_interval(next_lowest.seed_values, lowest.seed_values)
    shown = f"difference {interval.low:+.4f} to {interval.high:+.4f}, 95 % interval over seeds"
    if interval.low <= 0:
        values = f"{lowest.end_text} and {next_lowest.end_text}"
        return f"No difference in loss seen between {names([first, *alike])} ({values}; {shown})"
    text = f"{text}, {others} ({shown})"
    if alike:
        text += f"; not distinguishable from {names(alike)}"
    return text

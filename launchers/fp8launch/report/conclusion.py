"""The result of a comparison in one sentence: what was fastest and by how much, or which loss was lowest.

A difference is one only where its 95 % interval excludes none; rows that cannot be compared are left out and named.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from itertools import chain

from fp8launch.report.comparison import Comparison
from fp8launch.report.differences import arguments_unknown
from fp8launch.report.entry import Entry
from fp8launch.report.intervals import Interval, difference_interval
from fp8launch.report.parity import Parity
from fp8launch.report.scaling import Ratio

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
    if comparison.about_loss:
        found = _about_loss(good)
    else:
        found = "; ".join(filter(None, (_about_speed(comparison, good), _about_parity(comparison))))
    out = unlike_rows(comparison)
    if out:
        found += f"; {names(list(out))} cannot be compared with the rest"
    return f"{found}."


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


def _about_speed(comparison: Comparison, good: Sequence[Entry]) -> str:
    rated, bases, unknown = [], set(), False
    for entry in good:
        speedup = entry.speedup
        if speedup and speedup.value is not None and speedup.against != entry.row.name:
            if arguments_unknown(speedup.comparability):
                unknown = True
                continue
            rated.append((entry, speedup))
            bases.add(speedup.against)
    noisy = _within_noise(rated, good)
    if len(bases) == 1:
        return _fastest(rated, bases.pop(), noisy)
    if bases:
        return _in_pairs(rated, comparison, noisy)
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
        return ", within these runs"
    return ""


def _sure(ratio: Ratio) -> bool:
    """Whether the interval excludes a ratio of 1."""
    return ratio.interval is not None and not ratio.interval.low <= 1 <= ratio.interval.high


def _within_noise(rated: Sequence[tuple[Entry, Ratio]], good: Sequence[Entry]) -> dict[str, float]:
    """Return the rows whose ratio of two single runs is smaller than the spread of their steps, with that spread.

    The interval of a median over many steps is narrow, but it does not cover what differs from run to run.
    """
    by_name = {entry.row.name: entry for entry in good}
    found = {}
    for entry, ratio in rated:
        base = by_name.get(ratio.against)
        if base is None or ratio.interval is None or ratio.interval.covers != "iterations":
            continue
        noise = _relative_spread(entry) + _relative_spread(base)
        if abs((ratio.value or 1) - 1) <= noise:
            found[entry.row.name] = noise
    return found


def _relative_spread(entry: Entry) -> float:
    measure = entry.tokens or entry.step_time
    if measure is None or not measure.median:
        return 0.0
    return measure.spread / measure.median


def _fastest(rated: Sequence[tuple[Entry, Ratio]], base: str, noisy: Mapping[str, float]) -> str:
    if noisy and not any(_sure(ratio) for entry, ratio in rated if entry.row.name not in noisy):
        if all(not _sure(ratio) for _, ratio in rated):
            return _alike(rated, base)
        return (
            f"No winner can be named among {names([base, *noisy])}: single runs whose steps vary by up to "
            f"{max(noisy.values()):.0%}; --repeat 3 measures how much runs differ"
        )
    rated = sorted(rated, key=lambda one: one[1].value or 0, reverse=True)
    for entry, ratio in rated:
        if entry.row.name not in noisy and _sure(ratio) and (ratio.value or 0) > 1:
            text = f"{entry.row.name} was fastest: {ratio.value:.2f}× {base} ({_interval(ratio.interval)})"
            near = _near(ratio, rated)
            if near:
                text += f", no difference seen to {names(near)}"
            return text
    if all(_sure(ratio) and entry.row.name not in noisy for entry, ratio in rated):
        entry, ratio = rated[0]
        value = ratio.value or 1.0
        return f"{base} was fastest: {entry.row.name} reached {value:.2f}× of it ({_interval(ratio.interval)})"
    return _alike([(entry, ratio) for entry, ratio in rated if not _sure(ratio) or entry.row.name in noisy], base)


def _alike(unsure_rows: Sequence[tuple[Entry, Ratio]], base: str) -> str:
    """Say that rows are not told apart from their baseline."""
    unsure = [ratio for _, ratio in unsure_rows]
    alike = names([base, *(entry.row.name for entry, _ in unsure_rows)])
    interval = unsure[0].interval
    if interval is None:
        return f"No difference in speed can be shown between {alike}: too few iterations"
    return f"No difference in speed seen between {alike} ({_interval(interval)})"


def _near(ratio: Ratio, rated: Sequence[tuple[Entry, Ratio]]) -> list[str]:
    """The other rows whose ratios may be the same."""
    near = []
    for entry, one in rated:
        if one is not ratio and _overlap(one, ratio):
            near.append(entry.row.name)
    return near


def _overlap(one: Ratio, other: Ratio) -> bool:
    """Whether two ratios over the same baseline may be the same."""
    if one.interval is None or other.interval is None:
        return True
    return one.interval.high >= other.interval.low and other.interval.high >= one.interval.low


def _in_pairs(rated: Sequence[tuple[Entry, Ratio]], comparison: Comparison, noisy: Mapping[str, float]) -> str:
    """Sum up many pairs of a row and its own baseline."""
    faster: list[float] = []
    slower: list[float] = []
    for entry, one in rated:
        value = one.value or 1.0
        sure = _sure(one) and entry.row.name not in noisy
        if sure and value > 1:
            faster.append(value)
        elif sure and value < 1:
            slower.append(value)
    unsure = len(rated) - len(faster) - len(slower)
    base = comparison.baseline or "the baseline"
    parts = []
    if faster:
        parts.append(f"{len(faster)} faster ({_range(faster)})")
    if slower:
        parts.append(f"{len(slower)} slower ({_range(slower)})")
    if unsure:
        parts.append(f"no difference seen in {unsure}")
    best, ratio = max(rated, key=lambda one: (_sure(one[1]) and one[0].row.name not in noisy, one[1].value or 0))
    text = f"Of {len(rated)} rows against {base} of the same work: {', '.join(parts)}"
    if not faster:
        return text
    return f"{text}; the largest gain is {best.row.name} with {ratio.value:.2f}× ({_interval(ratio.interval)})"


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


def _about_loss(good: Sequence[Entry]) -> str:
    """Which row had the lowest loss at the end, and whether the next one's differs."""
    known = []
    for entry in good:
        if entry.loss:
            known.append((entry.row.name, entry.loss))
    known.sort(key=lambda named: named[1].smoothed)
    if len(known) < 2:
        return "No two runs have a loss to compare"
    (first, lowest), (second, next_lowest) = known[:2]
    if min(lowest.seeds, next_lowest.seeds) < 2:
        others = f"next {second} with {next_lowest.smoothed:.4f}"
        if len(known) > 2:
            last, highest = known[-1]
            others += f", highest {last} with {highest.smoothed:.4f}"
        return (
            f"Lowest loss at the end: {first} with {lowest.smoothed:.4f}, {others}; "
            "one seed each, so the noise between seeds is not known (--seeds 1,2,3 measures it)"
        )
    interval = difference_interval(next_lowest.seed_values, lowest.seed_values)
    values = f"{lowest.text} against {next_lowest.text}"
    shown = f"difference {interval.low:+.4f} to {interval.high:+.4f}, 95 % interval over seeds"
    if interval.low <= 0 <= interval.high:
        return f"No difference in loss seen between {first} and {second} ({values}; {shown})"
    return f"Lowest loss at the end: {first}, below {second} ({values}; {shown})"

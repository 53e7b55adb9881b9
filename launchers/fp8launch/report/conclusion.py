"""State the result of a comparison in a sentence: the fastest row and its lead, or the lowest loss.

A difference is stated only if its 95 % interval excludes zero. Rows that cannot be compared are named and left out.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import chain

from fp8launch.report.columns import all_columns
from fp8launch.report.comparison import Comparison
from fp8launch.report.differences import (
    arguments_unknown,
    is_unknown,
    settings_change_speed,
    unstated,
)
from fp8launch.report.intervals import Interval, difference_interval
from fp8launch.report.losses import LossSummary, learning_settings, loss_summary, ranked_by_loss
from fp8launch.report.parity import Parity
from fp8launch.report.ratios import SHARED
from fp8launch.report.rows import Ratio, Row, in_units, labels_of, scaling_modes
from fp8launch.report.variant_labels import words_of
from fp8launch.wording import counted

_MOST_NAMES = 3
# Lists of names longer than this many characters also get a count.
_LONGEST = 90


def conclusion(comparison: Comparison) -> str:
    """Return the sentences that a report opens with."""
    good = comparison.good
    if not good:
        faults = ", ".join(sorted({row.faults for row in comparison.rows}))
        sentences = [f"No run has a speed or a final loss ({faults})"]
    elif len(good) == 1:
        sentences = [_alone(good[0])]
    else:
        sentences = _about_loss(good)
        if not sentences or settings_change_speed(good):
            sentences.append("; ".join(filter(None, (_about_speed(comparison, good), _about_parity(comparison)))))
            if out := unlike_rows(comparison):
                sentences.append(f"{names(list(out))} cannot be compared with the rest")
    sentences += [column.conclude(comparison.rows) for column in all_columns()]
    if good:
        sentences += _without_result(comparison)
    return "".join(f"{sentence}. " for sentence in filter(None, sentences)).rstrip()


def _without_result(comparison: Comparison) -> list[str]:
    """Name the runs missing from the other sentences, such as seeds that diverged at a high learning rate."""
    found, none = [], []
    for row in comparison.rows:
        if not row.good:
            none.append(f"{row.name} ({row.faults})")
        elif row.faults:
            found.append(f"Only {len(row.good)} of {counted(len(row.runs), 'run')} of {row.name} count ({row.faults})")
    if len(found) > _MOST_NAMES:
        found = [f"{len(found)} rows lack some of their runs"]
    if len(none) > _MOST_NAMES:
        found.append(f"{len(none)} rows have no result")
    elif none:
        found.append(f"No result: {'; '.join(none)}")
    return found


def unlike_rows(comparison: Comparison) -> dict[str, str]:
    """Return the rows that have no ratio to the baseline because the work or the machine differs, with the reason."""
    found: dict[str, str] = {}
    for _, row, ratio in comparison.ratios():
        if ratio.value is None and not ratio.missing and not ratio.comparability.comparable:
            found.setdefault(row.name, "; ".join(ratio.comparability.unlike))
    return found


def names(rows: Sequence[str]) -> str:
    """Join names as in a sentence, with a count if there are many."""
    if len(rows) > _MOST_NAMES or (len(rows) > 1 and sum(map(len, rows)) > _LONGEST):
        return f"{len(rows)} rows"
    comma = "; " if any(", " in row for row in rows) else ", "
    return " and ".join(filter(None, (comma.join(rows[:-1]), rows[-1])))


# --- Speed ----------------------------------------------------------------------------------------------------------


# A row's name and its speed relative to another row. The ratio's value is never None.
_Rated = tuple[str, Ratio]


def _value(rated: _Rated) -> float:
    _, ratio = rated
    assert ratio.value is not None
    return ratio.value


def _may_be_equal(a: Ratio, b: Ratio) -> bool:
    """Return whether two ratios to the same row may be equal, given their intervals."""
    if a.interval is None or b.interval is None:
        return True
    return a.interval.high >= b.interval.low and b.interval.high >= a.interval.low


def _about_speed(comparison: Comparison, good: Sequence[Row]) -> str:
    scaled = [row for row in good if row.efficiency and row.efficiency.ratio.value]
    if len(scaled) > 1 and not _settings_beyond_size(good):
        return _scaling(scaled)
    rated, unknown = [], False
    for row in good:
        speedup = row.speedup
        if speedup is None or speedup.value is None or speedup.against == row.name:
            continue
        if arguments_unknown(speedup.comparability):
            unknown = True
        else:
            rated.append((row.name, speedup))
    bases = {ratio.against for _, ratio in rated}
    if len(bases) == 1:
        return _fastest(rated, bases.pop())
    if bases:
        return _in_pairs(rated, comparison)
    if any(row.shared_with for row in good):
        return f"Speeds cannot be compared, because {SHARED}"
    if unknown:
        return (
            f"It is unknown which of these runs is faster: {_without_arguments(good)} not contain all arguments, "
            "so the work may differ"
        )
    if len(scaled) > 1:
        return _scaling(scaled)
    return "No two of these runs can be compared"


def _settings_beyond_size(good: Sequence[Row]) -> bool:
    """Return whether settings other than the number of GPUs change the speed."""
    by_size: dict[int | None, list[Row]] = {}
    for row in good:
        by_size.setdefault(row.world, []).append(row)
    return any(map(settings_change_speed, by_size.values()))


def _without_arguments(good: Sequence[Row]) -> str:
    """Name the rows whose logs do not show what work they did."""
    lacking = [row.name for row in good if unstated(row.facts)]
    return f"the logs of {names(lacking)} do" if len(lacking) > 1 else f"the log of {names(lacking)} does"


def _alone(row: Row) -> str:
    found = []
    if row.loss and row.loss.seeds > 1:
        found.append(_loss_of_seeds(row.loss))
    if row.tokens:
        unit = in_units([row], "tokens/s/GPU")
        found.append(f"{row.tokens.median:,.0f} ± {row.tokens.spread:,.0f} {unit}")
    elif row.step_time:
        found.append(f"{row.step_time.median:,.1f} ± {row.step_time.spread:,.1f} ms per iteration")
    else:
        return f"{row.name}: speed unknown"
    return f"{row.name}: {'; '.join(found)}, with nothing to compare it to"


def _interval(interval: Interval | None) -> str:
    if interval is None:
        return "interval unknown"
    return f"95 % interval {interval.low:.3f} to {interval.high:.3f}{_within(interval)}"


def _within(interval: Interval) -> str:
    return " within these single runs" if interval.covers == "iterations" else ""


def _fastest(rated: Sequence[_Rated], base: str) -> str:
    """Name the fastest row, `base` included, if the intervals support it."""
    rated = sorted(rated, key=_value, reverse=True)
    faster = [one for one in rated if one[1].distinguishable and _value(one) > 1]
    if faster:
        best, ratio = faster[0]
        reached = f"{_value(faster[0]):.2f}× {base} ({_interval(ratio.interval)})"
        near = [
            one[0]
            for one in rated
            if one is not faster[0] and (_may_be_equal(one[1], ratio) or _value(one) >= _value(faster[0]))
        ]
        if near:
            return f"{names([best, *near])} were fastest, without a clear order: {best} reached {reached}"
        return f"{best} was fastest: {reached}"
    unsure = [one for one in rated if not one[1].distinguishable]
    if not unsure:
        next_best, ratio = rated[0]
        text = f"{base} was fastest: {next_best} reached {_value(rated[0]):.2f}× its speed"
        return f"{text} ({_interval(ratio.interval)})"
    alike = names([base, *(name for name, _ in unsure)])
    if any(ratio.excludes_one for _, ratio in unsure):
        widest = max(unsure, key=lambda one: abs(_value(one) - 1))
        gap, noise = 100 * abs(_value(widest) - 1), 100 * widest[1].noise
        return (
            f"No winner can be named among {alike}: single runs that differ "
            f"by {gap:.0f} %{' at most' if len(unsure) > 1 else ''}, less than the interquartile ranges of their "
            f"steps ({noise:.0f} % together); --repeat 3 measures how much runs differ"
        )
    intervals = [ratio.interval for _, ratio in unsure if ratio.interval]
    if not intervals:
        return f"No difference in speed can be shown between {alike}: too few iterations"
    shown = _interval(intervals[0])
    if len(intervals) > 1:
        low, high = min(one.low for one in intervals), max(one.high for one in intervals)
        shown = f"95 % intervals between {low:.3f} and {high:.3f}{_within(intervals[0])}"
    return f"No difference in speed seen between {alike} ({shown})"


def _in_pairs(rated: Sequence[_Rated], comparison: Comparison) -> str:
    """Summarize many pairs of a row and its own baseline."""
    sure = [one for one in rated if one[1].distinguishable]
    faster = [value for value in map(_value, sure) if value > 1]
    slower = [value for value in map(_value, sure) if value < 1]
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
    best, ratio = max(sure, key=_value)
    return f"{text}; the largest gain is {best} with {max(faster):.2f}× ({_interval(ratio.interval)})"


def _range(ratios: Sequence[float]) -> str:
    low, high = f"{min(ratios):.2f}", f"{max(ratios):.2f}"
    if low == high:
        return f"{low}×"
    return f"{low} to {high}×, median {statistics.median(ratios):.2f}×"


def _scaling(scaled: Sequence[Row]) -> str:
    """State the efficiency of one variant at each size, or of several variants at their largest size."""
    modes = scaling_modes(scaled)
    by_label: dict[str, list[_Rated]] = {}
    for row in scaled:
        assert row.efficiency is not None
        ratio = row.efficiency.ratio
        if ratio.against != row.name:
            by_label.setdefault(row.label, []).append((row.name, ratio))
    shown = list(chain.from_iterable(by_label.values()))
    if len(shown) > _MOST_NAMES:
        shown = [sized[-1] for sized in by_label.values()]
    parts = []
    speed = in_units(scaled, "speed per GPU")
    for name, ratio in shown:
        text = f"{name} kept {100 * (ratio.value or 0):.1f} % of the {speed} of {ratio.against}"
        if ratio.interval:
            bounds = f"{100 * ratio.interval.low:.1f} to {100 * ratio.interval.high:.1f} %"
            text += f" (95 % interval {bounds}{_within(ratio.interval)})"
        parts.append(text)
    prefix = f"{modes[0].capitalize()} scaling: " if modes in (["weak"], ["strong"]) else ""
    return f"{prefix}{'; '.join(parts)}"


# --- Loss -----------------------------------------------------------------------------------------------------------


def _about_parity(comparison: Comparison) -> str:
    """State whether the losses of other precisions agree with the baseline's."""
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
        if all(map(is_unknown, chain.from_iterable(one.reasons for one in parities))):
            return "losses not judged: the logs do not contain all arguments"
        return "losses not judged: the runs differ in settings that affect the loss"
    agree = by_verdict.get("within tolerance", [])
    tolerance = f"{100 * parities[0].tolerance:g} %"
    if len(agree) == len(judged):
        text = "losses agree"
        if len(judged) < len(parities):
            text = f"{len(judged)} losses agree, {len(parities) - len(judged)} not judged"
        baseline = judged[0].baseline if len(judged) == 1 else "the baseline"
        return f"{text} (within {tolerance} of {baseline})"
    parts = []
    for verdict in ("apart", "diverged", "lower", "undecided"):
        if verdict in by_verdict:
            parts.append(_of_verdict(by_verdict[verdict]))
    if agree:
        parts.append(f"{len(agree)} of {len(judged)} losses agree within {tolerance}")
    return "; ".join(parts)


def _of_verdict(parities: Sequence[Parity]) -> str:
    """Describe the parities that share a verdict."""
    rows = names([one.variant for one in parities])
    if parities[0].verdict == "undecided":
        return f"it is undecided whether the loss of {rows} agrees with the baseline's"
    if parities[0].verdict == "diverged":
        return f"the loss of {rows} diverged"
    sizes = []
    for one in parities:
        if one.last_quarter is not None:
            sizes.append(100 * one.last_quarter)
    shown = f"{min(sizes):+.2f} to {max(sizes):+.2f} %"
    if len(sizes) == 1:
        shown = f"{sizes[0]:+.2f} %"
        if parities[0].diverged_at is not None:
            shown += f" at the end, from iteration {parities[0].diverged_at} on"
    return f"the loss of {rows} differs from the baseline's by more than {100 * parities[0].tolerance:g} % ({shown})"


def _about_loss(good: Sequence[Row]) -> list[str]:
    """Rank the final losses of each task, or state the loss of one setting over several seeds.

    If only the precision differs, losses are compared with the baseline's iteration by iteration, and not ranked.
    """
    rows = [row for row in good if row.loss]
    tasks = ranked_by_loss(rows)
    sentences = []
    for task in tasks:
        ranked = sorted(_by_setting(task, len(tasks) == 1), key=lambda named: named[1].end)
        if len(ranked) < 2:
            continue
        lengths = {run.training.iteration_last or 0 for row in task for run in row.good}
        sentence = _lowest_loss(ranked, lengths)
        tokens = {run.tokens_until(run.training.iteration_last or 0) for row in task for run in row.good[:1]}
        if len(tokens - {None}) > 1:
            sentence += ". The rows were trained on different numbers of tokens"
        sentences.append(sentence)
    labels = labels_of(rows)
    if not tasks and len(labels) == 1:
        loss = loss_summary(list(chain.from_iterable(row.good for row in rows)))
        if loss and loss.seeds > 1:
            sentences.append(f"{labels[0]}: {_loss_of_seeds(loss)}")
    return sentences


def _by_setting(rows: Sequence[Row], only_task: bool) -> list[tuple[str, LossSummary]]:
    """Pool rows that differ only in size or speed, so that there is one loss per learning setting.

    A pooled loss is named after its setting, or after its first row if the setting does not identify the task.
    """
    deciding = learning_settings(rows)
    settings: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        settings.setdefault(tuple(str(row.facts.get(name)) for name in deciding), []).append(row)
    pooled = []
    for same in settings.values():
        name = same[0].name
        if only_task and len(same) > 1 and len(settings) > 1:
            name = ", ".join(words_of(fact, same[0].facts[fact]) for fact in deciding if fact in same[0].facts)
        loss = loss_summary(list(chain.from_iterable(row.good for row in same)))
        if loss:
            pooled.append((name, loss))
    return pooled


def _loss_of_seeds(loss: LossSummary) -> str:
    text = f"loss {loss.end_text} at the end, mean ± standard deviation of {loss.seeds} seeds"
    if loss.interval is None:
        return text
    return f"{text} (95 % interval of the mean {loss.interval.low:.4f} to {loss.interval.high:.4f})"


def _lowest_loss(ranked: Sequence[tuple[str, LossSummary]], lengths: set[int]) -> str:
    """Name the lowest loss and the losses that the seeds cannot separate from it."""
    (first, lowest), (second, next_lowest) = ranked[:2]
    text = f"Lowest loss at the end: {first} with {lowest.end_text}, next {second} with {next_lowest.end_text}"
    single = [name for name, loss in ranked[:2] if loss.seeds < 2]
    if single:
        if len(ranked) > 2:
            last, highest = ranked[-1]
            text += f", highest {last} with {highest.end_text}"
        whose = f"{names(single)} {'have' if len(single) > 1 else 'has'}"
        if all(loss.seeds < 2 for _, loss in ranked):
            whose = "each has"
        return f"{text}. The order may be chance, because {whose} a single seed: --seeds 1,2,3 measures the noise"
    alike: list[str] = []
    worse: list[str] = []
    for name, loss in ranked[1:]:
        known = loss.seeds > 1 and difference_interval(loss.seed_values, lowest.seed_values).low > 0
        (worse if known else alike).append(name)
    interval = difference_interval(next_lowest.seed_values, lowest.seed_values)
    seeds = " and ".join(map(str, sorted({lowest.seeds, next_lowest.seeds})))
    shown = f"{second} minus {first}: {interval.low:+.4f} to {interval.high:+.4f}, 95 % interval"
    if interval.low > 0:
        text += f" ({shown} over {seeds} seeds each)"
        return f"{text}; not distinguishable from {names(alike)}" if alike else text
    text += f"; {seeds} seeds each cannot separate {first} from {names(alike)} ({shown})"
    if worse:
        when = f" after {max(lengths):,} iterations" if len(lengths) == 1 else ""
        text += f"; {names(worse)} {'is' if len(worse) == 1 else 'are'} worse than {first}{when} (95 %)"
    return text

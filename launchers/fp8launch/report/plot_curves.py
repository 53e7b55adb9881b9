"""Pictures over iterations: step time, throughput, loss, and the loss against the baseline's."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from fp8launch.report.comparison import Comparison, Entry
from fp8launch.report.measured import Measured
from fp8launch.report.parity import losses, smooth
from fp8launch.report.plot_style import (
    INK,
    dash_of,
    few_ticks,
    legend_below,
    name_of,
    representative,
    thinned,
    thousands,
)


def over_iterations(ax: Any, runs: Sequence[tuple[Entry, Measured]], colours: dict[str, str], what: str) -> None:
    """Every iteration line; those that do not count are pale, those beyond the frame are counted at its edge."""
    top = 0.0
    beyond = 0
    drawn = []
    for entry, run in runs:
        kept = {line.number for line in run.kept}
        lines = [line for line in run.selection.lines if line.step_time_ms > 0]
        tokens = _tokens_per_step(run)
        if what == "speed" and tokens is None:
            continue
        values = [x.step_time_ms if what == "step" else (tokens or 0) / (x.step_time_ms / 1e3) for x in lines]
        steady = [v for x, v in zip(lines, values, strict=True) if x.number in kept]
        if steady:
            top = max(
                top,
                1.35 * statistics.median(steady),
                1.02 * max(thinned(sorted(steady)[: -(-len(steady) * 99 // 100)])),
            )
            drawn.append((entry, [x.number for x in lines], values, kept))
    for entry, numbers, values, kept in drawn:
        colour = colours[entry.row.label]
        points = list(zip(numbers, values, strict=True))
        good = thinned([p for p in points if p[0] in kept])
        others = [e for e, *_ in drawn]
        ax.plot(
            *zip(*good, strict=True),
            color=colour,
            linewidth=1.2,
            marker="." if len(good) < 60 else "",
            label=name_of(entry, others),
            linestyle=dash_of(entry, others),
        )
        rest = [p for p in points if p[0] not in kept and p[1] <= top]
        if rest:
            ax.plot(*zip(*thinned(rest), strict=True), "x", color=colour, alpha=0.45, markersize=5)
        over = [p for p in points if p[1] > top]
        beyond += len(over)
        if over:
            ax.plot([p[0] for p in over], [top * 0.985] * len(over), "^", color=colour, alpha=0.6, markersize=4)
    ax.set_ylim(0, top or 1)
    _borders(ax, [run for _, run in runs])
    ax.set_xlabel("iteration (× not counted" + (f", ▲ {beyond} beyond the frame)" if beyond else ")"))
    ax.set_ylabel("ms" if what == "step" else "tokens/s/GPU")
    ax.yaxis.set_major_formatter(thousands())
    ax.xaxis.set_major_locator(few_ticks())
    legend_below(ax)


def _borders(ax: Any, runs: Sequence[Measured]) -> None:
    """A line where a phase begins, with its name; borders that several runs share come once."""
    names: dict[int, list[str]] = {}
    for run in runs:
        for phase in run.report.phases[1:]:
            names.setdefault(phase.begin, []).append(phase.name)
    for begin, phases in names.items():
        ax.axvline(begin + 0.5, color=INK, linewidth=0.7, linestyle=":", alpha=0.7)
        where = {"xycoords": ax.get_xaxis_transform(), "textcoords": "offset points"}
        ax.annotate(", ".join(dict.fromkeys(phases)), (begin + 0.5, 1), (2, -9), fontsize=7, alpha=0.8, **where)


def _tokens_per_step(run: Measured) -> float | None:
    report = run.report
    if not report.seq_length or not report.world_size or not report.global_batch_size:
        return None
    return report.seq_length * report.global_batch_size / report.world_size


def loss_curves(ax: Any, curves: Sequence[tuple[Entry, Measured]], colours: dict[str, str]) -> None:
    """The first run of each row, smoothed over its own noise; other repeats thin beside it."""
    lowest, highest = float("inf"), 0.0
    for entry, run in curves:
        for repeat in entry.row.runs:
            others = thinned([(n, v) for n, v in sorted(losses(repeat).items()) if v == v])
            if repeat is not run and len(others) > 1:
                numbers, values = zip(*others, strict=True)
                smoothed = smooth(values, _window(values))
                ax.plot(numbers, smoothed, color=colours[entry.row.label], linewidth=0.6, alpha=0.5)
        points = thinned([(n, v) for n, v in sorted(losses(run).items()) if v == v])
        if len(points) < 2:
            continue
        numbers, values = zip(*points, strict=True)
        colour = colours[entry.row.label]
        if len(values) > 60:
            ax.plot(numbers, values, color=colour, linewidth=0.5, alpha=0.35)
            values = tuple(smooth(values, _window(values)))
        style = dash_of(entry, [e for e, _ in curves])
        ax.plot(numbers, values, style, color=colour, linewidth=1.3, label=name_of(entry, [e for e, _ in curves]))
        lowest, highest = min(lowest, *values), max(highest, *values)
    _borders(ax, [run for _, run in curves])
    ax.set_xlabel("iteration")
    ax.xaxis.set_major_locator(few_ticks())
    # A curve that falls by little would be a flat line from zero.
    if lowest > 0.5 * highest:
        ax.set_ylabel("loss (axis does not start at 0)")
    else:
        ax.set_ylabel("loss")
        ax.set_ylim(0, None)
    legend_below(ax)


def _window(values: Sequence[float]) -> int:
    return max(3, len(values) // 40) | 1 if len(values) > 60 else 1


def loss_difference(ax: Any, comparison: Comparison, colours: dict[str, str]) -> None:
    tolerance = 0.0
    entry_of = {entry.row.name: entry for entry in comparison.entries}
    reach = 0.0
    shown = {entry.row.name for entry in representative(comparison.entries)}
    for parity in comparison.parities:
        if len(parity.difference) < 2 or parity.variant not in shown:
            continue
        tolerance = max(tolerance, parity.tolerance)
        entry = entry_of[parity.variant]
        points = thinned(list(zip(parity.iterations, (100 * v for v in parity.smoothed), strict=True)))
        ax.plot(
            *zip(*points, strict=True),
            color=colours[entry.row.label],
            linewidth=1.3,
            label=f"{name_of(entry, comparison.entries)}: {parity.verdict}",
        )
        reach = max(reach, *(abs(v) for _, v in points))
    ax.axhspan(-100 * tolerance, 100 * tolerance, color=INK, alpha=0.12, linewidth=0)
    ax.axhline(0, color=INK, linewidth=0.8)
    bound = 1.15 * max(reach, 150 * tolerance)
    ax.set_ylim(-bound, bound)
    ax.set_xlabel("iteration")
    ax.xaxis.set_major_locator(few_ticks())
    ax.set_ylabel(f"difference of the loss (%)\nband: tolerance {100 * tolerance:g} %")
    legend_below(ax)

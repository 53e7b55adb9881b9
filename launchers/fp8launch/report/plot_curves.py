"""Pictures over iterations: step time, throughput, loss, and the loss against the baseline's."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fp8launch.report.columns import Entry
from fp8launch.report.parity import Parity, losses, smooth
from fp8launch.report.plot_style import INK, dash_of, few_ticks, legend_below, name_of, thinned, thousands
from fp8launch.report.run_data import RunData

Point = tuple[int, float]
# The frame reaches this far above the median, and shows 99 of 100 steady values.
_ABOVE_MEDIAN = 1.35
# Longer curves are smoothed.
_LONG = 60


@dataclass(frozen=True)
class Trace:
    """The values of one run over iterations: the points that count and the others."""

    entry: Entry
    run: RunData
    steady: list[Point]
    others: list[Point]


def trace_of(entry: Entry, run: RunData, unit: str) -> Trace | None:
    """Return the points of a run in `ms` or `tokens/s/GPU`; None where its log does not determine that."""
    lines = [line for line in run.steady_state.lines if line.step_time_ms > 0]
    numbers = [line.number for line in lines]
    values = [line.step_time_ms for line in lines] if unit == "ms" else run.tokens_per_s(lines)
    kept = {line.number for line in run.kept}
    steady: list[Point] = []
    others: list[Point] = []
    for number, value in zip(numbers, values, strict=True):
        if math.isfinite(value):
            (steady if number in kept else others).append((number, value))
    return Trace(entry, run, steady, others) if steady else None


def over_iterations(ax: Any, traces: Sequence[Trace], colours: dict[str, str], unit: str) -> None:
    """Draw every iteration line; those that do not count are pale, those beyond the frame are counted at its edge."""
    top = max(_frame_of(trace) for trace in traces)
    entries = [trace.entry for trace in traces]
    beyond = sum(_draw_trace(ax, trace, entries, colours[trace.entry.row.label], top) for trace in traces)
    ax.set_ylim(0, top)
    _borders(ax, [trace.run for trace in traces])
    edge = f", ▲ {beyond} beyond the frame" if beyond else ""
    ax.set_xlabel(f"iteration (× not counted{edge})")
    ax.set_ylabel(unit)
    ax.yaxis.set_major_formatter(thousands())
    ax.xaxis.set_major_locator(few_ticks())
    legend_below(ax)


def _frame_of(trace: Trace) -> float:
    values = sorted(value for _, value in trace.steady)
    nearly_all = values[: -(-len(values) * 99 // 100)]
    return max(_ABOVE_MEDIAN * statistics.median(values), 1.02 * nearly_all[-1])


def _draw_trace(ax: Any, trace: Trace, others: Sequence[Entry], colour: str, top: float) -> int:
    """Draw one run; return how many of its points are beyond the frame."""
    ax.plot(
        *zip(*thinned(trace.steady), strict=True),
        color=colour,
        linewidth=1.2,
        marker="." if len(trace.steady) < _LONG else "",
        label=name_of(trace.entry, others),
        linestyle=dash_of(trace.entry, others),
    )
    pale = [point for point in trace.others if point[1] <= top]
    if pale:
        ax.plot(*zip(*thinned(pale), strict=True), "x", color=colour, alpha=0.45, markersize=5)
    beyond = [number for number, value in (*trace.steady, *trace.others) if value > top]
    if beyond:
        ax.plot(beyond, [top * 0.985] * len(beyond), "^", color=colour, alpha=0.6, markersize=4)
    return len(beyond)


def _borders(ax: Any, runs: Sequence[RunData]) -> None:
    """Draw a line where a phase begins, with its name; borders that several runs share come once."""
    names: dict[int, list[str]] = {}
    for run in runs:
        for phase in run.report.phases[1:]:
            names.setdefault(phase.begin, []).append(phase.name)
    for begin, phases in names.items():
        ax.axvline(begin + 0.5, color=INK, linewidth=0.7, linestyle=":", alpha=0.7)
        where = {"xycoords": ax.get_xaxis_transform(), "textcoords": "offset points"}
        ax.annotate(", ".join(dict.fromkeys(phases)), (begin + 0.5, 1), (2, -9), fontsize=7, alpha=0.8, **where)


def finite_losses(run: RunData) -> list[Point]:
    """Return the losses of a run by iteration, without those that are missing or NaN."""
    return [(number, loss) for number, loss in sorted(losses(run).items()) if math.isfinite(loss)]


def loss_curves(ax: Any, curves: Sequence[tuple[Entry, RunData]], colours: dict[str, str]) -> None:
    """Draw the first run of each row, smoothed over its own noise, and other repeats as thin lines."""
    entries = [entry for entry, _ in curves]
    lowest, highest = math.inf, 0.0
    for entry, run in curves:
        colour = colours[entry.row.label]
        for repeat in entry.row.runs:
            if repeat is not run:
                _draw_repeat(ax, repeat, colour)
        numbers, values = zip(*thinned(finite_losses(run)), strict=True)
        shown = smooth(values, _window(values))
        if len(values) > _LONG:
            ax.plot(numbers, values, color=colour, linewidth=0.5, alpha=0.35)
        ax.plot(numbers, shown, dash_of(entry, entries), color=colour, linewidth=1.3, label=name_of(entry, entries))
        lowest, highest = min(lowest, *shown), max(highest, *shown)
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


def _draw_repeat(ax: Any, run: RunData, colour: str) -> None:
    points = thinned(finite_losses(run))
    if len(points) > 1:
        numbers, values = zip(*points, strict=True)
        ax.plot(numbers, smooth(values, _window(values)), color=colour, linewidth=0.6, alpha=0.5)


def _window(values: Sequence[float]) -> int:
    return max(3, len(values) // 40) | 1 if len(values) > _LONG else 1


def loss_difference(ax: Any, curves: Sequence[tuple[Entry, Parity]], colours: dict[str, str]) -> None:
    """Draw each variant's smoothed relative difference of the loss, and the tolerance as a band."""
    tolerance = max(parity.tolerance for _, parity in curves)
    entries = [entry for entry, _ in curves]
    reach = 0.0
    for entry, parity in curves:
        percent = [100 * value for value in parity.smoothed]
        points = thinned(list(zip(parity.iterations, percent, strict=True)))
        label = f"{name_of(entry, entries)}: {parity.word}"
        ax.plot(*zip(*points, strict=True), color=colours[entry.row.label], linewidth=1.3, label=label)
        reach = max(reach, *(abs(value) for _, value in points))
    ax.axhspan(-100 * tolerance, 100 * tolerance, color=INK, alpha=0.12, linewidth=0)
    ax.axhline(0, color=INK, linewidth=0.8)
    bound = 1.15 * max(reach, 150 * tolerance)
    ax.set_ylim(-bound, bound)
    ax.set_xlabel("iteration")
    ax.xaxis.set_major_locator(few_ticks())
    ax.set_ylabel(f"difference of the loss (%)\nband: tolerance {100 * tolerance:g} %")
    legend_below(ax)

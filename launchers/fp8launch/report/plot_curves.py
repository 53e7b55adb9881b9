"""Curves over iterations, and the picture of the step time."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import partial
from typing import Any

from fp8launch.report.entry import Entry
from fp8launch.report.loss_curves import Point, values_of
from fp8launch.report.plot_encoding import Encoding, Lines, curve_panels
from fp8launch.report.plot_style import INK, Key, Panel, Picture, few_ticks, left_out, plain, thinned, thousands
from fp8launch.report.run_data import RunData

# The frame of step times ends at this many medians.
_FRAME = 2.0
# With more rows than this, step times over iterations are not drawn.
MOST_STEP_TIMES = 24


def curve_key(entry: Entry, encoding: Encoding, lines: Lines, value: str) -> Key:
    """The legend of one curve: the meaning of its colour and its dash, and its value."""
    names = [encoding.word(entry), lines.text(entry)]
    dash, marker = "-", ""
    if len(lines.values) > 1:
        dash, marker = lines.style(entry)
    return Key(f"{', '.join(filter(None, map(plain, names)))}: {value}", encoding.colour(entry), dash, marker)


def draw_curve(ax: Any, points: Sequence[Point], key: Key, offset: int, count: int) -> None:
    """Draw a curve with a few markers, at other places than those of the other curves."""
    points = thinned(points)
    every = max(1, len(points) // 5)
    start = min(len(points) - 1, offset * every // max(1, count))
    ax.plot(
        *zip(*points, strict=True),
        color=key.colour,
        linestyle=key.dash,
        linewidth=1.4,
        marker=key.marker,
        markevery=(start, every),
        markersize=4.5,
    )


# --- Step time ------------------------------------------------------------------------------------------------------


def rolling(points: Sequence[Point], window: int) -> list[tuple[int, float, float, float]]:
    """Return (iteration, 10 % quantile, median, 90 % quantile) over a centred window, shorter near the ends."""
    half = window // 2
    found = []
    values = values_of(points)
    for i, (number, _) in enumerate(points):
        near = sorted(values[max(0, i - half) : i + half + 1])
        last = len(near) - 1
        found.append((number, near[round(0.1 * last)], statistics.median(near), near[round(0.9 * last)]))
    return found


def step_times(run: RunData) -> list[Point]:
    """Return the step time in ms of the iterations that count."""
    return [(line.number, line.step_time_ms) for line in run.kept if line.step_time_ms > 0]


def step_time_pictures(entries: Sequence[Entry], encoding: Encoding) -> list[Picture]:
    """Return the step time of each row's first run, as a rolling median with a band."""
    runs: dict[str, RunData] = {}
    shown: list[Entry] = []
    missing: list[str] = []
    for entry in entries:
        run = _first_with_step_times(entry)
        if run is None:
            missing.append(entry.row.name)
        else:
            shown.append(entry)
            runs[entry.row.name] = run
    if not shown or len(shown) > MOST_STEP_TIMES:
        return []
    found = []
    for title, same, lines in curve_panels(shown, encoding):
        curves, keys = [], []
        for entry in same:
            run = runs[entry.row.name]
            points = step_times(run)
            median = statistics.median(values_of(points))
            key = curve_key(entry, encoding, lines, f"{median:,.1f} ms")
            curves.append((run, points, key))
            keys.append(key)
        found.append(Panel(partial(_draw_step_times, curves=curves), title, tuple(keys)))
    note = "rolling median, 10 to 90 % of the iterations shaded"
    remark = "; ".join(filter(None, (note, left_out(missing, "too few iterations"))))
    return [Picture("step_time", "Step time over iterations", tuple(found), (), remark)]


def _first_with_step_times(entry: Entry) -> RunData | None:
    for run in entry.row.runs:
        if len(step_times(run)) > 2:
            return run
    return None


def _draw_step_times(ax: Any, curves: Sequence[tuple[RunData, list[Point], Key]]) -> None:
    top = 0.0
    every: list[float] = []
    for i, (_, points, key) in enumerate(curves):
        values = values_of(points)
        every += values
        window = max(9, len(points) // 15) | 1
        numbers, low, middle, high = zip(*thinned(rolling(points, window)), strict=True)
        ax.fill_between(numbers, low, high, color=key.colour, alpha=0.18, linewidth=0)
        draw_curve(ax, list(zip(numbers, middle, strict=True)), key, i, len(curves))
        top = max(top, min(1.1 * max(high), _FRAME * statistics.median(values)), 1.1 * max(middle))
    beyond = sum(value > top for value in every)
    ax.set_ylim(0, top)
    draw_borders(ax, [run for run, *_ in curves])
    label = "iteration"
    if beyond:
        label += f" ({beyond} of them beyond the frame)"
    ax.set_xlabel(label)
    ax.set_ylabel("step time (ms)")
    ax.yaxis.set_major_formatter(thousands())
    ax.xaxis.set_major_locator(few_ticks())


def draw_borders(ax: Any, runs: Sequence[RunData]) -> None:
    """Draw a line where a phase begins, with its name; borders that several runs share come once."""
    names: dict[int, list[str]] = {}
    for run in runs:
        for phase in run.report.phases[1:]:
            names.setdefault(phase.begin, []).append(phase.name)
    for i, (begin, phases) in enumerate(names.items()):
        ax.axvline(begin + 0.5, color=INK, linewidth=0.7, linestyle=":", alpha=0.7)
        where = {"xycoords": ax.get_xaxis_transform(), "textcoords": "offset points"}
        ax.annotate(
            ", ".join(dict.fromkeys(phases)), (begin + 0.5, 0), (2, 4 + 9 * (i % 2)), fontsize=7, alpha=0.8, **where
        )

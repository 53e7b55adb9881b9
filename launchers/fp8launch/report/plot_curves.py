"""Pictures over iterations: step time, loss, and the loss against the baseline's."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from functools import partial
from typing import Any

from fp8launch.report.columns import Entry
from fp8launch.report.parity import Parity, losses, smooth
from fp8launch.report.plot_encoding import Encoding, Lines, curve_panels
from fp8launch.report.plot_style import (
    INK,
    Key,
    Panel,
    Picture,
    few_ticks,
    left_out,
    plain,
    thinned,
    thousands,
)
from fp8launch.report.run_data import RunData

Point = tuple[int, float]
# Longer curves are smoothed.
_LONG = 60
# The frame of step times ends at this many medians.
_FRAME = 2.0
# More rows than this are no picture of step time over iterations.
MOST_STEP_TIMES = 24
# More panels than this have the last quarter as an inset instead of a panel of its own.
_MOST_ZOOMS = 2


def _curve_key(entry: Entry, encoding: Encoding, lines: Lines, value: str) -> Key:
    """The legend of one curve: what its colour and its dash stand for, and its value."""
    names = [encoding.word(entry), lines.text(entry)]
    dash, marker = "-", ""
    if len(lines.values) > 1:
        dash, marker = lines.style(entry)
    return Key(f"{', '.join(filter(None, map(plain, names)))}: {value}", encoding.colour(entry), dash, marker)


def _plot(ax: Any, points: Sequence[Point], key: Key, offset: int, count: int) -> None:
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
    values = [value for _, value in points]
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
    for entry in entries:
        drawable = [run for run in entry.row.runs if len(step_times(run)) > 2]
        if drawable:
            runs[entry.row.name] = drawable[0]
    shown = [entry for entry in entries if entry.row.name in runs]
    if not shown or len(shown) > MOST_STEP_TIMES:
        return []
    panels = curve_panels(shown, encoding)
    found = []
    for title, same, lines in panels:
        curves = []
        for entry in same:
            run = runs[entry.row.name]
            points = step_times(run)
            median = statistics.median(value for _, value in points)
            curves.append((run, points, _curve_key(entry, encoding, lines, f"{median:,.1f} ms")))
        draw = partial(_draw_step_times, curves=curves)
        found.append(Panel(draw, title, tuple(key for *_, key in curves)))
    missing = [entry.row.name for entry in entries if entry.row.name not in runs]
    note = "rolling median, 10 to 90 % of the iterations shaded"
    remark = "; ".join(filter(None, (note, left_out(missing, "too few iterations"))))
    return [Picture("step_time", "Step time over iterations", tuple(found), (), remark)]


def _draw_step_times(ax: Any, curves: Sequence[tuple[RunData, list[Point], Key]]) -> None:
    top, beyond = 0.0, 0
    for i, (_, points, key) in enumerate(curves):
        values = [value for _, value in points]
        window = max(9, len(points) // 15) | 1
        numbers, low, middle, high = zip(*thinned(rolling(points, window)), strict=True)
        ax.fill_between(numbers, low, high, color=key.colour, alpha=0.18, linewidth=0)
        _plot(ax, list(zip(numbers, middle, strict=True)), key, i, len(curves))
        top = max(top, min(1.1 * max(high), _FRAME * statistics.median(values)), 1.1 * max(middle))
    for _, points, _ in curves:
        beyond += sum(value > top for _, value in points)
    ax.set_ylim(0, top)
    _borders(ax, [run for run, *_ in curves])
    label = "iteration"
    if beyond:
        label += f" ({beyond} of them beyond the frame)"
    ax.set_xlabel(label)
    ax.set_ylabel("step time (ms)")
    ax.yaxis.set_major_formatter(thousands())
    ax.xaxis.set_major_locator(few_ticks())


def _borders(ax: Any, runs: Sequence[RunData]) -> None:
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


# --- Loss -----------------------------------------------------------------------------------------------------------


def finite_losses(run: RunData) -> list[Point]:
    """Return the losses of a run by iteration, without those that are missing or NaN."""
    return [(number, loss) for number, loss in sorted(losses(run).items()) if math.isfinite(loss)]


def _smoothed(run: RunData) -> list[Point]:
    points = finite_losses(run)
    if len(points) <= _LONG:
        return points
    numbers, values = zip(*points, strict=True)
    window = max(3, len(points) // 40) | 1
    return list(zip(numbers, smooth(values, window), strict=True))


def _final(entry: Entry, curve: Sequence[Point]) -> str:
    """The loss at the end as the table has it; of a run that did not end, its last one."""
    if entry.loss is None:
        return f"{curve[-1][1]:.4g} at iteration {curve[-1][0]}, {entry.row.status}"
    return entry.loss.smoothed_text


def loss_pictures(entries: Sequence[Entry], encoding: Encoding) -> list[Picture]:
    """Return the loss with its last quarter enlarged, and the loss at the end in the legend."""
    curves = {entry.row.name: _smoothed(entry.row.runs[0]) for entry in entries}
    shown = [entry for entry in entries if len(curves[entry.row.name]) > 1]
    if not shown:
        return []
    panels = curve_panels(shown, encoding)
    apart = len(panels) <= _MOST_ZOOMS
    found = []
    for title, same, lines in panels:
        keyed = []
        for entry in same:
            curve = curves[entry.row.name]
            keyed.append((entry, curve, _curve_key(entry, encoding, lines, _final(entry, curve))))
        keys = tuple(key for *_, key in keyed)
        found.append(Panel(partial(_draw_losses, curves=keyed, inset=not apart), title or "all iterations", keys))
        if apart:
            found.append(Panel(partial(_draw_end, curves=keyed), ", ".join(filter(None, (title, "last quarter")))))
    missing = [entry.row.name for entry in entries if entry not in shown]
    note = "smoothed; in the legend the mean of the last 10 %, at least 5 iterations"
    remark = "; ".join(filter(None, (note, left_out(missing, "no loss logged"))))
    # Each row of pictures shows one thing: a panel and its last quarter, or all numbers of GPUs.
    columns = 2 if apart else 3
    return [Picture("loss", "Loss", tuple(found), (), remark, columns)]


_Curves = Sequence[tuple[Entry, list[Point], Key]]


def _draw_losses(ax: Any, curves: _Curves, inset: bool) -> None:
    """Draw the first run of each row, other repeats as thin lines."""
    repeats = []
    for entry, _, key in curves:
        for run in entry.row.runs[1:]:
            if points := thinned(_smoothed(run)):
                repeats.append(points)
                ax.plot(*zip(*points, strict=True), color=key.colour, linewidth=0.6, alpha=0.5)
    for i, (_, curve, key) in enumerate(curves):
        _plot(ax, curve, key, i, len(curves))
    _borders(ax, [entry.row.runs[0] for entry, *_ in curves])
    every = [curve for _, curve, _ in curves]
    _loss_axis(ax, _values(*every, *repeats))
    ax.set_xlabel("iteration")
    if inset:
        _inset(ax, curves)


def _values(*curves: Sequence[Point]) -> list[float]:
    """The losses of all these curves."""
    return [loss for curve in curves for _, loss in curve]


def _loss_axis(ax: Any, values: Sequence[float]) -> None:
    low, high = min(values), max(values)
    bottom, label = 0.0, "loss"
    # A curve that falls by little would be a flat line from zero.
    if low > 0.3 * high:
        bottom = low - 0.06 * (high - low or low)
        label = "loss (axis does not start at 0)"
    ax.set_ylim(bottom, high + 0.05 * (high - low or high))
    ax.set_ylabel(label)
    ax.xaxis.set_major_locator(few_ticks())


def _ends(curves: _Curves) -> list[tuple[Entry, list[Point], Key]]:
    """The last quarter of each curve, of the usual length where lengths differ."""
    last = statistics.median_low([curve[-1][0] for _, curve, _ in curves])
    found = []
    for entry, curve, key in curves:
        end = [point for point in curve if point[0] >= 0.75 * last]
        if end:
            found.append((entry, end, key))
    return found


def _draw_end(ax: Any, curves: _Curves) -> None:
    ends = _ends(curves)
    for i, (_, end, key) in enumerate(ends):
        _plot(ax, end, key, i, len(ends))
    _loss_axis(ax, _values(*(end for _, end, _ in ends)))
    ax.set_xlabel("iteration")


# The inset in shares of the axes: left, bottom, width, height.
_INSET = (0.5, 0.5, 0.48, 0.44)


def _inset(ax: Any, curves: _Curves) -> None:
    """Draw the last quarter into the upper right corner, which falling curves leave free or are given."""
    low, high = ax.get_ylim()
    first = min(curve[0][0] for _, curve, _ in curves)
    last = max(curve[-1][0] for _, curve, _ in curves)
    border = first + (_INSET[0] - 0.15) * (last - first)
    reach = low
    for _, curve, _ in curves:
        reach = max([reach, *(loss for number, loss in curve if number >= border)])
    ax.set_ylim(low, max(high, low + (reach - low) / (_INSET[1] - 0.14)))
    small = ax.inset_axes(_INSET)
    _draw_end(small, curves)
    values = _values(*(end for _, end, _ in _ends(curves)))
    room = 0.08 * (max(values) - min(values) or max(values))
    small.set_ylim(min(values) - room, max(values) + room)
    small.set(xlabel="", ylabel="")
    small.set_title("last quarter", fontsize=7, fontweight="normal", pad=2)
    small.tick_params(labelsize=7, length=2)
    small.grid(axis="y", color=INK, alpha=0.15, linewidth=0.6)
    small.locator_params(axis="x", nbins=2)
    small.locator_params(axis="y", nbins=3)


# --- Loss relative to the baseline ----------------------------------------------------------------------------------


def parity_pictures(entries: Sequence[Entry], parities: Sequence[Parity], encoding: Encoding) -> list[Picture]:
    """Return each variant's loss relative to its baseline, with the noise between repeats as a band."""
    drawable = {p.variant: p for p in parities if len(p.difference) > 1 and p.verdict != "too short"}
    shown = [entry for entry in entries if entry.row.name in drawable]
    if not shown:
        return []
    panels = curve_panels(shown, encoding)
    found = []
    for title, same, lines in panels:
        curves = []
        for entry in same:
            parity = drawable[entry.row.name]
            curves.append((parity, _curve_key(entry, encoding, lines, _judged(parity))))
        keys = [key for _, key in curves]
        noise = max((parity.noise for parity, _ in curves if parity.noise is not None), default=None)
        if noise is None:
            keys.append(Key("between iterations (10 to 90 %); single runs: noise not known", INK, shape="band"))
        else:
            keys.append(Key(f"noise between repeats: ±{100 * noise:.2f} % (95 %)", INK, shape="band"))
        tolerance = curves[0][0].tolerance
        keys.append(Key(f"tolerance: ±{100 * tolerance:g} %", INK, ":"))
        bases = sorted({_base_word(parity, entries, encoding) for parity, _ in curves})
        draw = partial(_draw_parity, curves=curves, noise=noise, baseline=" or ".join(bases))
        found.append(Panel(draw, title, tuple(keys)))
    missing = [parity.variant for parity in parities if parity.variant not in drawable]
    remark = left_out(missing, "too short or not comparable")
    return [Picture("parity", "Loss relative to the baseline", tuple(found), (), remark)]


def _base_word(parity: Parity, entries: Sequence[Entry], encoding: Encoding) -> str:
    for entry in entries:
        if entry.row.name == parity.baseline:
            return plain(encoding.word(entry))
    return "baseline"


def _judged(parity: Parity) -> str:
    if parity.last_quarter is None or parity.verdict == "too short":
        return parity.word
    size = f"{100 * parity.last_quarter:+.2f}"
    if parity.noise is not None:
        size += f" ± {100 * parity.noise:.2f}"
    return f"{size} %, {parity.word}"


def _draw_parity(ax: Any, curves: Sequence[tuple[Parity, Key]], noise: float | None, baseline: str) -> None:
    tolerance = 100 * curves[0][0].tolerance
    reach = 0.0
    for i, (parity, key) in enumerate(curves):
        percent = [100 * value for value in parity.smoothed]
        points = list(zip(parity.iterations, percent, strict=True))
        if noise is None and len(curves) <= 4:
            each = list(zip(parity.iterations, (100 * value for value in parity.difference), strict=True))
            numbers, low, _, high = zip(*thinned(rolling(each, max(9, parity.window))), strict=True)
            ax.fill_between(numbers, low, high, color=key.colour, alpha=0.15, linewidth=0)
        _plot(ax, points, key, i, len(curves))
        # The first tenth, where every model learns fastest, would set the scale of the rest.
        reach = max(reach, *(abs(value) for _, value in points[len(points) // 10 :]))
    if noise is not None:
        ax.axhspan(-100 * noise, 100 * noise, color=INK, alpha=0.15, linewidth=0)
    for bound in (-tolerance, tolerance):
        ax.axhline(bound, color=INK, linewidth=0.9, linestyle=":")
    ax.axhline(0, color=INK, linewidth=0.8)
    bound = max(1.3 * reach, 1.2 * tolerance, 130 * (noise or 0.0))
    ax.set_ylim(-bound, bound)
    ax.set_xlabel("iteration")
    ax.xaxis.set_major_locator(few_ticks())
    ax.set_ylabel(f"loss relative to {baseline} (%)")

"""Pictures of the loss over iterations, and of the loss against the baseline's."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import partial
from typing import Any

from fp8launch.report.entry import Entry
from fp8launch.report.loss_curves import Point, finite_losses, smooth, values_of
from fp8launch.report.parity import Parity
from fp8launch.report.plot_curves import curve_key, draw_borders, draw_curve, rolling
from fp8launch.report.plot_encoding import Encoding, curve_panels
from fp8launch.report.plot_style import INK, Key, Panel, Picture, few_ticks, left_out, plain, thinned
from fp8launch.report.run_data import RunData

# Longer curves are smoothed.
_LONG = 60
# More panels than this have the last quarter as an inset instead of a panel of its own.
_MOST_ZOOMS = 2


# --- Loss -----------------------------------------------------------------------------------------------------------


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
    return entry.loss.end_text


def loss_pictures(entries: Sequence[Entry], encoding: Encoding) -> list[Picture]:
    """Return the loss with its last quarter enlarged, and the loss at the end in the legend."""
    smoothed: dict[str, list[Point]] = {}
    shown: list[Entry] = []
    missing: list[str] = []
    for entry in entries:
        curve = _smoothed(entry.row.runs[0])
        if len(curve) > 1:
            shown.append(entry)
            smoothed[entry.row.name] = curve
        else:
            missing.append(entry.row.name)
    if not shown:
        return []
    panels = curve_panels(shown, encoding)
    apart = len(panels) <= _MOST_ZOOMS
    found = []
    for title, same, lines in panels:
        curves, keys = [], []
        for entry in same:
            curve = smoothed[entry.row.name]
            key = curve_key(entry, encoding, lines, _final(entry, curve))
            curves.append((entry, curve, key))
            keys.append(key)
        draw = partial(_draw_losses, curves=curves, inset=not apart)
        found.append(Panel(draw, title or "all iterations", tuple(keys)))
        if apart:
            found.append(Panel(partial(_draw_end, curves=curves), ", ".join(filter(None, (title, "last quarter")))))
    note = "smoothed; in the legend the mean of the last 10 %, at least 5 iterations"
    remark = "; ".join(filter(None, (note, left_out(missing, "no loss logged"))))
    # Each row of pictures shows one thing: a panel and its last quarter, or all numbers of GPUs.
    columns = 2 if apart else 3
    return [Picture("loss", "Loss", tuple(found), (), remark, columns)]


_Curves = Sequence[tuple[Entry, list[Point], Key]]


def _draw_losses(ax: Any, curves: _Curves, inset: bool) -> None:
    """Draw the first run of each row, other repeats as thin lines."""
    values: list[float] = []
    for entry, _, key in curves:
        for run in entry.row.runs[1:]:
            if points := thinned(_smoothed(run)):
                values += values_of(points)
                ax.plot(*zip(*points, strict=True), color=key.colour, linewidth=0.6, alpha=0.5)
    for i, (_, curve, key) in enumerate(curves):
        draw_curve(ax, curve, key, i, len(curves))
    draw_borders(ax, [entry.row.runs[0] for entry, *_ in curves])
    _loss_axis(ax, values + values_of(_points(curves)))
    ax.set_xlabel("iteration")
    if inset:
        _inset(ax, curves)


def _points(curves: _Curves) -> list[Point]:
    """The points of all these curves."""
    found: list[Point] = []
    for _, points, _ in curves:
        found += points
    return found


def _loss_axis(ax: Any, values: Sequence[float]) -> None:
    low, high = min(values), max(values)
    bottom, label = 0.0, "loss"
    # On an axis from zero, a curve that falls by little would look flat.
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
        draw_curve(ax, end, key, i, len(ends))
    _loss_axis(ax, values_of(_points(ends)))
    ax.set_xlabel("iteration")


# The inset in shares of the axes: left, bottom, width, height.
_INSET = (0.5, 0.5, 0.48, 0.44)


def _inset(ax: Any, curves: _Curves) -> None:
    """Draw the last quarter into the upper right corner, which falling curves leave free or are given."""
    low, high = ax.get_ylim()
    points = _points(curves)
    first, last = min(points)[0], max(points)[0]
    border = first + (_INSET[0] - 0.15) * (last - first)
    reach = low
    for number, loss in points:
        if number >= border:
            reach = max(reach, loss)
    ax.set_ylim(low, max(high, low + (reach - low) / (_INSET[1] - 0.14)))
    small = ax.inset_axes(_INSET)
    _draw_end(small, curves)
    values = values_of(_points(_ends(curves)))
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
    drawable: dict[str, Parity] = {}
    missing: list[str] = []
    for parity in parities:
        if len(parity.difference) > 1 and parity.verdict != "too short":
            drawable[parity.variant] = parity
        else:
            missing.append(parity.variant)
    shown = [entry for entry in entries if entry.row.name in drawable]
    if not shown:
        return []
    found = []
    for title, same, lines in curve_panels(shown, encoding):
        curves, keys, bases = [], [], set()
        noise: float | None = None
        for entry in same:
            parity = drawable[entry.row.name]
            key = curve_key(entry, encoding, lines, _judged(parity))
            curves.append((parity, key))
            keys.append(key)
            bases.add(_base_word(parity, entries, encoding))
            if parity.noise is not None:
                noise = max(noise or 0.0, parity.noise)
        if noise is None:
            keys.append(Key("between iterations (10 to 90 %); single runs: noise not known", INK, shape="band"))
        else:
            keys.append(Key(f"noise between repeats: ±{100 * noise:.2f} % (95 %)", INK, shape="band"))
        tolerance = curves[0][0].tolerance
        keys.append(Key(f"tolerance: ±{100 * tolerance:g} %", INK, ":"))
        draw = partial(_draw_parity, curves=curves, noise=noise, baseline=" or ".join(sorted(bases)))
        found.append(Panel(draw, title, tuple(keys)))
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


def _percent(iterations: Sequence[int], differences: Sequence[float]) -> list[Point]:
    return [(number, 100 * value) for number, value in zip(iterations, differences, strict=True)]


def _draw_parity(ax: Any, curves: Sequence[tuple[Parity, Key]], noise: float | None, baseline: str) -> None:
    tolerance = 100 * curves[0][0].tolerance
    reach = 0.0
    for i, (parity, key) in enumerate(curves):
        points = _percent(parity.iterations, parity.smoothed)
        if noise is None and len(curves) <= 4:
            each = _percent(parity.iterations, parity.difference)
            numbers, low, _, high = zip(*thinned(rolling(each, max(9, parity.window))), strict=True)
            ax.fill_between(numbers, low, high, color=key.colour, alpha=0.15, linewidth=0)
        draw_curve(ax, points, key, i, len(curves))
        # Without the first tenth, where every model learns fastest and differences are largest.
        reach = max(reach, *map(abs, values_of(points[len(points) // 10 :])))
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

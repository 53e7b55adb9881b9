"""Curves over iterations: step time, loss, and loss relative to the baseline."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any, TypeVar

from fp8launch.plugins.plots.style import (
    INK,
    Encoding,
    Key,
    Lines,
    Panel,
    Picture,
    TimeUnit,
    curve_panels,
    few_ticks,
    left_out,
    loss_axis,
    other_runs,
    plain,
    thinned,
    thousands,
    time_unit,
)
from fp8launch.report.losses import Point, end_words, finite_losses, smooth, values_of
from fp8launch.report.parity import Parity
from fp8launch.report.rows import Row
from fp8launch.report.run_report import RunReport
from fp8launch.report.steady_state import numbers_of
from fp8launch.wording import signed_percent

T = TypeVar("T")

# The frame of step times ends at this many medians.
_FRAME = 2.0
# With more rows than this, step times over iterations are not drawn.
MOST_STEP_TIMES = 24
# Bands of more curves than this cover each other.
MOST_BANDS = 2


def curve_key(row: Row, encoding: Encoding, lines: Lines, value: str) -> Key:
    """Return the legend of one curve: the meaning of its colour and dash, and its value."""
    names = [encoding.word(row), lines.text(row)]
    dash, marker = "-", ""
    if len(lines.values) > 1:
        dash, marker = lines.style(row)
    return Key(f"{', '.join(filter(None, map(plain, names)))}: {value}", encoding.colour(row), dash, marker)


def draw_curve(ax: Any, points: Sequence[Point], key: Key, offset: int, count: int) -> None:
    """Draw a curve with a few markers, placed differently on each curve."""
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


def draw_thin(ax: Any, points: Sequence[Point], key: Key) -> None:
    """Draw the curve of a repeat."""
    ax.plot(*zip(*thinned(points), strict=True), color=key.colour, linestyle=key.dash, linewidth=0.7, alpha=0.8)


def _split(rows: Sequence[Row], data: Callable[[Row], T | None]) -> tuple[dict[str, T], list[str]]:
    """Return the data of the rows that have some, by name, and the names of the other rows."""
    found, missing = {}, []
    for row in rows:
        value = data(row)
        if value is None:
            missing.append(row.name)
        else:
            found[row.name] = value
    return found, missing


# --- Step time ------------------------------------------------------------------------------------------------------


def rolling(points: Sequence[Point], window: int) -> list[tuple[int, float, float, float]]:
    """Return (iteration, 10 % quantile, median, 90 % quantile) over a centred window, which is shorter at the ends."""
    half = window // 2
    found = []
    values = values_of(points)
    for i, (number, _) in enumerate(points):
        near = sorted(values[max(0, i - half) : i + half + 1])
        last = len(near) - 1
        found.append((number, near[round(0.1 * last)], statistics.median(near), near[round(0.9 * last)]))
    return found


def step_times(run: RunReport) -> list[Point]:
    """Return the step time in ms of the iterations that count."""
    kept = run.steady_state.kept
    return [point for point in zip(numbers_of(kept), kept.column("step_time_ms"), strict=True) if point[1] > 0]


def step_time_pictures(rows: Sequence[Row], encoding: Encoding) -> list[Picture]:
    """Return the step times of each row's runs, as rolling medians, with bands if there are few."""
    runs, missing = _split(rows, _with_step_times)
    shown = [row for row in rows if row.name in runs]
    if not shown or len(shown) > MOST_STEP_TIMES:
        return []
    found = []
    unit = time_unit([_median_ms(row, runs[row.name]) for row in shown])
    banded = False
    for title, same, lines in curve_panels(shown, encoding):
        curves, keys = [], []
        for row in same:
            key = curve_key(row, encoding, lines, _typical(row, runs[row.name], unit))
            curves.append((runs[row.name], key))
            keys.append(key)
        bands = sum(len(runs[row.name]) for row in same) <= MOST_BANDS
        banded = banded or bands
        draw = partial(_draw_step_times, curves=curves, unit=unit, bands=bands)
        found.append(Panel(draw, title, (*keys, *other_runs(same, [runs[row.name] for row in same]))))
    median = "median of the runs' medians" if any(len(row.good) > 1 for row in shown) else "median"
    note = f"rolling median; in the legend the {median} as in the table, and the range of 80 % of all iterations"
    if banded:
        note += ", shaded for up to two curves"
    remark = "; ".join(filter(None, (note, left_out(missing, "too few iterations"))))
    return [Picture("step_time", "Step time over iterations", tuple(found), (), remark)]


def _with_step_times(row: Row) -> list[RunReport] | None:
    """Return the runs that count, or else the others, if they have iterations to draw."""
    return [run for run in row.good or row.runs if len(step_times(run)) > 2] or None


def _median_ms(row: Row, runs: Sequence[RunReport]) -> float:
    """Return the median as in the table, or of a run that did not finish."""
    return row.step_time.median if row.step_time else statistics.median(values_of(step_times(runs[0])))


def _typical(row: Row, runs: Sequence[RunReport], unit: TimeUnit) -> str:
    """Return the median, and the 10 % and 90 % quantiles over the steps of all runs, as text."""
    ordered = sorted(chain.from_iterable(values_of(step_times(run)) for run in runs))
    last = len(ordered) - 1
    low, high = ordered[round(0.1 * last)], ordered[round(0.9 * last)]
    return f"{unit.text(_median_ms(row, runs))} (80 %: {low * unit.per_ms:,.1f} to {high * unit.per_ms:,.1f})"


def _draw_step_times(ax: Any, curves: Sequence[tuple[list[RunReport], Key]], unit: TimeUnit, bands: bool) -> None:
    """Draw a line for the first run of each row, and thin lines for the others."""
    top = 0.0
    for i, (runs, key) in enumerate(curves):
        for run in reversed(runs):
            points = [(number, ms * unit.per_ms) for number, ms in step_times(run)]
            values = values_of(points)
            window = max(9, len(points) // 15) | 1
            numbers, low, middle, high = zip(*thinned(rolling(points, window)), strict=True)
            if bands:
                ax.fill_between(numbers, low, high, color=key.colour, alpha=0.18, linewidth=0)
            curve = list(zip(numbers, middle, strict=True))
            if run is runs[0]:
                draw_curve(ax, curve, key, i, len(curves))
            else:
                draw_thin(ax, curve, key)
            top = max(top, min(1.1 * max(high), _FRAME * statistics.median(values)), 1.1 * max(middle))
    ax.set_ylim(0, top)
    draw_borders(ax, [runs[0] for runs, _ in curves])
    ax.set_xlabel("iteration")
    ax.set_ylabel(f"step time ({unit.name})")
    ax.yaxis.set_major_formatter(thousands())
    ax.xaxis.set_major_locator(few_ticks())


def draw_borders(ax: Any, runs: Sequence[RunReport]) -> None:
    """Draw a line with the phase's name where a phase begins. Runs with the same borders share the line."""
    names: dict[int, list[str]] = {}
    for run in runs:
        for phase in run.phases[1:]:
            names.setdefault(phase.begin, []).append(phase.name)
    for i, (begin, phases) in enumerate(names.items()):
        ax.axvline(begin + 0.5, color=INK, linewidth=0.7, linestyle=":", alpha=0.7)
        where = {"xycoords": ax.get_xaxis_transform(), "textcoords": "offset points"}
        ax.annotate(
            ", ".join(dict.fromkeys(phases)), (begin + 0.5, 0), (2, 4 + 9 * (i % 2)), fontsize=7, alpha=0.8, **where
        )


# Longer curves are smoothed.
_LONG = 60
# With more panels than this, the last quarter is an inset instead of a separate panel.
_MOST_ZOOMS = 2


# --- Loss -----------------------------------------------------------------------------------------------------------


def _smoothed(run: RunReport) -> list[Point]:
    points = finite_losses(run)
    if len(points) <= _LONG:
        return points
    numbers, values = zip(*points, strict=True)
    window = max(3, len(points) // 40) | 1
    return list(zip(numbers, smooth(values, window), strict=True))


def _first_curve(row: Row) -> list[Point] | None:
    curve = _smoothed(row.runs[0])
    return curve if len(curve) > 1 else None


def _final(row: Row, curve: Sequence[Point]) -> str:
    """Return the loss at the end as in the table, or the last loss of a run that did not finish."""
    if row.loss is None:
        return f"{curve[-1][1]:.4g} at iteration {curve[-1][0]}, {row.status}"
    return row.loss.end_text


def loss_pictures(rows: Sequence[Row], encoding: Encoding) -> list[Picture]:
    """Return the loss, its last quarter enlarged, and the loss at the end in the legend."""
    smoothed, missing = _split(rows, _first_curve)
    shown = [row for row in rows if row.name in smoothed]
    if not shown:
        return []
    panels = curve_panels(shown, encoding)
    apart = len(panels) <= _MOST_ZOOMS
    found = []
    for title, same, lines in panels:
        curves, keys = [], []
        for row in same:
            curve = smoothed[row.name]
            key = curve_key(row, encoding, lines, _final(row, curve))
            curves.append((row, curve, key))
            keys.append(key)
        draw = partial(_draw_losses, curves=curves, inset=not apart)
        keys += other_runs(same, [row.runs for row in same])
        found.append(Panel(draw, title or "all iterations", tuple(keys)))
        if apart:
            found.append(Panel(partial(_draw_end, curves=curves), ", ".join(filter(None, (title, "last quarter")))))
    remarks = []
    if any(len(finite_losses(run)) > _LONG for row in shown for run in row.runs):
        remarks.append("smoothed")
    if any(row.loss for row in shown):
        remarks.append(f"in the legend the mean of the {end_words(row.loss for row in shown)}")
        if any(row.loss and row.loss.seeds > 1 for row in shown):
            remarks[-1] += ", ± standard deviation over the seeds"
    remark = "; ".join(filter(None, (*remarks, left_out(missing, "no loss logged"))))
    # Panels and their last quarters are pairs; panels for numbers of GPUs are in rows of three.
    columns = 2 if apart else 3
    return [Picture("loss", "Loss", tuple(found), (), remark, columns)]


_Curves = Sequence[tuple[Row, list[Point], Key]]


def _draw_losses(ax: Any, curves: _Curves, inset: bool) -> None:
    """Draw the first run of each row, and its repeats as thin lines."""
    _draw_from(ax, curves, 0)
    draw_borders(ax, [row.runs[0] for row, *_ in curves])
    if inset:
        _inset(ax, curves)


def _points(curves: _Curves) -> list[Point]:
    """Return the points of all curves."""
    found: list[Point] = []
    for _, points, _ in curves:
        found += points
    return found


def _draw_from(ax: Any, curves: _Curves, begin: float) -> list[float]:
    """Draw the curves from an iteration on, repeats as thin lines behind the others. Return the losses."""
    values: list[float] = []
    for row, _, key in curves:
        for run in row.runs[1:]:
            if points := [point for point in _smoothed(run) if point[0] >= begin]:
                values += values_of(points)
                draw_thin(ax, points, key)
    for i, (_, curve, key) in enumerate(curves):
        if points := [point for point in curve if point[0] >= begin]:
            values += values_of(points)
            draw_curve(ax, points, key, i, len(curves))
    loss_axis(ax, min(values), max(values))
    ax.xaxis.set_major_locator(few_ticks())
    ax.set_xlabel("iteration")
    return values


def _draw_end(ax: Any, curves: _Curves) -> list[float]:
    """Draw the part of each curve after three quarters of the median length. Return its losses."""
    return _draw_from(ax, curves, 0.75 * statistics.median_low([curve[-1][0] for _, curve, _ in curves]))


# Left, bottom, width and height of the inset, as fractions of the axes.
_INSET = (0.5, 0.5, 0.48, 0.44)


def _inset(ax: Any, curves: _Curves) -> None:
    """Draw the last quarter into the upper right corner, after moving the axis limit so that no curve is covered."""
    if ax.get_yscale() == "log":
        return
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
    values = _draw_end(small, curves)
    room = 0.08 * (max(values) - min(values) or max(values))
    small.set_ylim(min(values) - room, max(values) + room)
    small.set(xlabel="", ylabel="")
    small.set_title("last quarter", fontsize=7, fontweight="normal", pad=2)
    small.tick_params(labelsize=7, length=2)
    small.grid(axis="y", color=INK, alpha=0.15, linewidth=0.6)
    small.locator_params(axis="x", nbins=2)
    small.locator_params(axis="y", nbins=3)


# --- Loss relative to the baseline ----------------------------------------------------------------------------------


def parity_pictures(rows: Sequence[Row], parities: Sequence[Parity], encoding: Encoding) -> list[Picture]:
    """Return each variant's loss relative to its baseline, with the noise between repeats as a band."""
    drawable: dict[str, Parity] = {}
    missing: list[str] = []
    for parity in parities:
        if len(parity.difference) > 1 and parity.verdict != "too short":
            drawable[parity.variant] = parity
        else:
            missing.append(parity.variant)
    shown = [row for row in rows if row.name in drawable]
    if not shown:
        return []
    found = []
    unknown = False
    for title, same, lines in curve_panels(shown, encoding):
        curves, keys, bases = [], [], set()
        noise: float | None = None
        for row in same:
            parity = drawable[row.name]
            key = curve_key(row, encoding, lines, _judged(parity))
            curves.append((parity, key))
            keys.append(key)
            bases.add(_base_word(parity, rows, encoding))
            if parity.noise is not None:
                noise = max(noise or 0.0, parity.noise)
        if noise is None:
            unknown = True
            if len(curves) <= MOST_BANDS:
                keys.append(Key("10 to 90 % of the iterations", INK, shape="band"))
        else:
            keys.append(Key(f"noise between repeats: ±{100 * noise:.2f} % (95 %)", INK, shape="band"))
        tolerance = curves[0][0].tolerance
        keys.append(Key(f"tolerance: ±{100 * tolerance:g} %", INK, ":"))
        draw = partial(_draw_parity, curves=curves, noise=noise, baseline=" or ".join(sorted(bases)))
        found.append(Panel(draw, title, tuple(keys)))
    note = "single runs: the noise between runs is not known" if unknown else ""
    remark = "; ".join(filter(None, (note, left_out(missing, "too short or not comparable"))))
    return [Picture("parity", "Loss relative to the baseline", tuple(found), (), remark)]


def _base_word(parity: Parity, rows: Sequence[Row], encoding: Encoding) -> str:
    for row in rows:
        if row.name == parity.baseline:
            return plain(encoding.word(row))
    return "baseline"


def _judged(parity: Parity) -> str:
    if parity.last_quarter is None or parity.verdict == "too short":
        return parity.word
    size = signed_percent(parity.last_quarter)
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
        if noise is None and len(curves) <= MOST_BANDS:
            each = _percent(parity.iterations, parity.difference)
            numbers, low, _, high = zip(*thinned(rolling(each, max(9, parity.window))), strict=True)
            ax.fill_between(numbers, low, high, color=key.colour, alpha=0.15, linewidth=0)
        draw_curve(ax, points, key, i, len(curves))
        # The first tenth does not set the scale: every model learns fastest there, and differences are largest.
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

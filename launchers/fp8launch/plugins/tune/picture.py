"""The picture of a search: the speed of each trial in order, with its interval."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from fp8launch.plugins.plots.figures import save_figure
from fp8launch.plugins.tune.rows import Row

_KEPT, _LEFT, _PREDICTED, _INK = "#009E73", "#7F8C8D", "#0072B2", "#303338"


def draw(rows: Sequence[Row], title: str, file: Path) -> bool:
    """Draw the measured trials into a file. Return False if matplotlib is missing or nothing was measured."""
    shown = [row for row in rows if _speed(row) is not None]
    if not shown or importlib.util.find_spec("matplotlib") is None:
        return False
    from matplotlib.figure import Figure

    unit, speeds = _speeds(shown)
    figure = Figure(figsize=(7.5, 1.6 + 0.34 * len(shown)), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    ends = list(speeds)
    for place, (row, speed) in enumerate(zip(shown, speeds, strict=True)):
        colour = _LEFT
        if row.kept:
            colour = _KEPT
        axes.barh(place, speed, color=colour, alpha=0.85, height=0.62)
        if row.low and row.high and row.measured:
            low, high = speed * row.low / row.measured, speed * row.high / row.measured
            axes.errorbar(speed, place, xerr=[[speed - low], [high - speed]], color=_INK, capsize=3, linewidth=1)
            ends += [low, high]
        if row.predicted and row.measured:
            predicted = speed / row.measured * row.predicted
            axes.plot(predicted, place, "|", color=_PREDICTED, markersize=14)
            ends.append(predicted)
    axes.set_yticks(range(len(shown)), [shown[0].change, *(f"+ {row.change}" for row in shown[1:])])
    axes.invert_yaxis()
    left, scale = _left_end(min(ends), max(ends))
    axes.set_xlim(left, max(ends) + 0.04 * (max(ends) - left))
    legend = "green: kept, blue mark: predicted, line: 95 % interval"
    axes.set_xlabel(f"{unit}{scale}\n{legend}", fontsize=8)
    axes.set_title(title, fontsize=10)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    save_figure(figure, file)
    return True


def _left_end(least: float, most: float) -> tuple[float, str]:
    """Return where the axis begins and a note: at zero, unless the speeds are too close to distinguish."""
    if least < 0.7 * most:
        return 0.0, ""
    return least - 0.5 * (most - least) - 0.02 * least, " (axis does not begin at zero)"


def _speed(row: Row) -> float | None:
    return row.tflops_per_gpu or row.tokens_per_s_per_gpu


def _speeds(rows: Sequence[Row]) -> tuple[str, list[float]]:
    """Return the unit and the speeds: TFLOP/s/GPU if every row reaches 1, else tokens/s/GPU."""
    tflops = [row.tflops_per_gpu or 0.0 for row in rows]
    if min(tflops) >= 1:
        return "TFLOP/s/GPU", tflops
    return "tokens/s/GPU", [row.tokens_per_s_per_gpu or 0.0 for row in rows]

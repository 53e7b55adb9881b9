"""The picture of a search: the speed of every trial in order, with its interval, and the best so far."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from fp8launch.tuning.rows import Row

_KEPT, _LEFT, _PREDICTED, _INK = "#009E73", "#7F8C8D", "#0072B2", "#303338"


def draw(rows: Sequence[Row], title: str, file: Path) -> bool:
    """Draw the trials that were measured into a file; False without matplotlib, or with nothing to draw."""
    shown = [row for row in rows if _speed(row) is not None]
    if not shown or importlib.util.find_spec("matplotlib") is None:
        return False
    from matplotlib.figure import Figure

    in_tflops = all(row.tflops_per_gpu and row.tflops_per_gpu >= 1 for row in shown)
    figure = Figure(figsize=(7.5, 1.6 + 0.34 * len(shown)), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    for place, row in enumerate(shown):
        speed = _value(row, in_tflops)
        colour = _KEPT if row.kept else _LEFT
        axes.barh(place, speed, color=colour, alpha=0.85, height=0.62)
        if row.low and row.high and row.measured:
            axes.errorbar(
                speed, place, xerr=[[speed * (1 - row.low / row.measured)], [speed * (row.high / row.measured - 1)]],
                color=_INK, capsize=3, linewidth=1,
            )  # fmt: skip
        if row.predicted and row.measured:
            axes.plot(speed / row.measured * row.predicted, place, "|", color=_PREDICTED, markersize=14)
    axes.set_yticks(range(len(shown)), [_label(row, number) for number, row in enumerate(shown)])
    axes.invert_yaxis()
    values = [_value(row, in_tflops) for row in shown]
    axes.set_xlim(min(values) * 0.9, max(values) * 1.05)
    unit = "TFLOP/s/GPU" if in_tflops else "tokens/s/GPU"
    legend = "green: kept, blue mark: predicted, line: 95 % interval"
    axes.set_xlabel(f"{unit} (axis does not begin at zero)\n{legend}", fontsize=8)
    axes.set_title(title, fontsize=10)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(file)
    return True


def _label(row: Row, number: int) -> str:
    return row.change if number == 0 else f"+ {row.change}"


def _speed(row: Row) -> float | None:
    return row.tflops_per_gpu or row.tokens_per_s_per_gpu


def _value(row: Row, in_tflops: bool) -> float:
    value = row.tflops_per_gpu if in_tflops else row.tokens_per_s_per_gpu
    return value or 0.0

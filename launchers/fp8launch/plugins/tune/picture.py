"""The picture of a search: the gain of each trial over the best variant before it, with its interval and verdict."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fp8launch.plugins.plots.figures import available, figure_of, save_figure
from fp8launch.plugins.plots.style import (
    COLOURS,
    INK,
    LABEL,
    Key,
    Panel,
    Picture,
    bars_height,
    few_ticks,
    name_bars,
    plain,
)
from fp8launch.plugins.tune.rows import Row, percent

_KEPT, _LEFT, _PREDICTED = COLOURS[2], COLOURS[7], COLOURS[0]


def draw(rows: Sequence[Row], title: str, file: Path) -> bool:
    """Draw the measured trials into a file. Return False if matplotlib is missing or nothing was measured."""
    shown = [row for row in rows if _speed(row)]
    if not shown or not available():
        return False
    save_figure(figure_of([picture(shown)], plain(title)), file, dpi=150)
    return True


def picture(rows: Sequence[Row]) -> Picture:
    """Return a line for each trial. It shows the number that the verdict rests on: the ratio to the best before it."""
    names = []
    for i, row in enumerate(rows):
        change = row.change if i == 0 else f"+ {row.change}"
        names.append(f"{plain(change)} · {_speed(row)}")
    keys = [Key("kept", _KEPT, shape="bar"), Key("not kept", _LEFT, shape="bar")]
    if any(row.predicted for row in rows):
        keys.append(Key("predicted", _PREDICTED, "", "D"))
    panel = Panel(partial(_draw_gains, rows=rows, names=names), tall=bars_height(names), left=0.1)
    remark = "gain over the best variant before it; line: 95 % interval. A change is kept if its interval is above 0"
    return Picture("tune", "Gain of each change", (panel,), tuple(keys), remark)


def _draw_gains(ax: Any, rows: Sequence[Row], names: Sequence[str]) -> None:
    ends = [0.0]
    positions = name_bars(ax, names, "gain in speed (%)")
    for row, position in zip(rows, positions, strict=True):
        colour = _KEPT if row.kept else _LEFT
        end = gain = _gain(row.measured or 1.0)
        if row.low and row.high and row.measured:
            low, end = _gain(row.low), _gain(row.high)
            ax.errorbar(gain, position, xerr=[[gain - low], [end - gain]], color=colour, elinewidth=1.4, capsize=3)
            ends += [low, end]
        ax.plot(gain, position, "o", color=colour, markersize=6)
        ends.append(gain)
        if row.predicted:
            predicted = _gain(row.predicted)
            ax.plot(predicted, position, "D", color=_PREDICTED, markersize=4)
            ends.append(predicted)
            end = max(end, predicted)
        verdict = row.why.partition(":")[0]
        if row.low:
            verdict = f"{percent(row.measured or 1.0)}, {verdict}"
        ax.annotate(verdict, (end, position), (6, 0), va="center", **LABEL)
    ax.axvline(0, color=INK, linewidth=0.8, linestyle=":")
    ax.spines["left"].set_visible(False)
    reach = max(ends) - min(ends) or 1.0
    # Leave room for the verdict to the right of the longest interval.
    ax.set_xlim(min(ends) - 0.05 * reach, max(ends) + 0.9 * reach)
    ax.xaxis.set_major_locator(few_ticks(integer=False))


def _gain(ratio: float) -> float:
    return 100 * (ratio - 1)


def _speed(row: Row) -> str:
    if row.tflops_per_gpu and row.tflops_per_gpu >= 1:
        return f"{row.tflops_per_gpu:,.1f} TFLOP/s/GPU"
    if row.tokens_per_s_per_gpu:
        return f"{row.tokens_per_s_per_gpu:,.0f} tokens/s/GPU"
    return ""

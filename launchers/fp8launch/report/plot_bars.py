"""Pictures of rows as bars."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from fp8launch.report.cells import ratio_mark
from fp8launch.report.entry import Entry, Published
from fp8launch.report.plot_encoding import Encoding
from fp8launch.report.plot_style import HEIGHT, INK, Panel, Picture, few_ticks, plain, thousands
from fp8launch.report.plot_values import Of, Value, loss, memory, value_of

# With more bars than this, lines show the same numbers instead.
MOST_BARS = 16
# Height of each further line of a name, in rows of the chart.
_MORE = 0.4
# Letters of a line.
_LINE = 56
_PLACE: dict[str, Any] = {"textcoords": "offset points", "fontsize": 8}


@dataclass(frozen=True)
class Bars:
    """A picture of bars: one quantity in one unit. `text` stands at the end of a bar, `detail` behind its name.

    With `zero` false the axis need not start at zero, and points stand for bars. `remark` explains the error bars.
    """

    name: str
    title: str
    unit: str
    value: Of
    text: Callable[[Entry, Value], str]
    detail: Callable[[Entry], str] = lambda entry: ""
    published: Callable[[Published], float | None] = lambda published: None
    zero: bool = True
    remark: str = ""


def _number(value: float) -> str:
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def _with_gain(entry: Entry, value: Value, units: Sequence[str]) -> str:
    """The value, with the speed-up where that is a ratio of such values."""
    text = _number(value.number)
    speedup = entry.speedup
    if speedup is None or speedup.value is None or speedup.against == entry.row.name or speedup.unit not in units:
        return text
    if speedup.interval and not speedup.distinguishable:
        return f"{text}  not distinguishable"
    return f"{text}  {speedup.value:.2f}×{ratio_mark(speedup)}"


def _flops(entry: Entry) -> str:
    if not entry.tflops:
        return ""
    text = f"{_number(entry.tflops.median)} TFLOP/s"
    if entry.mfu:
        text += f", {100 * entry.mfu.median:.0f} % of {entry.peak_tflops:g}"
    return text


THROUGHPUT = Bars(
    "throughput",
    "Throughput",
    "tokens/s/GPU",
    lambda entry: value_of(entry.tokens),
    lambda entry, value: _with_gain(entry, value, ["tokens/s/GPU"]),
    _flops,
    lambda published: published.tokens_per_s_per_gpu,
)
STEP_TIME = Bars(
    "step_time_bars",
    "Step time",
    "ms per iteration",
    lambda entry: value_of(entry.step_time),
    lambda entry, value: _with_gain(entry, value, ["iterations/s", "samples/s/GPU"]),
)
MEMORY = Bars(
    "memory",
    "Peak memory",
    "GiB on the fullest GPU",
    memory,
    lambda entry, value: f"{value.number:,.1f}",
)
LOSS = Bars(
    "loss_end",
    "Loss at the end",
    "loss (axis does not start at 0)",
    loss,
    lambda entry, value: f"{value.number:.4f}",
    zero=False,
    remark="mean over the seeds; error bars: standard deviation over several seeds",
)


def bar_picture(entries: Sequence[Entry], encoding: Encoding, bars: Bars) -> list[Picture]:
    """Return a bar from zero for each row, or nothing where no row has the quantity."""
    if not any(map(bars.value, entries)):
        return []
    names = []
    for entry in entries:
        names.append(_name(entry.row.name, bars.detail(entry)))
    rows = sum(1 + _MORE * text.count("\n") for text in names)
    draw = partial(draw_bars, entries=entries, names=names, encoding=encoding, bars=bars)
    tall = (0.65 + 0.4 * rows) / HEIGHT
    return [Picture(bars.name, bars.title, (Panel(draw, tall=tall, left=0.1),), (), bars.remark)]


def _name(name: str, detail: str) -> str:
    """The row's name above its bar, in lines that break between words, and the detail."""
    lines = textwrap.wrap(plain(name), _LINE, break_long_words=False, break_on_hyphens=False)
    if detail and len(lines[-1]) + len(detail) + 3 <= _LINE + 4:
        lines[-1] += f" · {detail}"
    elif detail:
        lines.append(detail)
    return "\n".join(lines)


def draw_bars(ax: Any, entries: Sequence[Entry], names: Sequence[str], encoding: Encoding, bars: Bars) -> None:
    """Draw a bar for each row, its runs' spread as an error bar, the published figure as a line across it."""
    found = list(filter(None, map(bars.value, entries)))
    highest = max(value.number + value.spread for value in found)
    lowest = 0.0
    if not bars.zero:
        low = min(value.number - value.spread for value in found)
        lowest = low - 0.15 * (highest - low or 0.1 * highest)
    top = 0.0
    for entry, name in zip(entries, names, strict=True):
        top += _MORE * name.count("\n")
        ax.annotate(name, (0, top), (1, 0), xycoords=("axes fraction", "data"), va="bottom", **_PLACE)
        at, value = top + 0.28, bars.value(entry)
        top += 1
        if value is None:
            ax.annotate("not known", (lowest, at), (6, 0), va="center", **_PLACE)
            continue
        highest = max(highest, _draw_bar(ax, at, entry, value, encoding.colour(entry), bars))
    ax.set_yticks([])
    ax.spines["left"].set_visible(bars.zero)
    ax.set_ylim(top - 0.35, -0.5)
    # Room for the text at the end of the longest bar.
    ax.set_xlim(lowest, lowest + (highest - lowest) * 1.6)
    ax.set_xlabel(bars.unit)
    ax.grid(axis="x", color=INK, alpha=0.15, linewidth=0.6)
    ax.grid(visible=False, axis="y")
    ax.xaxis.set_major_locator(few_ticks(integer=bars.zero))
    ax.xaxis.set_major_formatter(thousands())


def _draw_bar(ax: Any, at: float, entry: Entry, value: Value, colour: str, bars: Bars) -> float:
    """Draw one bar with its error bar, its published figure and its text. Return where it ends."""
    if bars.zero:
        ax.barh(at, value.number, color=colour, height=0.42)
    else:
        ax.plot(value.number, at, "o", color=colour)
    if value.spread:
        ax.errorbar(value.number, at, xerr=value.spread, color=INK, elinewidth=1, capsize=2.5)
    text = bars.text(entry, value)
    end = value.number + value.spread
    figure = None
    if entry.published:
        figure = bars.published(entry.published)
    if figure:
        ax.plot([figure] * 2, [at - 0.28, at + 0.28], color=INK, linewidth=1.6, linestyle=":")
        end = max(end, figure)
        text += f"  (published {figure:,.0f})"
    ax.annotate(text, (end, at), (5, 0), va="center", **_PLACE)
    return end

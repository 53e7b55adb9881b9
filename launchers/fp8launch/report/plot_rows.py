"""Pictures of rows: bars, and lines over the sequence length and the number of GPUs."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from fp8launch.report.cells import ratio_mark
from fp8launch.report.columns import Entry, Published
from fp8launch.report.grouping import Measure
from fp8launch.report.plot_encoding import Encoding, Lines, Size, grouped, length, lines_of, world
from fp8launch.report.plot_style import (
    HEIGHT,
    INK,
    Panel,
    Picture,
    doubling_axis,
    few_ticks,
    left_out,
    plain,
    thousands,
)


@dataclass(frozen=True)
class Value:
    """A number with half the width of its error bar."""

    number: float
    spread: float = 0.0


Of = Callable[[Entry], Value | None]


def _of(measure: Measure | None, scale: float = 1.0) -> Value | None:
    if measure is None:
        return None
    return Value(scale * measure.median, scale * measure.spread)


def _total(entry: Entry) -> Value | None:
    if not entry.row.world:
        return None
    return _of(entry.tokens, entry.row.world)


def _memory(entry: Entry) -> Value | None:
    if not entry.peak_memory_mib:
        return None
    return Value(entry.peak_memory_mib / 1024)


def _loss(entry: Entry) -> Value | None:
    if entry.loss is None:
        return None
    return Value(entry.loss.smoothed, entry.loss.spread / 2)


# --- Bars -----------------------------------------------------------------------------------------------------------

# More bars than this are no picture where lines show the same numbers.
MOST_BARS = 16
# What a second line of a name takes, in rows; letters of a line.
_MORE = 0.4
_LINE = 56


@dataclass(frozen=True)
class Bars:
    """A picture of bars: one quantity in one unit. `text` stands at the end of a bar, `detail` behind its name.

    With `zero` false the axis need not start at zero, and points stand for bars.
    """

    name: str
    title: str
    unit: str
    value: Of
    text: Callable[[Entry, Value], str]
    detail: Callable[[Entry], str] = lambda entry: ""
    published: Callable[[Published], float | None] = lambda published: None
    zero: bool = True


def _number(value: float) -> str:
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:,.4g}"


def _with_gain(entry: Entry, value: Value, units: Sequence[str]) -> str:
    """The value, with the speed-up where that is a ratio of such values."""
    text = _number(value.number)
    speedup = entry.speedup
    if speedup is None or speedup.value is None or speedup.against == entry.row.name or speedup.unit not in units:
        return text
    if speedup.interval and speedup.interval.low < 1 < speedup.interval.high:
        return f"{text}  no difference seen"
    return f"{text}  {speedup.value:.2f}×{ratio_mark(speedup)}"


def _flops(entry: Entry) -> str:
    if not entry.tflops:
        return ""
    text = f"{entry.tflops.median:.0f} TFLOP/s"
    if entry.mfu:
        text += f", {100 * entry.mfu.median:.0f} % of {entry.peak_tflops:g}"
    return text


THROUGHPUT = Bars(
    "throughput",
    "Throughput",
    "tokens/s/GPU",
    lambda entry: _of(entry.tokens),
    lambda entry, value: _with_gain(entry, value, ["tokens/s/GPU"]),
    _flops,
    lambda published: published.tokens_per_s_per_gpu,
)
STEP_TIME = Bars(
    "step_time_bars",
    "Step time",
    "ms per iteration",
    lambda entry: _of(entry.step_time),
    lambda entry, value: _with_gain(entry, value, ["iterations/s", "samples/s/GPU"]),
)
MEMORY = Bars(
    "memory",
    "Peak memory",
    "GiB on the fullest GPU",
    _memory,
    lambda entry, value: f"{value.number:,.1f}",
)
LOSS = Bars(
    "loss_end",
    "Loss at the end",
    "loss (axis does not start at 0)",
    _loss,
    lambda entry, value: f"{value.number:.4f}",
    zero=False,
)


def bar_picture(entries: Sequence[Entry], encoding: Encoding, bars: Bars) -> list[Picture]:
    """Return a bar from zero for each row, or nothing where no row has the quantity."""
    if not any(map(bars.value, entries)):
        return []
    sized = len({entry.row.size for entry in entries}) > 1
    names = []
    for entry in entries:
        title = entry.row.name if sized else entry.row.label
        names.append(_name(title, bars.detail(entry)))
    rows = sum(1 + _MORE * text.count("\n") for text in names)
    draw = partial(draw_bars, entries=entries, names=names, encoding=encoding, bars=bars)
    tall = (0.65 + 0.4 * rows) / HEIGHT
    return [Picture(bars.name, bars.title, (Panel(draw, tall=tall, left=0.1),))]


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
    place = {"textcoords": "offset points", "fontsize": 8}
    for entry, name in zip(entries, names, strict=True):
        top += _MORE * name.count("\n")
        ax.annotate(name, (0, top), (1, 0), xycoords=("axes fraction", "data"), va="bottom", **place)
        at, value = top + 0.28, bars.value(entry)
        top += 1
        if value is None:
            ax.annotate("not known", (lowest, at), (6, 0), va="center", **place)
            continue
        colour = encoding.colour(entry)
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
            highest = max(highest, end)
            text += f"  (published {figure:,.0f})"
        ax.annotate(text, (end, at), (5, 0), va="center", **place)
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


# --- Lines over a size ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Quantity:
    """One quantity over a size. `shared` says that all panels have one scale; `full` is the value of a whole."""

    name: str
    title: str
    unit: str
    value: Of
    shared: bool = False
    full: float | None = None


def _efficiency(entry: Entry) -> Value | None:
    if entry.efficiency is None or not entry.efficiency.ratio.value:
        return None
    interval = entry.efficiency.ratio.interval
    spread = 0.0
    if interval:
        spread = 50 * (interval.high - interval.low)
    return Value(100 * entry.efficiency.ratio.value, spread)


_TOTAL = Quantity("total", "Aggregate tokens/s", "tokens/s on all GPUs", _total)
_OVER_LENGTH = (
    Quantity("tflop_s", "TFLOP/s", "model TFLOP/s/GPU", lambda entry: _of(entry.tflops), shared=True),
    Quantity("tokens", "Tokens/s", "tokens/s/GPU", lambda entry: _of(entry.tokens)),
    _TOTAL,
    Quantity("mfu", "MFU", "% of each data type's own peak", lambda entry: _of(entry.mfu, 100), shared=True),
)
_MEMORY_OVER_LENGTH = Quantity("memory", "Peak memory", "GiB on the fullest GPU", _memory, shared=True)


def sequence_pictures(entries: Sequence[Entry], encoding: Encoding, memory: bool) -> list[Picture]:
    """Return quantities over the sequence length, for the lines that have several; `memory` where bars lack room."""
    quantities = list(_OVER_LENGTH)
    if not any((world(entry) or 1) > 1 for entry in entries):
        quantities.remove(_TOTAL)
    if memory:
        quantities.append(_MEMORY_OVER_LENGTH)
    over = _Over("sequence", "sequence length", "sequence length (tokens, log scale)", length, world)
    found = []
    for quantity in quantities:
        found += _line_picture(entries, encoding, quantity, over)
    return found


def scaling_pictures(entries: Sequence[Entry], encoding: Encoding) -> list[Picture]:
    """Return scaling efficiency over GPUs, and total speed where the sequence length does not have it already."""
    over = _Over("scaling", "number of GPUs", "GPUs (log scale)", world, length)
    modes = {entry.efficiency.mode for entry in entries if entry.efficiency}
    unit = f"speed per GPU, % of the fewest GPUs\n({', '.join(sorted(modes))} scaling)"
    efficiency = Quantity("efficiency", "Scaling efficiency", unit, _efficiency, shared=True, full=100)
    found = []
    if len(set(map(length, entries))) < 2:
        found += _line_picture(entries, encoding, _TOTAL, over)
    return found + _line_picture(entries, encoding, efficiency, over)


@dataclass(frozen=True)
class _Over:
    """The x axis: a size, and the other size, which dashes stand for."""

    name: str
    title: str
    label: str
    size: Size
    other: Size


def _line_picture(entries: Sequence[Entry], encoding: Encoding, quantity: Quantity, over: _Over) -> list[Picture]:
    """Return one picture, with a panel for each group of rows; nothing where no line has two points."""
    drawn: list[Entry] = []
    missing = []
    for same in _lines(entries, encoding, over).values():
        known = [entry for entry in same if quantity.value(entry) and over.size(entry)]
        if len(set(map(over.size, known))) > 1:
            drawn += known
        else:
            missing += [entry.row.name for entry in same]
    if not drawn:
        return []
    drawn_names = {entry.row.name for entry in drawn}
    shown = [entry for entry in entries if entry.row.name in drawn_names]
    dashes = lines_of(shown, over.other)
    top = None
    if quantity.shared:
        top = max(_top(entry, quantity) for entry in shown)
    panels = []
    for title, same in grouped(shown, encoding.panel).items():
        draw = partial(
            _draw_lines, entries=same, encoding=encoding, quantity=quantity, over=over, dashes=dashes, top=top
        )
        panels.append(Panel(draw, title))
    return [
        Picture(
            f"{over.name}_{quantity.name}",
            f"{quantity.title} over {over.title}",
            tuple(panels),
            (*encoding.keys(shown), *dashes.keys(INK)),
            left_out(missing, "fewer than two values"),
        )
    ]


def _lines(entries: Sequence[Entry], encoding: Encoding, over: _Over) -> dict[str, list[Entry]]:
    return grouped(entries, lambda e: repr((encoding.panel(e), encoding.word(e), over.other(e))))


def _top(entry: Entry, quantity: Quantity) -> float:
    top = quantity.full or 0.0
    value = quantity.value(entry)
    if value:
        top = max(top, value.number + value.spread)
    return top


def _draw_lines(
    ax: Any,
    entries: Sequence[Entry],
    encoding: Encoding,
    quantity: Quantity,
    over: _Over,
    dashes: Lines,
    top: float | None,
) -> None:
    """Draw one line for each colour and dash, with an error bar where the table has ±."""
    with_ideal = quantity is _TOTAL and over.size is world
    for same in _lines(entries, encoding, over).values():
        points = []
        for entry in same:
            if value := quantity.value(entry):
                points.append((over.size(entry) or 0, value.number, value.spread))
        sizes, numbers, spreads = zip(*sorted(points), strict=True)
        dash, marker = dashes.style(same[0])
        if len(dashes.values) < 2:
            dash, marker = "-", "o"
        style: dict[str, Any] = {"color": encoding.colour(same[0]), "linestyle": dash, "marker": marker}
        style["markersize"] = 5
        if any(spreads):
            style["yerr"] = spreads
        ax.errorbar(sizes, numbers, linewidth=1.4, elinewidth=0.9, capsize=2.5, **style)
        if with_ideal:
            ideal = [numbers[0] * size / sizes[0] for size in sizes]
            ax.plot(sizes, ideal, color=style["color"], linewidth=0.8, linestyle=":", alpha=0.8)
    if quantity.full is not None:
        ax.axhline(quantity.full, color=INK, linewidth=0.8, linestyle=":")
    doubling_axis(ax, list(filter(None, map(over.size, entries))), over.label)
    ax.set_ylim(0, 1.08 * (top or max(_top(entry, quantity) for entry in entries)))
    unit = quantity.unit
    if with_ideal:
        unit += "\n(dotted: ideal)"
    ax.set_ylabel(unit)
    ax.yaxis.set_major_formatter(thousands())

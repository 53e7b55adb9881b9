"""Pictures of rows as lines over the sequence length and the number of GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from fp8launch.report.entry import Entry, scaling_modes
from fp8launch.report.plot_encoding import Encoding, Lines, Size, grouped, length, lines_of, row_names, world
from fp8launch.report.plot_style import INK, Panel, Picture, doubling_axis, left_out, thousands
from fp8launch.report.plot_values import Of, Value, memory, total, value_of


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


_TOTAL = Quantity("total", "Aggregate tokens/s", "tokens/s on all GPUs", total)
_OVER_LENGTH = (
    Quantity("tflop_s", "TFLOP/s", "model TFLOP/s/GPU", lambda entry: value_of(entry.tflops), shared=True),
    Quantity("tokens", "Tokens/s", "tokens/s/GPU", lambda entry: value_of(entry.tokens)),
    _TOTAL,
    Quantity("mfu", "MFU", "% of each data type's own peak", lambda entry: value_of(entry.mfu, 100), shared=True),
)
_MEMORY_OVER_LENGTH = Quantity("memory", "Peak memory", "GiB on the fullest GPU", memory, shared=True)


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
    modes = ", ".join(scaling_modes(entries))
    unit = f"speed per GPU, % of the fewest GPUs\n({modes} scaling)"
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
    drawn: set[str] = set()
    missing = []
    for same in _lines(entries, encoding, over).values():
        known = [entry for entry in same if quantity.value(entry) and over.size(entry)]
        if len(set(map(over.size, known))) > 1:
            drawn.update(row_names(known))
        else:
            missing += row_names(same)
    if not drawn:
        return []
    shown = [entry for entry in entries if entry.row.name in drawn]
    dashes = lines_of(shown, over.other)
    top = None
    if quantity.shared:
        top = _top(shown, quantity)
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
    """The rows that one line connects: those of a panel, a colour and a dash."""

    def line(entry: Entry) -> str:
        return repr((encoding.panel(entry), encoding.word(entry), over.other(entry)))

    return grouped(entries, line)


def _top(entries: Sequence[Entry], quantity: Quantity) -> float:
    """The highest end of an error bar."""
    top = quantity.full or 0.0
    for entry in entries:
        if value := quantity.value(entry):
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
    ax.set_ylim(0, 1.08 * (top or _top(entries, quantity)))
    unit = quantity.unit
    if with_ideal:
        unit += "\n(dotted: ideal)"
    ax.set_ylabel(unit)
    ax.yaxis.set_major_formatter(thousands())

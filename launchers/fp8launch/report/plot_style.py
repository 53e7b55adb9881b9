"""Shared by all pictures: colours, names, ticks, legends, and how many lines one picture takes.

A variant has one colour in all pictures, from a palette that colour-blind readers tell apart and that stands out on
white and on black, and a marker for where lines lie on each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fp8launch.diagnostics import printable
from fp8launch.report.columns import Entry
from fp8launch.report.comparison import Comparison

# Okabe and Ito's palette without yellow and black; sky blue stands in for what a dark page would swallow.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#8C7AE6", "#7F8C8D")
INK = "#303338"
# More lines than this cannot be distinguished: they go into another picture.
MOST_LINES = 8
# More points than pixels show nothing more.
MOST_POINTS = 1500
_BELOW_AXIS = 33  # points that tick labels and the axis label take


@dataclass(frozen=True)
class Picture:
    """`draw` fills axes when it is called; `tall` is the height in usual heights; `remark` stands below the title."""

    name: str
    title: str
    draw: Callable[[Any], None]
    tall: float = 1.0
    remark: str = ""


def series_of(entry: Entry) -> str:
    """Return the variant without its sequence length: the name of one line over sequence lengths."""
    length = entry.row.facts.get("seq_length")
    parts = [part for part in entry.row.label.split(", ") if part != f"seq {length}"]
    return ", ".join(parts) or str(entry.row.facts.get("precision", ""))


def colours_of(comparison: Comparison) -> dict[str, str]:
    """The colour of each variant, by label."""
    series = list(dict.fromkeys(map(series_of, comparison.entries)))
    return {e.row.label: COLOURS[series.index(series_of(e)) % len(COLOURS)] for e in comparison.entries}


def marker_of(colour: str) -> str:
    """A shape that goes with a colour."""
    return "osD^vPX*"[COLOURS.index(colour)]


def name_of(entry: Entry, others: Sequence[Entry]) -> str:
    """Return the variant, with its size only where sizes differ."""
    sizes = {other.row.world for other in others}
    return legend_text(entry.row.name if len(sizes) > 1 else entry.row.label)


def legend_text(text: str) -> str:
    """Shorten a name; matplotlib hides lines whose name begins with an underscore."""
    text = printable(text).replace("\n", " ")
    if len(text) > 44:
        text = f"{text[:30]}…{text[-13:]}"
    return f" {text}" if text.startswith("_") else text


def pages(entries: Sequence[Entry]) -> tuple[list[list[Entry]], str]:
    """Share rows out over pictures of at most MOST_LINES lines; with a remark where sizes had to be left out.

    More rows than that are shown at each variant's smallest size only, more variants in further pictures.
    """
    remark = ""
    if len(entries) > MOST_LINES:
        smallest: dict[str, Entry] = {}
        for entry in entries:
            smallest.setdefault(series_of(entry), entry)
        if len(smallest) < len(entries):
            remark = "each variant at its smallest size"
        entries = list(smallest.values())
    return [list(entries[i : i + MOST_LINES]) for i in range(0, len(entries), MOST_LINES)], remark


def paged(name: str, title: str, draws: Sequence[Callable[[Any], None]], tall: float, remark: str) -> list[Picture]:
    """Return the pictures of several pages: `loss`, `loss_2`; titles say which page of how many."""
    found = []
    for i, draw in enumerate(draws, 1):
        page = f" ({i} of {len(draws)})" if len(draws) > 1 else ""
        found.append(Picture(name if i == 1 else f"{name}_{i}", title + page, draw, tall, remark))
    return found


def left_out(names: Sequence[str], why: str) -> str:
    """Name what a picture does not show."""
    if not names:
        return ""
    shown = ", ".join(map(legend_text, names[:3]))
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"not shown, {why}: {shown}{more}"


def dash_of(entry: Entry, others: Sequence[Entry]) -> str:
    """Solid for the smallest size of a variant, then dashed: the colour says which variant it is."""
    alike = [e for e in others if series_of(e) == series_of(entry)]
    sizes = sorted({_size(e) for e in alike})
    return ("-", "--", "-.", ":")[sizes.index(_size(entry)) % 4]


def _size(entry: Entry) -> tuple[int, int]:
    length = entry.row.facts.get("seq_length")
    return length if isinstance(length, int) else 0, entry.row.world or 0


def legend_below(ax: Any) -> None:
    """Place the legend below the axes, where no curve crosses it."""
    from matplotlib.transforms import ScaledTranslation

    labels = ax.get_legend_handles_labels()[1]
    if labels:
        # Below the axis' own words, however tall the axes become.
        below = ax.transAxes + ScaledTranslation(0, -_BELOW_AXIS / 72, ax.figure.dpi_scale_trans)
        # Two columns of long names would be wider than the picture.
        columns = 2 if max(map(len, labels)) <= 20 and len(labels) > 1 else 1
        where: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (0, 0), "bbox_transform": below}
        ax.legend(**where, ncols=columns, columnspacing=1, borderaxespad=0)


def by_variant(entries: Sequence[Entry]) -> Iterator[tuple[str, list[Entry]]]:
    for label in dict.fromkeys(entry.row.label for entry in entries):
        yield label, [entry for entry in entries if entry.row.label == label]


def thinned(points: Sequence[Any]) -> list[Any]:
    step = -(-len(points) // MOST_POINTS) or 1
    return list(points[::step])


def wrapped(text: str) -> str:
    return text.replace(", ", "\n", 1) if len(text) > 16 else text


def few_ticks() -> Any:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(5, integer=True)


def plain_log_ticks(axis: Any) -> None:
    """1, 2 and 5 of each power of ten, in digits."""
    from matplotlib.ticker import LogLocator, NullFormatter, NullLocator

    axis.set_major_locator(LogLocator(10, subs=(1, 2, 5)))
    axis.set_major_formatter(thousands())
    axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())


def thousands() -> Any:
    from matplotlib.ticker import FuncFormatter

    return FuncFormatter(lambda value, _: f"{value:,.0f}" if abs(value) >= 1000 else f"{value:g}")

"""The common parts of pictures: panels, legends, colours, markers, dashes and ticks.

Colour shows the precision, dash and marker show a size, and panels separate everything else. If that would leave a
panel with a single precision, for example because rows also differ in a layout or a kernel, colour shows the
variant. The palette is safe for colour-blind readers and stands out on white and on black.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any, NamedTuple

from fp8launch.diagnostics import printable
from fp8launch.report.rows import Row, in_units
from fp8launch.report.run_report import RunReport
from fp8launch.untyped import as_int
from fp8launch.wording import and_more, counted

# Okabe and Ito's palette without yellow and black, which disappear on a white or a dark page. The last two colours
# replace them.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7", "#56B4E9", "#8C7AE6", "#7F8C8D")
INK = "#303338"
MARKERS = "osD^vPX*"
DASHES = ("-", "--", ":", "-.")
# Size of a normal panel in inches. It is narrow, so that text stays legible at the width of a phone.
WIDTH, HEIGHT = 4.4, 3.0
# More lines than this in one panel cannot be distinguished.
MOST_LINES = 8
# More points than pixels add nothing.
MOST_POINTS = 200


@dataclass(frozen=True)
class Key:
    """An entry of a legend: a `line` with its dash and marker, a `thin` line, a `bar`, a pale `band`, or a `ring`."""

    text: str
    colour: str
    dash: str = "-"
    marker: str = ""
    shape: str = "line"


@dataclass(frozen=True)
class Panel:
    """One pair of axes, which `draw` fills.

    `tall` is the height as a multiple of HEIGHT. `left` is the room for ticks and the label of the y axis, in inches.
    """

    draw: Callable[[Any], object]
    title: str = ""
    keys: tuple[Key, ...] = ()
    tall: float = 1.0
    left: float = 0.8


@dataclass(frozen=True)
class Picture:
    """Panels that belong together, with a common legend. `remark` is printed below the title."""

    name: str
    title: str
    panels: tuple[Panel, ...]
    keys: tuple[Key, ...] = ()
    remark: str = ""
    columns: int = 3

    @property
    def width(self) -> int:
        """Return the number of panels side by side."""
        return min(self.columns, len(self.panels))


def plain(text: str) -> str:
    return printable(text).replace("\n", " ")


def left_out(names: Sequence[str], why: str) -> str:
    """Return a remark that names the rows that a picture does not show."""
    if not names:
        return ""
    return f"not shown, {why}: {and_more(list(map(plain, names)), 3, '; ')}"


def thinned(points: Sequence[Any]) -> list[Any]:
    """Return at most MOST_POINTS of the points, including the last."""
    step = -(-len(points) // MOST_POINTS) or 1
    return list(points[::-1][::step])[::-1]


def few_ticks(integer: bool = True) -> Any:
    from matplotlib.ticker import MaxNLocator

    if integer:
        return MaxNLocator(5, integer=True)
    return MaxNLocator(4)


# A wider range than this has a logarithmic axis, where small values would look equal on a linear one.
_WIDE_LOSSES = 50


def loss_axis(ax: Any, low: float, high: float, room: float = 0.06) -> None:
    """Scale the y axis to losses between `low` and `high`, and say in its label if it does not start at 0.

    `room` is left above and below, as a share of the range.
    """
    if 0 < low < high / _WIDE_LOSSES:
        factor = (high / low) ** room
        ax.set_yscale("log")
        ax.set_ylim(low / factor, high * factor)
        ax.minorticks_off()
        ax.yaxis.set_major_formatter(thousands())
        ax.set_ylabel("loss (log scale)")
        return
    above = room * (high - low or 0.1 * abs(high))
    bottom, label = 0.0, "loss"
    # A curve that falls by little would look flat on an axis from zero.
    if low > 0.3 * high:
        bottom, label = low - above, "loss (axis does not start at 0)"
    ax.set_ylim(bottom, high + above)
    ax.yaxis.set_major_locator(few_ticks(integer=False))
    ax.set_ylabel(label)


def other_runs(rows: Sequence[Row], runs: Iterable[Sequence[RunReport]]) -> tuple[Key, ...]:
    """Return the legend of the thin lines, if several of these runs belong to one row."""
    if max(map(len, runs)) < 2:
        return ()
    word = "seed" if any(row.loss and row.loss.seeds > 1 for row in rows) else "run"
    return (Key(f"thick: the first {word}; thin: the others", INK, shape="thin"),)


def doubling_axis(ax: Any, values: Sequence[int], label: str) -> None:
    """Scale the x axis by powers of two, with a tick at each value."""
    numbers = sorted(set(values))
    ax.set_xscale("log", base=2)
    ax.set_xticks(numbers, list(map("{:,}".format, numbers)))
    ax.minorticks_off()
    ax.set_xlim(numbers[0] / 1.15, numbers[-1] * 1.15)
    ax.set_xlabel(label)


# Style of a text next to a point or a bar.
LABEL: dict[str, Any] = {"textcoords": "offset points", "fontsize": 8}
# Style of the marker of a single run or seed.
RING: dict[str, Any] = {
    "zorder": 3,
    "marker": "o",
    "linestyle": "",
    "markersize": 4,
    "markerfacecolor": "none",
    "alpha": 0.9,
}
# Height of each further line of a name, as a multiple of the distance between two bars.
_FURTHER_LINE = 0.4


def bars_height(names: Sequence[str]) -> float:
    """Return the height of a panel with a bar below each name, as a multiple of HEIGHT."""
    bars = sum(1 + _FURTHER_LINE * name.count("\n") for name in names)
    return (0.65 + 0.4 * bars) / HEIGHT


def name_bars(ax: Any, names: Sequence[str], unit: str) -> list[float]:
    """Prepare axes for a bar below each name, and return the positions of the bars."""
    positions = []
    top = 0.0
    for name in names:
        top += _FURTHER_LINE * name.count("\n")
        ax.annotate(name, (0, top), (1, 0), xycoords=("axes fraction", "data"), va="bottom", **LABEL)
        positions.append(top + 0.28)
        top += 1
    ax.set_yticks([])
    ax.set_ylim(top - 0.35, -0.5)
    ax.set_xlabel(unit)
    ax.grid(axis="x", color=INK, alpha=0.15, linewidth=0.6)
    ax.grid(visible=False, axis="y")
    ax.xaxis.set_major_formatter(thousands())
    return positions


def side_by_side(ax: Any, i: int, count: int, more: float = 0.0) -> Any:
    """Return a transform that draws line `i` a few points to the side, so that error bars do not cover each other.

    `more` are further points to the right.
    """
    from matplotlib.transforms import ScaledTranslation

    points = 4.0 * (i - (count - 1) / 2) + more
    return ax.transData + ScaledTranslation(points / 72, 0, ax.figure.dpi_scale_trans)


class TimeUnit(NamedTuple):
    name: str
    per_ms: float

    def text(self, ms: float) -> str:
        """Return a time with its unit, such as `812.4 ms` or `35.1 s`."""
        return f"{ms * self.per_ms:,.1f} {self.name}"


# Times from here on are shown in seconds.
_LONG_MS = 10_000


def time_unit(times_ms: Sequence[float]) -> TimeUnit:
    """Choose one unit for the times of a picture."""
    if times_ms and min(times_ms) >= _LONG_MS:
        return TimeUnit("s", 1e-3)
    return TimeUnit("ms", 1.0)


def thousands(scale: float = 1.0) -> Any:
    """Return a formatter for `scale` times the numbers of an axis."""
    from matplotlib.ticker import FuncFormatter

    return FuncFormatter(lambda value, _: _with_thousands(scale * value))


def _with_thousands(value: float) -> str:
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:g}"


# Common precisions have the same colour in every report.
_USUAL = {"bf16": 0, "tensorwise": 1, "blockwise": 2, "delayed": 3, "mxfp8": 4, "nvfp4": 5}


@dataclass(frozen=True)
class Encoding:
    """The meaning of colours and panels: a word and a panel for each row name, and a colour for each word."""

    words: Mapping[str, str]
    panels: Mapping[str, str]
    colours: Mapping[str, str]

    def word(self, row: Row) -> str:
        return self.words[row.name]

    def panel(self, row: Row) -> str:
        return self.panels[row.name]

    def colour(self, row: Row) -> str:
        return self.colours[self.word(row)]

    def keys(self, rows: Iterable[Row], shape: str = "bar") -> tuple[Key, ...]:
        """Return the legend of the colours in a picture of these rows."""
        words = dict.fromkeys(map(self.word, rows))
        return tuple(Key(plain(word), self.colours[word], shape=shape) for word in words)


def encode(rows: Sequence[Row]) -> Encoding:
    """Choose the meaning of colours and panels for these rows."""
    words, panels = _by_row(rows, _precision), _by_row(rows, _rest)
    if _tells_apart(rows, words, panels):
        return Encoding(words, panels, _precision_colours(list(dict.fromkeys(words.values()))))
    words = _by_row(rows, _without_length)
    # bf16 comes first, so that it has the same colour in every report.
    order = sorted(dict.fromkeys(words.values()), key=lambda word: not word.startswith("bf16"))
    pages = dict.fromkeys(order, "")
    count = -(-len(order) // MOST_LINES)
    if count > 1:
        for i, word in enumerate(order):
            pages[word] = f"{i // MOST_LINES + 1} of {count}"
    panels = {name: pages[word] for name, word in words.items()}
    return Encoding(words, panels, dict(zip(order, cycle(COLOURS), strict=False)))


def _by_row(rows: Sequence[Row], word: Callable[[Row], str]) -> dict[str, str]:
    return {row.name: word(row) for row in rows}


def _tells_apart(rows: Sequence[Row], words: Mapping[str, str], panels: Mapping[str, str]) -> bool:
    """Return whether each row has its own line, and each panel several precisions, but not too many."""
    lines = set()
    inside: dict[str, set[str]] = {}
    for row in rows:
        panel, word = panels[row.name], words[row.name]
        lines.add((panel, word, world(row), length(row)))
        inside.setdefault(panel, set()).add(word)
    if len(lines) < len(rows) or len(set(words.values())) < 2:
        return False
    counts = list(map(len, inside.values()))
    return min(counts) > 1 and max(counts) <= MOST_LINES


def _parts(row: Row) -> list[str]:
    return row.label.split(", ")


def _precision(row: Row) -> str:
    """Return the precision as the label spells it, else as the facts do."""
    known = str(row.facts.get("precision", ""))
    names = {known}
    study = row.runs[0].study
    if study:
        names |= {str(study.point.get("precision.recipe")), str(study.point.get("precision"))}
    for part in _parts(row):
        if part in names:
            return part
    return known


def _without_length(row: Row) -> str:
    return _label_without(row, _length_part(row)) or _precision(row)


def _rest(row: Row) -> str:
    """Return the label without precision and sequence length."""
    return _label_without(row, _precision(row), _length_part(row))


def _length_part(row: Row) -> str:
    return f"seq {length(row)}"


def _label_without(row: Row, *left_out: str) -> str:
    return ", ".join(part for part in _parts(row) if part not in left_out)


def _precision_colours(words: Sequence[str]) -> dict[str, str]:
    chosen: dict[str, str] = {}
    taken: set[int] = set()
    for word in sorted(words, key=len):
        usual = _USUAL.get(word.split(" ")[0])
        if usual is not None and usual not in taken and " then " not in word:
            chosen[word] = COLOURS[usual]
            taken.add(usual)
    for word in words:
        if word not in chosen:
            free = set(range(len(COLOURS))) - taken
            last = max(free, default=len(chosen) % len(COLOURS))
            chosen[word] = COLOURS[last]
            taken.add(last)
    return chosen


# --- Sizes ----------------------------------------------------------------------------------------------------------


def length(row: Row) -> int | None:
    return as_int(row.facts.get("seq_length"))


def world(row: Row) -> int | None:
    return row.world


def gpus(number: int | None) -> str:
    if number is None:
        return "GPUs not known"
    return counted(number, "GPU")


def tokens(number: int | None) -> str:
    if number is None:
        return "length not known"
    return f"{number:,} tokens"


Size = Callable[[Row], int | None]


@dataclass(frozen=True)
class Lines:
    """A dash and a marker for each value of a size. A single value needs neither."""

    size: Size
    name: Callable[[int | None], str]
    values: tuple[int | None, ...]

    def style(self, row: Row) -> tuple[str, str]:
        i = self.values.index(self.size(row))
        return DASHES[i % len(DASHES)], MARKERS[i % len(MARKERS)]

    def keys(self, colour: str) -> tuple[Key, ...]:
        if len(self.values) < 2:
            return ()
        found = []
        for i, value in enumerate(self.values):
            found.append(Key(self.name(value), colour, DASHES[i % len(DASHES)], MARKERS[i % len(MARKERS)]))
        return tuple(found)

    def text(self, row: Row) -> str:
        if len(self.values) < 2:
            return ""
        return self.name(self.size(row))


def lines_of(rows: Sequence[Row], size: Size) -> Lines:
    values = tuple(sorted(set(map(size, rows)), key=lambda value: value or 0))
    if size is world:
        return Lines(size, lambda number: in_units(rows, gpus(number)), values)
    return Lines(size, tokens, values)


def grouped(rows: Sequence[Row], panel: Callable[[Row], str]) -> dict[str, list[Row]]:
    """Group rows by panel, in their order."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(panel(row), []).append(row)
    return found


def curve_panels(rows: Sequence[Row], encoding: Encoding) -> list[tuple[str, list[Row], Lines]]:
    """Group rows for curves over iterations: a panel for each number of GPUs, a dash for each sequence length.

    If every panel would hold a single curve, dashes in one panel stand for the numbers of GPUs.
    """
    panel, size = encoding.panel, length
    if len(set(map(world, rows)) - {None}) > 1:
        alone = {encoding.word(row) + repr(length(row)) for row in rows}
        if len(alone) == 1:
            size = world
        else:
            panel = partial(_panel_and_gpus, encoding)
    panels = []
    for title, same in grouped(rows, panel).items():
        panels.append((title, same, lines_of(same, size)))
    return panels


def _panel_and_gpus(encoding: Encoding, row: Row) -> str:
    return ", ".join(filter(None, (encoding.panel(row), in_units([row], gpus(world(row))))))

"""Shared by all pictures: what a picture is made of, colours, names and ticks.

Colours are from a palette that colour-blind readers distinguish and that stands out on white and on black; a marker and
a dash repeat what they say.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fp8launch.diagnostics import printable
from fp8launch.wording import and_more

# Okabe and Ito's palette without yellow and black; the last two replace those that are invisible on a dark page.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7", "#56B4E9", "#8C7AE6", "#7F8C8D")
INK = "#303338"
MARKERS = "osD^vPX*"
DASHES = ("-", "--", ":", "-.")
# Inches of a usual panel: narrow, so that letters stay legible at the width of a phone.
WIDTH, HEIGHT = 4.4, 3.0
# More lines than this in one panel cannot be distinguished.
MOST_LINES = 8
# More points than pixels show nothing more.
MOST_POINTS = 200


@dataclass(frozen=True)
class Key:
    """An entry of a legend: a line with its dash and marker, a `bar` of one colour, or a pale `band`."""

    text: str
    colour: str
    dash: str = "-"
    marker: str = ""
    shape: str = "line"


@dataclass(frozen=True)
class Panel:
    """One pair of axes: `draw` fills them when it is called.

    `tall` is the height in usual heights, `left` the inches that the ticks and the label of the y axis take.
    """

    draw: Callable[[Any], None]
    title: str = ""
    keys: tuple[Key, ...] = ()
    tall: float = 1.0
    left: float = 0.8


@dataclass(frozen=True)
class Picture:
    """Panels that belong together, with a common legend. `remark` stands below the title."""

    name: str
    title: str
    panels: tuple[Panel, ...]
    keys: tuple[Key, ...] = ()
    remark: str = ""
    columns: int = 3

    @property
    def width(self) -> int:
        """The number of panels side by side."""
        return min(self.columns, len(self.panels))


def plain(text: str) -> str:
    return printable(text).replace("\n", " ")


def left_out(names: Sequence[str], why: str) -> str:
    """Name the rows that a picture does not show."""
    if not names:
        return ""
    return f"not shown, {why}: {and_more(list(map(plain, names)), 3, '; ')}"


def thinned(points: Sequence[Any]) -> list[Any]:
    """Return at most MOST_POINTS of the points, the last among them."""
    step = -(-len(points) // MOST_POINTS) or 1
    return list(points[::-1][::step])[::-1]


def few_ticks(integer: bool = True) -> Any:
    from matplotlib.ticker import MaxNLocator

    if integer:
        return MaxNLocator(5, integer=True)
    return MaxNLocator(4)


def doubling_axis(ax: Any, values: Sequence[int], label: str) -> None:
    """Scale the x axis by powers of two, with a tick at each value."""
    numbers = sorted(set(values))
    ax.set_xscale("log", base=2)
    ax.set_xticks(numbers, list(map("{:,}".format, numbers)))
    ax.minorticks_off()
    ax.set_xlim(numbers[0] / 1.15, numbers[-1] * 1.15)
    ax.set_xlabel(label)


def thousands() -> Any:
    from matplotlib.ticker import FuncFormatter

    return FuncFormatter(_with_thousands)


def _with_thousands(value: float, _: object) -> str:
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:g}"

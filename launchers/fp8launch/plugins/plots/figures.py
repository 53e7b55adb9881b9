"""Plot a comparison with matplotlib, an optional dependency: `pip install 'fp8launch[plots]'`.

Axes that do not start at zero are labelled.
"""

from __future__ import annotations

import importlib.util
import io
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from fp8launch.diagnostics import MACHINE_LACKS, error
from fp8launch.plugins.plots.curves import loss_pictures, parity_pictures, step_time_pictures
from fp8launch.plugins.plots.row_pictures import (
    LOSS,
    MEMORY,
    MOST_BARS,
    THROUGHPUT,
    bar_picture,
    scaling_pictures,
    sequence_pictures,
    step_time_bars,
    swept_loss_pictures,
)
from fp8launch.plugins.plots.setup import setup_line
from fp8launch.plugins.plots.style import HEIGHT, INK, RING, WIDTH, Key, Panel, Picture, encode
from fp8launch.report.columns import shows_speedup
from fp8launch.report.comparison import Comparison
from fp8launch.report.export import meaning_of_spread
from fp8launch.report.rows import Row
from fp8launch.rundir.atomic_io import write_atomically

T = TypeVar("T")

# Inches.
_LEGEND_LINE = 0.19
_LINE = 0.15
_TITLE = 0.36
_PANEL_TITLE = 0.26
_BELOW = 0.5
_RIGHT = 0.2
_MOST_ACROSS = 3
# A legend below a panel is indented, and each entry begins with a line.
_LEGEND_CHARACTERS = 58
_HEADING_CHARACTERS = 64
DPI = 150
FORMATS = (".png", ".svg", ".pdf")


def available() -> bool:
    """Return whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def pictures(comparison: Comparison) -> list[Picture]:
    """Return the plots for which these runs have data. The remark of a plot lists the rows that it leaves out.

    If learning settings are compared, the losses come first.
    """
    every: Sequence[Row] = comparison.rows
    rows = comparison.good
    if not shows_speedup(every):
        rows = [replace(row, speedup=None) for row in rows]
    encoding = encode(every)
    learning = loss_pictures(every, encoding) + parity_pictures(every, comparison.parities, encoding)
    lines = sequence_pictures(rows, encoding, memory=len(rows) > MOST_BARS)
    speed: list[Picture] = []
    if rows and not (lines and len(rows) > MOST_BARS):
        spread = f"error bars: {meaning_of_spread(comparison)}"
        if any(len(row.good) > 1 for row in rows):
            spread += "; rings: single runs, where they differ visibly"
        if len(rows) > 1 and not shows_speedup(every):
            spread += "; differences between rows were not tested"
        speed += bar_picture(rows, encoding, replace(THROUGHPUT, remark=spread))
        if any(row.step_time and not row.tokens for row in rows):
            speed += bar_picture(rows, encoding, replace(step_time_bars(rows), remark=spread))
    speed += [*lines, *scaling_pictures(rows, encoding), *step_time_pictures(every, encoding)]
    memory = []
    if not any(picture.name == "sequence_memory" for picture in lines):
        memory = bar_picture(rows, encoding, MEMORY)
    if comparison.about_loss:
        ends = swept_loss_pictures(rows) or bar_picture(rows, encoding, LOSS)
        return [*ends, *learning, *speed, *memory]
    return [*speed, *learning, *memory]


def require_drawable(file: Path | None, option: str) -> None:
    """Raise UserError if matplotlib is missing, or if the suffix of the file is not in FORMATS."""
    if not available():
        fix = "pip install 'fp8launch[plots]'"
        raise error("no-matplotlib", "pictures need matplotlib", option, fix, MACHINE_LACKS)
    if file is not None and file.suffix.lower() not in FORMATS:
        raise error("bad-ending", f"cannot draw '{file.suffix}'", option, f"end it in {', '.join(FORMATS)}")


def write_plots(comparison: Comparison, target: Path) -> list[Path]:
    """Write all plots to one file. If `target` is a folder or has no suffix, write one file per plot.

    Raises UserError if matplotlib is missing, if the suffix is not in FORMATS, or if there is nothing to draw.
    """
    single = bool(target.suffix) and not target.is_dir()
    if single:
        require_drawable(target, "--plot")
    else:
        require_drawable(None, "--plot")
    found = pictures(comparison)
    if not found:
        raise error("nothing-to-plot", "no run has numbers to plot", "--plot")
    if single:
        save_figure(figure_of(found, setup_line(comparison)), target, DPI)
        return [target]
    target.mkdir(parents=True, exist_ok=True)
    files = []
    for picture in found:
        file = target / f"{picture.name}.png"
        save_figure(figure_of([picture], setup_line(comparison)), file, DPI)
        files.append(file)
    return files


def save_figure(figure: Any, file: Path, dpi: int | None = None) -> None:
    """Write a figure atomically, in the format given by the file's suffix."""
    data = io.BytesIO()
    figure.savefig(data, format=file.suffix.removeprefix(".").lower() or "png", dpi=dpi or "figure")
    write_atomically(file, data.getvalue())


# --- Drawing --------------------------------------------------------------------------------------------------------


@contextmanager
def _style(ink: str = INK) -> Iterator[None]:
    """Set fonts and colours without changing matplotlib's global state."""
    import matplotlib as mpl

    style: dict[Any, Any] = {
        "font.size": 9,
        "axes.titlesize": 9.5,
        "axes.titlelocation": "left",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "legend.frameon": False,
        "legend.fontsize": 8.5,
        # A dollar sign in the name of a variant must not start a formula.
        "text.parse_math": False,
        **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), ink),
    }
    with mpl.rc_context(style):
        yield


def panel_figure(panel: Panel) -> Any:
    """Draw the axes of one panel, without title and legend. No display is required."""
    from matplotlib.figure import Figure

    with _style():
        figure = Figure(figsize=(WIDTH, HEIGHT * panel.tall))
        _draw_panel(figure, panel, 0, figure.get_figheight())
    return figure


def _draw_panel(figure: Any, panel: Panel, left: float, top: float, title: bool = False) -> None:
    """Draw a panel with its upper left corner at `left`, `top`, in inches from the lower left corner of the figure.

    Margins are fixed and have room for the ticks and labels of every plot, because matplotlib's layout engines fail if
    space is tight.
    """
    above = _PANEL_TITLE if title else 0.08
    height = HEIGHT * panel.tall - _BELOW - above
    ax = figure.add_axes(_share(figure, left + panel.left, top - above - height, WIDTH - panel.left - _RIGHT, height))
    ax.grid(axis="y", color=INK, alpha=0.15, linewidth=0.6)
    ax.set_axisbelow(True)
    if title:
        ax.set_title(_wrapped(panel.title, 1), x=-panel.left / (WIDTH - panel.left - _RIGHT) + 0.02)
    panel.draw(ax)


def _share(figure: Any, left: float, bottom: float, width: float, height: float) -> tuple[float, ...]:
    """Convert inches to fractions of the figure."""
    across, up = figure.get_size_inches()
    return left / across, bottom / up, width / across, height / up


def figure_of(found: Sequence[Picture], heading: str = "") -> Any:
    """Draw plots below each other, or side by side if they are narrow, each with its title and legends.

    `heading` says above them what was measured.
    """
    from matplotlib.figure import Figure

    rows = list(_packed(found))
    across = max(map(_across, rows))
    heights = [max(map(_height, row)) for row in rows]
    heading = _wrapped(heading, across, _HEADING_CHARACTERS)
    above = _LINE * (heading.count("\n") + 1) + 0.15 if heading else 0.0
    top = sum(heights)
    with _style():
        figure = Figure(figsize=(WIDTH * across, top + above))
        _text(figure, 0.12, top + above - 0.1, heading, fontsize=8.5)
        for row, height in zip(rows, heights, strict=True):
            left = 0.0
            for picture in row:
                _draw_picture(figure, picture, left, top)
                left += WIDTH * picture.width
            top -= height
    return figure


def _packed(found: Sequence[Picture]) -> Iterator[list[Picture]]:
    row: list[Picture] = []
    for picture in found:
        if row and _across([*row, picture]) > _MOST_ACROSS:
            yield row
            row = []
        row.append(picture)
    if row:
        yield row


def _across(row: Sequence[Picture]) -> int:
    """Return the number of panels side by side."""
    return sum(picture.width for picture in row)


def _panel_rows(picture: Picture) -> list[Sequence[Panel]]:
    return _in_rows(picture.panels, picture.width)


def _in_rows(items: Sequence[T], across: int) -> list[Sequence[T]]:
    return [items[begin : begin + across] for begin in range(0, len(items), across)]


def _wrapped(text: str, width: int, characters: int = 78) -> str:
    # `80 %` stays on one line.
    return textwrap.fill(text.replace(" %", "\N{NO-BREAK SPACE}%"), characters * width)


def _texts_height(picture: Picture) -> float:
    remark = _wrapped(picture.remark, picture.width)
    return _TITLE + _LINE * (remark.count("\n") + bool(remark)) + _LEGEND_LINE * len(_key_rows(picture))


def _key_rows(picture: Picture) -> list[Sequence[Key]]:
    """Split the common legend into rows that fit the width of the plot."""
    longest = max((len(key.text) for key in picture.keys), default=1)
    return _in_rows(picture.keys, max(1, (78 * picture.width) // (8 + longest)))


def _below(panel: Panel) -> list[Key]:
    """Return the legend below a panel, with texts that are not wider than the panel."""
    return [replace(key, text=_wrapped(key.text, 1, _LEGEND_CHARACTERS)) for key in panel.keys]


def _row_height(row: Sequence[Panel]) -> float:
    legend = _LEGEND_LINE * max(sum(key.text.count("\n") + 1 for key in _below(panel)) for panel in row)
    return HEIGHT * max(panel.tall for panel in row) + legend + 0.15


def _height(picture: Picture) -> float:
    return _texts_height(picture) + sum(map(_row_height, _panel_rows(picture))) + 0.1


def _draw_picture(figure: Any, picture: Picture, left: float, top: float) -> None:
    """Draw a plot with its upper left corner at `left`, `top`, in inches."""
    place = partial(_text, figure, left + 0.12)
    place(top - 0.08, picture.title, fontsize=11.5, fontweight="bold")
    remark = _wrapped(picture.remark, picture.width)
    place(top - _TITLE, remark, fontsize=7.5, alpha=0.8)
    under = top - _TITLE - _LINE * (remark.count("\n") + bool(remark))
    for keys in _key_rows(picture):
        _legend(figure, keys, left + 0.12, under, len(keys))
        under -= _LEGEND_LINE
    under = top - _texts_height(picture)
    titled = any(panel.title for panel in picture.panels)
    for row in _panel_rows(picture):
        for j, panel in enumerate(row):
            begin = left + j * WIDTH
            _draw_panel(figure, panel, begin, under, title=titled)
            if panel.keys:
                _legend(figure, _below(panel), begin + 0.3, under - HEIGHT * panel.tall - 0.02, 1)
        under -= _row_height(row)


def _text(figure: Any, left: float, top: float, text: str, **style: Any) -> None:
    x, y, *_ = _share(figure, left, top, 0, 0)
    figure.text(x, y, text, va="top", **style)


def _legend(figure: Any, keys: Sequence[Key], left: float, top: float, columns: int) -> None:
    figure.legend(
        handles=list(map(_handle, keys)),
        loc="upper left",
        bbox_to_anchor=_share(figure, left, top, 0, 0)[:2],
        ncols=columns,
        borderaxespad=0,
        borderpad=0,
        columnspacing=1.2,
        labelspacing=0.3,
    )


def _handle(key: Key) -> Any:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    # matplotlib hides legend entries whose names start with an underscore.
    label = key.text
    if label.startswith("_"):
        label = f" {label}"
    if key.shape == "line":
        return Line2D([], [], color=key.colour, linestyle=key.dash, marker=key.marker, markersize=5, label=label)
    if key.shape == "thin":
        return Line2D([], [], color=key.colour, linewidth=0.7, label=label)
    if key.shape == "ring":
        return Line2D([], [], **RING, color=key.colour, label=label)
    opacity = 1 if key.shape == "bar" else 0.18
    return Patch(color=key.colour, alpha=opacity, linewidth=0, label=label)

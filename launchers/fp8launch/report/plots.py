"""Pictures of a comparison, by matplotlib, which is an extra: `pip install 'fp8launch[plots]'`.

Axes start at zero, or say that they do not.
"""

from __future__ import annotations

import importlib.util
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from fp8launch.diagnostics import MACHINE_LACKS, error
from fp8launch.report.columns import shows_speedup
from fp8launch.report.comparison import Comparison
from fp8launch.report.entry import Entry
from fp8launch.report.pieces import pieces
from fp8launch.report.plot_bars import LOSS, MEMORY, MOST_BARS, STEP_TIME, THROUGHPUT, bar_picture
from fp8launch.report.plot_curves import step_time_pictures
from fp8launch.report.plot_encoding import encode
from fp8launch.report.plot_lines import scaling_pictures, sequence_pictures
from fp8launch.report.plot_losses import loss_pictures, parity_pictures
from fp8launch.report.plot_style import HEIGHT, INK, WIDTH, Key, Panel, Picture
from fp8launch.report.plot_sweep import swept_loss_pictures

# Inches.
_LEGEND_LINE = 0.19
_LINE = 0.15
_TITLE = 0.36
_PANEL_TITLE = 0.26
_BELOW = 0.5
_RIGHT = 0.2
_MOST_ACROSS = 3
DPI = 150
FORMATS = (".png", ".svg", ".pdf")


def available() -> bool:
    """Whether matplotlib is there."""
    return importlib.util.find_spec("matplotlib") is not None


def pictures(comparison: Comparison) -> list[Picture]:
    """Return the pictures that these runs have data for. The remark of a picture names the rows that it leaves out.

    Where rows differ in how they learn, the losses come first.
    """
    every: Sequence[Entry] = comparison.entries
    entries = comparison.good
    if not shows_speedup(every):
        entries = [replace(entry, speedup=None) for entry in entries]
    encoding = encode(every)
    learning = loss_pictures(every, encoding) + parity_pictures(every, comparison.parities, encoding)
    lines = sequence_pictures(entries, encoding, memory=len(entries) > MOST_BARS)
    speed: list[Picture] = []
    if not (lines and len(entries) > MOST_BARS):
        speed += bar_picture(entries, encoding, THROUGHPUT)
        if any(entry.step_time and not entry.tokens for entry in entries):
            speed += bar_picture(entries, encoding, STEP_TIME)
    speed += [*lines, *scaling_pictures(entries, encoding), *step_time_pictures(every, encoding)]
    memory = []
    if not any(picture.name == "sequence_memory" for picture in lines):
        memory = bar_picture(entries, encoding, MEMORY)
    if comparison.about_loss:
        ends = swept_loss_pictures(entries) or bar_picture(entries, encoding, LOSS)
        return [*ends, *learning, *speed, *memory]
    return [*speed, *learning, *memory]


def require_drawable(file: Path | None, option: str) -> None:
    """Raise UserError without matplotlib, or for a file whose suffix is none of FORMATS."""
    if not available():
        fix = "pip install 'fp8launch[plots]'"
        raise error("no-matplotlib", "pictures need matplotlib", option, fix, MACHINE_LACKS)
    if file is not None and file.suffix.lower() not in FORMATS:
        raise error("bad-ending", f"cannot draw '{file.suffix}'", option, f"end it in {', '.join(FORMATS)}")


def write_plots(comparison: Comparison, target: Path) -> list[Path]:
    """Write all pictures into one file, or one file each where `target` is a folder or has no suffix.

    Raises UserError without matplotlib, for a suffix that is none of FORMATS, or with nothing to draw.
    """
    single = bool(target.suffix) and not target.is_dir()
    if single:
        require_drawable(target, "--plot")
    else:
        require_drawable(None, "--plot")
    found = pictures(comparison)
    if not found:
        raise error("nothing-to-plot", "no run has a number to draw", "--plot")
    if single:
        figure_of(found).savefig(target, dpi=DPI)
        return [target]
    target.mkdir(parents=True, exist_ok=True)
    files = []
    for picture in found:
        file = target / f"{picture.name}.png"
        figure_of([picture]).savefig(file, dpi=DPI)
        files.append(file)
    return files


# --- Drawing --------------------------------------------------------------------------------------------------------


@contextmanager
def _style(ink: str = INK) -> Iterator[None]:
    """Set fonts and colours, and leave matplotlib's global state alone."""
    import matplotlib as mpl

    style: dict[Any, Any] = {
        "font.size": 9,
        "axes.titlesize": 9.5,
        "axes.titlelocation": "left",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "legend.frameon": False,
        "legend.fontsize": 8.5,
        # Names of variants are texts, not formulas.
        "text.parse_math": False,
        **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), ink),
    }
    with mpl.rc_context(style):
        yield


def panel_figure(panel: Panel) -> Any:
    """Draw the axes of one panel, without title and legend. Needs no display."""
    from matplotlib.figure import Figure

    with _style():
        figure = Figure(figsize=(WIDTH, HEIGHT * panel.tall))
        _draw_panel(figure, panel, 0, figure.get_figheight())
    return figure


def _draw_panel(figure: Any, panel: Panel, left: float, top: float, title: bool = False) -> None:
    """Draw a panel with its upper left corner at `left`, `top` in inches from the lower left corner of the figure.

    Margins are fixed and hold the ticks and labels of every picture: matplotlib's own layouts fail where room is short.
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
    """Inches as shares of the figure."""
    across, up = figure.get_size_inches()
    return left / across, bottom / up, width / across, height / up


def figure_of(found: Sequence[Picture]) -> Any:
    """Draw pictures below each other, narrow ones side by side, each with its title and legends."""
    from matplotlib.figure import Figure

    rows = list(_packed(found))
    across = max(map(_across, rows))
    heights = [max(map(_height, row)) for row in rows]
    top = sum(heights)
    with _style():
        figure = Figure(figsize=(WIDTH * across, top))
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
    """The number of panels side by side."""
    return sum(picture.width for picture in row)


def _panel_rows(picture: Picture) -> Iterator[Sequence[Panel]]:
    return pieces(picture.panels, picture.width)


def _wrapped(text: str, width: int) -> str:
    return textwrap.fill(text, 78 * width)


def _texts_height(picture: Picture) -> float:
    remark = _wrapped(picture.remark, picture.width)
    return _TITLE + _LINE * (remark.count("\n") + bool(remark)) + _LEGEND_LINE * len(_key_rows(picture))


def _key_rows(picture: Picture) -> list[Sequence[Key]]:
    """The common legend in rows that fit the width."""
    longest = max((len(key.text) for key in picture.keys), default=1)
    return list(pieces(picture.keys, max(1, (78 * picture.width) // (8 + longest))))


def _row_height(row: Sequence[Panel]) -> float:
    legend = _LEGEND_LINE * max(len(panel.keys) for panel in row)
    return HEIGHT * max(panel.tall for panel in row) + legend + 0.15


def _height(picture: Picture) -> float:
    return _texts_height(picture) + sum(map(_row_height, _panel_rows(picture))) + 0.1


def _draw_picture(figure: Any, picture: Picture, left: float, top: float) -> None:
    """Draw a picture with its upper left corner at `left`, `top` in inches."""
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
                _legend(figure, panel.keys, begin + 0.3, under - HEIGHT * panel.tall - 0.02, 1)
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

    # matplotlib hides entries whose name begins with an underscore.
    label = key.text
    if label.startswith("_"):
        label = f" {label}"
    if key.shape == "line":
        return Line2D([], [], color=key.colour, linestyle=key.dash, marker=key.marker, markersize=5, label=label)
    opacity = 1 if key.shape == "bar" else 0.18
    return Patch(color=key.colour, alpha=opacity, linewidth=0, label=label)

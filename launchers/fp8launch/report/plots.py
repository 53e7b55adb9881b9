"""Pictures of a comparison, by matplotlib, which is an extra: `pip install 'fp8launch[plots]'`.

Axes start at zero, or say that they do not.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fp8launch.problems import MACHINE_LACKS, error
from fp8launch.report.comparison import Comparison
from fp8launch.report.parity import losses
from fp8launch.report.plot_curves import loss_curves, loss_difference, over_iterations
from fp8launch.report.plot_rows import bars, efficiency, over_sequence, scaling
from fp8launch.report.plot_style import INK, Picture, colours_of, representative

SIZE = (5.4, 3.5)
FORMATS = (".png", ".svg", ".pdf")


def available() -> bool:
    """Whether matplotlib is there."""
    return importlib.util.find_spec("matplotlib") is not None


def pictures(comparison: Comparison) -> list[Picture]:
    """Those pictures that these runs have something to show in."""
    entries = [entry for entry in comparison.entries if entry.row.good]
    colours = colours_of(comparison)
    shown = representative(comparison.entries)
    runs = [(entry, run) for entry in shown for run in [r for r in entry.row.runs if r.kept][:1]]
    found = []
    tall = max(1.0, (len(entries) + 3) / 11)
    legend = 1 + 0.05 * max(0, len(shown) - 2)
    if entries:
        found.append(Picture("throughput", "Throughput", lambda ax: bars(ax, entries, colours, "tokens"), tall))
    if any(e.tflops for e in entries):
        found.append(Picture("tflops", "Model TFLOP/s and MFU", lambda ax: bars(ax, entries, colours, "tflops"), tall))
    if any(e.efficiency and e.efficiency.ratio.value for e in entries):
        found.append(Picture("scaling", "Scaling", lambda ax: scaling(ax, entries, colours)))
        found.append(Picture("efficiency", "Scaling efficiency", lambda ax: efficiency(ax, entries, colours)))
    if len({e.row.facts.get("seq_length") for e in entries}) > 1:
        found += over_sequence(entries, colours)
    if runs:
        for name, title, what in (("step_time", "Step time", "step"), ("speed", "Throughput", "speed")):
            draw = partial(over_iterations, runs=runs, colours=colours, what=what)
            found.append(Picture(name, f"{title} over iterations", draw, legend))
    curves = [(e, r) for e in shown for r in e.row.runs[:1] if sum(v == v for v in losses(r).values()) > 1]
    if curves:
        found.append(Picture("loss", "Loss", partial(loss_curves, curves=curves, colours=colours), legend))
    if any(len(p.difference) > 1 for p in comparison.parities):
        draw = partial(loss_difference, comparison=comparison, colours=colours)
        found.append(Picture("parity", "Loss relative to the baseline", draw, legend))
    return found


def write_plots(comparison: Comparison, target: Path) -> list[Path]:
    """All pictures in one file, or one file each where `target` is a folder or has no ending.

    Raises UserError without matplotlib, for an ending that is none of FORMATS, or with nothing to draw.
    """
    if not available():
        raise error(
            "no-matplotlib", "pictures need matplotlib", "--plot", "pip install 'fp8launch[plots]'", MACHINE_LACKS
        )
    if target.suffix and target.suffix.lower() not in FORMATS and not target.is_dir():
        raise error("bad-ending", f"cannot draw '{target.suffix}'", "--plot", f"end it in {', '.join(FORMATS)}")
    found = pictures(comparison)
    if not found:
        raise error("nothing-to-plot", "no run has a number to draw", "--plot")
    if target.suffix and not target.is_dir():
        _save(found, target)
        return [target]
    target.mkdir(parents=True, exist_ok=True)
    files = [target / f"{picture.name}.png" for picture in found]
    for picture, file in zip(found, files, strict=True):
        _save([picture], file)
    return files


def _save(found: Sequence[Picture], file: Path) -> None:
    figure = figure_of(found)
    figure.savefig(file, dpi=150)


def figure_of(found: Sequence[Picture], ink: str = INK, size: tuple[float, float] = SIZE) -> Any:
    """A figure of pictures in up to two columns. Needs no display and leaves matplotlib's global state alone."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    columns = 1 if len(found) == 1 else 2
    rows = -(-len(found) // columns)
    style: dict[Any, Any] = {
        "font.size": 9,
        "axes.titlesize": 10.5,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "legend.frameon": False,
        "legend.fontsize": 8,
        **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), ink),
    }
    with mpl.rc_context(style):
        heights = [max(p.tall for p in found[r * columns : (r + 1) * columns]) for r in range(rows)]
        figure = Figure(figsize=(size[0] * columns, size[1] * sum(heights)), layout="constrained")
        grid = figure.add_gridspec(rows, columns, height_ratios=heights)
        for i, picture in enumerate(found):
            ax = figure.add_subplot(grid[i // columns, i % columns])
            ax.grid(axis="y", color=ink, alpha=0.15, linewidth=0.6)
            ax.set_axisbelow(True)
            ax.set_title(picture.title)
            picture.draw(ax)
        figure.draw_without_rendering()
    return figure

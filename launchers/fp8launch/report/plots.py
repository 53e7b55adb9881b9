"""Pictures of a comparison, by matplotlib, which is an extra: `pip install 'fp8launch[plots]'`.

Axes start at zero, or say that they do not.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fp8launch.diagnostics import MACHINE_LACKS, error
from fp8launch.report.columns import Entry
from fp8launch.report.comparison import Comparison
from fp8launch.report.plot_curves import finite_losses, loss_curves, loss_difference, over_iterations, trace_of
from fp8launch.report.plot_rows import STEP_TIME, TFLOPS, THROUGHPUT, draw_bars, scaling_pictures, sequence_pictures
from fp8launch.report.plot_style import INK, Picture, colours_of, left_out, paged, pages
from fp8launch.report.run_data import RunData

SIZE = (5.4, 3.5)
DPI = 150
FORMATS = (".png", ".svg", ".pdf")


def available() -> bool:
    """Whether matplotlib is there."""
    return importlib.util.find_spec("matplotlib") is not None


def pictures(comparison: Comparison) -> list[Picture]:
    """Return the pictures that these runs have something to show in. What one leaves out, its remark names."""
    entries = [entry for entry in comparison.entries if entry.row.good]
    colours = colours_of(comparison)
    return [
        *_bars(entries, colours),
        *scaling_pictures(entries, colours),
        *sequence_pictures(entries, colours),
        *_over_iterations(comparison, colours),
        *_losses(comparison, colours),
        *_parities(comparison, colours),
    ]


def _bars(entries: Sequence[Entry], colours: dict[str, str]) -> list[Picture]:
    """Bars of one unit each: step times too where a log does not determine tokens/s."""
    tall = max(1.0, (len(entries) + 3) / 11)
    wanted = [
        (THROUGHPUT, any(entry.tokens for entry in entries)),
        (STEP_TIME, any(entry.step_time and not entry.tokens for entry in entries)),
        (TFLOPS, any(entry.tflops for entry in entries)),
    ]
    found = []
    for bars, known in wanted:
        if known:
            draw = partial(draw_bars, entries=entries, colours=colours, bars=bars)
            found.append(Picture(bars.name, bars.title, draw, tall))
    return found


def _over_iterations(comparison: Comparison, colours: dict[str, str]) -> list[Picture]:
    rows, remark = pages(comparison.entries)
    pairs = [[(entry, run) for entry in page for run in _first([r for r in entry.row.runs if r.kept])] for page in rows]
    found = []
    for name, title, unit in (("step_time", "Step time", "ms"), ("speed", "Throughput", "tokens/s/GPU")):
        draws, missing = [], []
        for page in pairs:
            traces = [trace for entry, run in page if (trace := trace_of(entry, run, unit))]
            drawn = {id(trace.run) for trace in traces}
            missing += [entry.row.name for entry, run in page if id(run) not in drawn]
            if traces:
                draws.append(partial(over_iterations, traces=traces, colours=colours, unit=unit))
        remarks = "; ".join(filter(None, (remark, left_out(missing, f"{unit} not known"))))
        found += paged(name, f"{title} over iterations", draws, _height(rows), remarks)
    return found


def _losses(comparison: Comparison, colours: dict[str, str]) -> list[Picture]:
    rows, remark = pages(comparison.entries)
    draws, missing = [], []
    for page in rows:
        curves = []
        for entry in page:
            curves += [(entry, run) for run in _first(entry.row.runs) if len(finite_losses(run)) > 1]
        shown = {id(entry) for entry, _ in curves}
        missing += [entry.row.name for entry in page if id(entry) not in shown]
        if curves:
            draws.append(partial(loss_curves, curves=curves, colours=colours))
    remarks = "; ".join(filter(None, (remark, left_out(missing, "no loss logged"))))
    return paged("loss", "Loss", draws, _height(rows), remarks)


def _parities(comparison: Comparison, colours: dict[str, str]) -> list[Picture]:
    drawable = {parity.variant: parity for parity in comparison.parities if len(parity.difference) > 1}
    rows, remark = pages(comparison.entries)
    draws = []
    for page in rows:
        curves = [(entry, drawable[entry.row.name]) for entry in page if entry.row.name in drawable]
        if curves:
            draws.append(partial(loss_difference, curves=curves, colours=colours))
    missing = [parity.variant for parity in comparison.parities if parity.variant not in drawable]
    remarks = "; ".join(filter(None, (remark, left_out(missing, "too few common iterations"))))
    return paged("parity", "Loss relative to the baseline", draws, _height(rows), remarks)


def _first(runs: Sequence[RunData]) -> Sequence[RunData]:
    return runs[:1]


def _height(rows: Sequence[Sequence[Entry]]) -> float:
    """The legend takes a line for each row."""
    longest = max(map(len, rows), default=0)
    return 1 + 0.05 * max(0, longest - 2)


def write_plots(comparison: Comparison, target: Path) -> list[Path]:
    """Write all pictures into one file, or one file each where `target` is a folder or has no suffix.

    Raises UserError without matplotlib, for a suffix that is none of FORMATS, or with nothing to draw.
    """
    if not available():
        raise error(
            "no-matplotlib", "pictures need matplotlib", "--plot", "pip install 'fp8launch[plots]'", MACHINE_LACKS
        )
    single = bool(target.suffix) and not target.is_dir()
    if single and target.suffix.lower() not in FORMATS:
        raise error("bad-ending", f"cannot draw '{target.suffix}'", "--plot", f"end it in {', '.join(FORMATS)}")
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


def figure_of(found: Sequence[Picture], ink: str = INK, size: tuple[float, float] = SIZE) -> Any:
    """Draw pictures in up to two columns. Needs no display and leaves matplotlib's global state alone."""
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
        # Names of variants are texts, not formulas.
        "text.parse_math": False,
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
            ax.set_title(picture.title, pad=18 if picture.remark else None)
            picture.draw(ax)
            if picture.remark:
                where: dict[str, Any] = {"xycoords": "axes fraction", "textcoords": "offset points"}
                ax.annotate(picture.remark, (0, 1), (0, 6), fontsize=7.5, alpha=0.8, annotation_clip=False, **where)
        figure.draw_without_rendering()
    return figure

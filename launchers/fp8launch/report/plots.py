"""Pictures of a comparison, by matplotlib, which is an extra: `pip install 'fp8launch[plots]'`.

Axes start at zero, or say that they do not. One colour for a variant in all pictures, from a palette that colour-blind
readers tell apart and that stands out on white and on black.
"""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8launch.problems import MACHINE_LACKS, error
from fp8launch.report.compare import Comparison, Entry
from fp8launch.report.measured import Measured
from fp8launch.report.parity import losses, smooth

# Okabe and Ito's palette without yellow and black; sky blue stands in for what a dark page would swallow.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#8C7AE6", "#7F8C8D")
INK = "#303338"
SIZE = (5.4, 3.5)
# A picture of more lines is a carpet; more points than pixels show nothing more.
MOST_LINES = 8
_BELOW_AXIS = 33  # points that tick labels and the axis label take
MOST_POINTS = 1500
FORMATS = (".png", ".svg", ".pdf")


@dataclass(frozen=True)
class Picture:
    """`draw` fills axes, not before it is asked to; `tall` is the height in usual heights."""

    name: str
    title: str
    draw: Callable[[Any], None]
    tall: float = 1.0


def available() -> bool:
    """Whether matplotlib is there."""
    return importlib.util.find_spec("matplotlib") is not None


def pictures(comparison: Comparison) -> list[Picture]:
    """Those pictures that these runs have something to show in."""
    entries = [entry for entry in comparison.entries if entry.row.good]
    colours = _colours(comparison)
    shown = _representative(comparison.entries)
    runs = [(entry, run) for entry in shown for run in [r for r in entry.row.runs if r.kept][:1]]
    found = []
    tall = max(1.0, (len(entries) + 3) / 11)
    legend = 1 + 0.05 * max(0, len(shown) - 2)
    if entries:
        found.append(Picture("throughput", "Throughput", lambda ax: _bars(ax, entries, colours, "tokens"), tall))
    if any(e.tflops for e in entries):
        found.append(Picture("tflops", "Model TFLOP/s and MFU", lambda ax: _bars(ax, entries, colours, "tflops"), tall))
    if any(e.efficiency and e.efficiency.ratio.value for e in entries):
        found.append(Picture("scaling", "Scaling", lambda ax: _scaling(ax, entries, colours)))
        found.append(Picture("efficiency", "Scaling efficiency", lambda ax: _efficiency(ax, entries, colours)))
    if len({e.row.facts.get("seq_length") for e in entries}) > 1:
        found += _over_sequence(entries, colours)
    if runs:
        found.append(
            Picture("step_time", "Step time over iterations", lambda ax: _iterations(ax, runs, colours, "step"), legend)
        )
        found.append(
            Picture("speed", "Throughput over iterations", lambda ax: _iterations(ax, runs, colours, "speed"), legend)
        )
    curves = [(e, r) for e in shown for r in e.row.runs[:1] if sum(v == v for v in losses(r).values()) > 1]
    if curves:
        found.append(Picture("loss", "Loss", lambda ax: _losses(ax, curves, colours), legend))
    if any(len(p.difference) > 1 for p in comparison.parities):
        found.append(
            Picture("parity", "Loss relative to the baseline", lambda ax: _parity(ax, comparison, colours), legend)
        )
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


def _colours(comparison: Comparison) -> dict[str, str]:
    labels = dict.fromkeys(entry.row.label for entry in comparison.entries)
    return {label: COLOURS[i % len(COLOURS)] for i, label in enumerate(labels)}


def _name(entry: Entry, others: Sequence[Entry]) -> str:
    """The variant, with its size only where sizes differ."""
    text = entry.row.name if len({other.row.world for other in others}) > 1 else entry.row.label
    return text if len(text) <= 44 else f"{text[:30]}…{text[-13:]}"


def _representative(entries: Sequence[Entry]) -> list[Entry]:
    """All rows, or, where that is too many lines for a picture, each variant at its smallest size."""
    if len(entries) > MOST_LINES:
        entries = [same[0] for _, same in _by_variant(entries)]
    return list(entries[:MOST_LINES])


def _dash(entry: Entry, others: Sequence[Entry]) -> str:
    """Solid for the smallest size of a variant, then dashed: the colour says which variant it is."""
    sizes = sorted({e.row.world or 0 for e in others if e.row.label == entry.row.label})
    return ("-", "--", "-.", ":")[sizes.index(entry.row.world or 0) % 4]


def _legend_below(ax: Any) -> None:
    """Where no curve can run through it."""
    from matplotlib.transforms import ScaledTranslation

    labels = ax.get_legend_handles_labels()[1]
    if labels:
        # Below the axis' own words, however tall the axes become.
        below = ax.transAxes + ScaledTranslation(0, -_BELOW_AXIS / 72, ax.figure.dpi_scale_trans)
        # Two columns of long names would be wider than the picture.
        columns = 2 if max(map(len, labels)) <= 20 and len(labels) > 1 else 1
        where: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (0, 0), "bbox_transform": below}
        ax.legend(**where, ncols=columns, columnspacing=1, borderaxespad=0)


def _bars(ax: Any, entries: Sequence[Entry], colours: dict[str, str], what: str) -> None:
    """A bar for each row from zero, its runs as dots, the published figure as a line across it."""
    highest = 0.0
    for i, entry in enumerate(entries):
        measure = entry.tokens or entry.step_time if what == "tokens" else entry.tflops
        if measure is None:
            continue
        colour = colours[entry.row.label]
        ax.barh(i, measure.median, color=colour, height=0.62)
        if len(measure.runs) > 1:
            ax.plot(measure.runs, [i] * len(measure.runs), "o", color="white", markeredgecolor=INK, markersize=3)
        published = entry.published
        if published:
            figure = published.tokens_per_s_per_gpu if what == "tokens" else published.tflops_per_gpu
            if figure:
                ax.plot([figure] * 2, [i - 0.4, i + 0.4], color=INK, linewidth=1.6, linestyle=":")
                if not highest:
                    ax.annotate("published", (figure, i - 0.45), fontsize=7, ha="center", va="bottom")
                highest = max(highest, figure)
        highest = max(highest, *measure.runs)
        ax.annotate(
            _bar_text(entry, measure.median, what), (max(measure.runs), i), xytext=(4, 0), textcoords="offset points",
            va="center", fontsize=8,
        )  # fmt: skip
    names = [_name(entry, entries) for entry in entries]
    ax.set_yticks(range(len(entries)), [_wrapped(name) if len(entries) <= MOST_LINES else name for name in names])
    ax.set_ylim(len(entries) - 0.4, -0.9)
    # Room for the text at the end of the longest bar.
    ax.set_xlim(0, highest * 1.5)
    ax.set_xlabel("tokens/s/GPU" if what == "tokens" else "model TFLOP/s/GPU; in brackets MFU and its peak")
    ax.grid(axis="x", color=INK, alpha=0.15, linewidth=0.6)
    ax.grid(visible=False, axis="y")
    ax.xaxis.set_major_locator(_few_ticks())
    ax.xaxis.set_major_formatter(_thousands())


def _bar_text(entry: Entry, value: float, what: str) -> str:
    if what == "tflops":
        mfu = f" ({100 * entry.mfu.median:.0f} % of {entry.peak_tflops:g})" if entry.mfu else ""
        return f"{value:,.4g}{mfu}"
    speedup = entry.speedup
    gain = f"  {speedup.value:.2f}×" if speedup and speedup.value and speedup.against != entry.row.name else ""
    mark = ""
    if gain and speedup:
        mark = "!" if not speedup.verdict.comparable else "*" if speedup.verdict.noted else ""
    return f"{value:,.0f}{gain}{mark}"


def _scaling(ax: Any, entries: Sequence[Entry], colours: dict[str, str]) -> None:
    for label, same in _by_variant(entries):
        points = [(e.row.world, e.tokens_total) for e in same if e.row.world and e.tokens_total]
        if not points:
            continue
        worlds, totals = zip(*points, strict=True)
        ax.plot(worlds, totals, "o-", color=colours[label], label=label)
        ideal = [totals[0] * w / worlds[0] for w in worlds]
        ax.plot(worlds, ideal, color=colours[label], linewidth=0.8, linestyle=":")
    ax.plot([], [], color=INK, linewidth=0.8, linestyle=":", label="ideal")
    _gpu_axis(ax, entries)
    ax.set_yscale("log")
    ax.set_ylabel("tokens/s in all (log scale)")
    _plain_log_ticks(ax.yaxis)
    ax.legend()


def _efficiency(ax: Any, entries: Sequence[Entry], colours: dict[str, str]) -> None:
    modes = set()
    highest = 100.0
    for label, same in _by_variant(entries):
        points = [
            (e.row.world, 100 * e.efficiency.ratio.value)
            for e in same
            if e.row.world and e.efficiency and e.efficiency.ratio.value
        ]
        modes |= {e.efficiency.mode for e in same if e.efficiency}
        if points:
            ax.plot(*zip(*points, strict=True), "o-", color=colours[label], label=label)
            highest = max(highest, *(value for _, value in points))
    ax.axhline(100, color=INK, linewidth=0.8, linestyle=":")
    _gpu_axis(ax, entries)
    ax.set_ylim(0, highest * 1.1)
    ax.set_ylabel(f"speed per GPU, % of the fewest GPUs\n({', '.join(sorted(modes))} scaling)")
    ax.legend(loc="lower left")


def _gpu_axis(ax: Any, entries: Sequence[Entry]) -> None:
    worlds = sorted({entry.row.world for entry in entries if entry.row.world})
    ax.set_xscale("log", base=2)
    ax.set_xticks(worlds, [str(w) for w in worlds])
    ax.minorticks_off()
    ax.set_xlabel("GPUs (log scale)")


def _over_sequence(entries: Sequence[Entry], colours: dict[str, str]) -> list[Picture]:
    quantities: list[tuple[str, str, Callable[[Entry], float | None]]] = [
        ("Step time", "ms", lambda e: e.step_time.median if e.step_time else None),
        ("Tokens per second", "tokens/s/GPU", lambda e: e.tokens.median if e.tokens else None),
        ("TFLOP/s", "model TFLOP/s/GPU", lambda e: e.tflops.median if e.tflops else None),
        ("MFU", "% of each data type's own peak", lambda e: 100 * e.mfu.median if e.mfu else None),
    ]

    def draw(ax: Any, unit: str, value: Callable[[Entry], float | None]) -> None:
        lengths: set[int] = set()
        for (label, world), points in _sequences(entries, value).items():
            suffix = "" if len({e.row.world for e in entries}) == 1 else f", {world} GPUs"
            colour = colours[points[0][2].row.label]
            ax.plot([p[0] for p in points], [p[1] for p in points], "o-", color=colour, label=label + suffix)
            lengths |= {p[0] for p in points}
        ax.set_xscale("log", base=2)
        ax.set_xticks(sorted(lengths), [f"{n:,}" for n in sorted(lengths)])
        ax.minorticks_off()
        ax.set_ylim(0, 1.08 * max(p[1] for points in _sequences(entries, value).values() for p in points))
        ax.set_xlabel("sequence length (tokens, log scale)")
        ax.set_ylabel(unit)
        ax.yaxis.set_major_formatter(_thousands())
        _legend_below(ax)

    def picture(title: str, unit: str, value: Callable[[Entry], float | None]) -> Picture:
        name = f"sequence_{title.split()[0].lower().replace('/', '_')}"
        return Picture(name, f"{title} over sequence length", lambda ax: draw(ax, unit, value))

    return [
        picture(title, unit, value) for title, unit, value in quantities if any(value(e) is not None for e in entries)
    ]


def _sequences(
    entries: Sequence[Entry], value: Callable[[Entry], float | None]
) -> dict[tuple[str, int | None], list[tuple[int, float, Entry]]]:
    """Lines of what differs in nothing but the sequence, named by precision or by the rest of the label."""
    lines: dict[tuple[str, int | None], list[tuple[int, float, Entry]]] = {}
    for entry in entries:
        length, number = entry.row.facts.get("seq_length"), value(entry)
        if isinstance(length, int) and number is not None:
            parts = [p for p in entry.row.label.split(", ") if p != f"seq {length}"]
            name = ", ".join(parts) or str(entry.row.facts.get("precision", ""))
            lines.setdefault((name, entry.row.world), []).append((length, number, entry))
    return {key: sorted(points, key=lambda p: p[0]) for key, points in lines.items()}


def _iterations(ax: Any, runs: Sequence[tuple[Entry, Measured]], colours: dict[str, str], what: str) -> None:
    """Every iteration line; those that do not count are pale, those beyond the frame are counted at its edge."""
    top = 0.0
    beyond = 0
    drawn = []
    for entry, run in runs:
        kept = {line.number for line in run.kept}
        lines = [line for line in run.selection.lines if line.step_time_ms > 0]
        tokens = _tokens_per_step(run)
        if what == "speed" and tokens is None:
            continue
        values = [x.step_time_ms if what == "step" else (tokens or 0) / (x.step_time_ms / 1e3) for x in lines]
        steady = [v for x, v in zip(lines, values, strict=True) if x.number in kept]
        if steady:
            top = max(
                top,
                1.35 * statistics.median(steady),
                1.02 * max(_thinned(sorted(steady)[: -(-len(steady) * 99 // 100)])),
            )
            drawn.append((entry, [x.number for x in lines], values, kept))
    for entry, numbers, values, kept in drawn:
        colour = colours[entry.row.label]
        points = list(zip(numbers, values, strict=True))
        good = _thinned([p for p in points if p[0] in kept])
        ax.plot(*zip(*good, strict=True), color=colour, linewidth=1.2, marker="." if len(good) < 60 else "",
                label=_name(entry, [e for e, *_ in drawn]), linestyle=_dash(entry, [e for e, *_ in drawn]))  # fmt: skip
        rest = [p for p in points if p[0] not in kept and p[1] <= top]
        if rest:
            ax.plot(*zip(*_thinned(rest), strict=True), "x", color=colour, alpha=0.45, markersize=5)
        over = [p for p in points if p[1] > top]
        beyond += len(over)
        if over:
            ax.plot([p[0] for p in over], [top * 0.985] * len(over), "^", color=colour, alpha=0.6, markersize=4)
    ax.set_ylim(0, top)
    _borders(ax, [run for _, run in runs])
    ax.set_xlabel("iteration (× not counted" + (f", ▲ {beyond} beyond the frame)" if beyond else ")"))
    ax.set_ylabel("ms" if what == "step" else "tokens/s/GPU")
    ax.yaxis.set_major_formatter(_thousands())
    ax.xaxis.set_major_locator(_few_ticks())
    _legend_below(ax)


def _borders(ax: Any, runs: Sequence[Measured]) -> None:
    """A line where a phase begins, with its name; borders that several runs share come once."""
    names: dict[int, list[str]] = {}
    for run in runs:
        for phase in run.report.phases[1:]:
            names.setdefault(phase.begin, []).append(phase.name)
    for begin, phases in names.items():
        ax.axvline(begin + 0.5, color=INK, linewidth=0.7, linestyle=":", alpha=0.7)
        where = {"xycoords": ax.get_xaxis_transform(), "textcoords": "offset points"}
        ax.annotate(", ".join(dict.fromkeys(phases)), (begin + 0.5, 1), (2, -9), fontsize=7, alpha=0.8, **where)


def _tokens_per_step(run: Measured) -> float | None:
    report = run.report
    if not report.seq_length or not report.world_size or not report.global_batch_size:
        return None
    return report.seq_length * report.global_batch_size / report.world_size


def _losses(ax: Any, curves: Sequence[tuple[Entry, Measured]], colours: dict[str, str]) -> None:
    lowest, highest = float("inf"), 0.0
    for entry, run in curves:
        points = _thinned([(n, v) for n, v in sorted(losses(run).items()) if v == v])
        if len(points) < 2:
            continue
        numbers, values = zip(*points, strict=True)
        colour = colours[entry.row.label]
        if len(values) > 60:
            ax.plot(numbers, values, color=colour, linewidth=0.5, alpha=0.35)
            values = tuple(smooth(values, max(3, len(values) // 40) | 1))
        style = _dash(entry, [e for e, _ in curves])
        ax.plot(numbers, values, style, color=colour, linewidth=1.3, label=_name(entry, [e for e, _ in curves]))
        lowest, highest = min(lowest, *values), max(highest, *values)
    _borders(ax, [run for _, run in curves])
    ax.set_xlabel("iteration")
    ax.xaxis.set_major_locator(_few_ticks())
    # A curve that falls by little would be a flat line from zero.
    if lowest > 0.5 * highest:
        ax.set_ylabel("loss (axis does not start at 0)")
    else:
        ax.set_ylabel("loss")
        ax.set_ylim(0, None)
    _legend_below(ax)


def _parity(ax: Any, comparison: Comparison, colours: dict[str, str]) -> None:
    tolerance = 0.0
    entry_of = {entry.row.name: entry for entry in comparison.entries}
    reach = 0.0
    shown = {entry.row.name for entry in _representative(comparison.entries)}
    for parity in comparison.parities:
        if len(parity.difference) < 2 or parity.variant not in shown:
            continue
        tolerance = max(tolerance, parity.tolerance)
        entry = entry_of[parity.variant]
        points = _thinned(list(zip(parity.iterations, (100 * v for v in parity.smoothed), strict=True)))
        ax.plot(
            *zip(*points, strict=True),
            color=colours[entry.row.label],
            linewidth=1.3,
            label=f"{_name(entry, comparison.entries)}: {parity.verdict}",
        )
        reach = max(reach, *(abs(v) for _, v in points))
    ax.axhspan(-100 * tolerance, 100 * tolerance, color=INK, alpha=0.12, linewidth=0)
    ax.axhline(0, color=INK, linewidth=0.8)
    bound = 1.15 * max(reach, 150 * tolerance)
    ax.set_ylim(-bound, bound)
    ax.set_xlabel("iteration")
    ax.xaxis.set_major_locator(_few_ticks())
    ax.set_ylabel(f"difference of the loss (%)\nband: tolerance {100 * tolerance:g} %")
    _legend_below(ax)


def _by_variant(entries: Sequence[Entry]) -> Iterator[tuple[str, list[Entry]]]:
    for label in dict.fromkeys(entry.row.label for entry in entries):
        yield label, [entry for entry in entries if entry.row.label == label]


def _thinned(points: Sequence[Any]) -> list[Any]:
    step = -(-len(points) // MOST_POINTS) or 1
    return list(points[::step])


def _wrapped(text: str) -> str:
    return text.replace(", ", "\n", 1) if len(text) > 16 else text


def _few_ticks() -> Any:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(5, integer=True)


def _plain_log_ticks(axis: Any) -> None:
    """1, 2 and 5 of each power of ten, in digits."""
    from matplotlib.ticker import LogLocator, NullFormatter, NullLocator

    axis.set_major_locator(LogLocator(10, subs=(1, 2, 5)))
    axis.set_major_formatter(_thousands())
    axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())


def _thousands() -> Any:
    from matplotlib.ticker import FuncFormatter

    return FuncFormatter(lambda value, _: f"{value:,.0f}" if abs(value) >= 1000 else f"{value:g}")

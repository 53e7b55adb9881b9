"""Pictures of rows: bars, scaling over GPUs, everything over the sequence length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from fp8launch.report.columns import Entry, Published, ratio_mark
from fp8launch.report.grouping import Measure
from fp8launch.report.plot_style import (
    INK,
    MOST_LINES,
    Picture,
    by_variant,
    few_ticks,
    left_out,
    legend_below,
    legend_text,
    marker_of,
    name_of,
    paged,
    plain_log_ticks,
    series_of,
    thousands,
    wrapped,
)

Value = Callable[[Entry], float | None]
Colours = dict[str, str]


@dataclass(frozen=True)
class Bars:
    """A picture of bars: one quantity in one unit. `text` stands at the end of a bar."""

    name: str
    title: str
    unit: str
    measure: Callable[[Entry], Measure | None]
    published: Callable[[Published], float | None]
    text: Callable[[Entry, float], str]


def _with_gain(entry: Entry, value: float, units: Sequence[str]) -> str:
    """The value, with the speed-up where that is a ratio of such values."""
    text = f"{value:,.0f}" if value >= 100 else f"{value:,.4g}"
    speedup = entry.speedup
    if speedup is None or speedup.value is None or speedup.against == entry.row.name or speedup.unit not in units:
        return text
    return f"{text}  {speedup.value:.2f}×{ratio_mark(speedup)}"


def _with_mfu(entry: Entry, value: float) -> str:
    mfu = f" ({100 * entry.mfu.median:.0f} % of {entry.peak_tflops:g})" if entry.mfu else ""
    return f"{value:,.4g}{mfu}"


THROUGHPUT = Bars(
    "throughput",
    "Throughput",
    "tokens/s/GPU",
    lambda entry: entry.tokens,
    lambda published: published.tokens_per_s_per_gpu,
    lambda entry, value: _with_gain(entry, value, ["tokens/s/GPU"]),
)
STEP_TIME = Bars(
    "step_time_bars",
    "Step time",
    "ms",
    lambda entry: entry.step_time,
    lambda published: None,
    lambda entry, value: _with_gain(entry, value, ["iterations/s", "samples/s/GPU"]),
)
TFLOPS = Bars(
    "tflops",
    "Model TFLOP/s and MFU",
    "model TFLOP/s/GPU; in brackets MFU and its peak",
    lambda entry: entry.tflops,
    lambda published: published.tflops_per_gpu,
    _with_mfu,
)


def draw_bars(ax: Any, entries: Sequence[Entry], colours: Colours, bars: Bars) -> None:
    """Draw a bar from zero for each row, its runs as dots, the published figure as a line across it."""
    highest = 0.0
    for i, entry in enumerate(entries):
        measure = bars.measure(entry)
        if measure is None:
            ax.annotate("not known", (0, i), xytext=(6, 0), textcoords="offset points", va="center", fontsize=8)
            continue
        ax.barh(i, measure.median, color=colours[entry.row.label], height=0.62)
        if len(measure.runs) > 1:
            ax.plot(measure.runs, [i] * len(measure.runs), "o", color="white", markeredgecolor=INK, markersize=3)
        figure = bars.published(entry.published) if entry.published else None
        if figure:
            _draw_published(ax, i, figure, named=not highest)
        end = max(measure.runs)
        highest = max(highest, end, figure or 0.0)
        text = bars.text(entry, measure.median)
        ax.annotate(text, (end, i), xytext=(6, 0), textcoords="offset points", va="center", fontsize=8)
    names = [name_of(entry, entries) for entry in entries]
    if len(entries) <= MOST_LINES:
        names = [wrapped(name) for name in names]
    ax.set_yticks(range(len(entries)), names)
    ax.set_ylim(len(entries) - 0.4, -0.9)
    # Room for the text at the end of the longest bar.
    ax.set_xlim(0, highest * 1.5)
    ax.set_xlabel(bars.unit)
    ax.grid(axis="x", color=INK, alpha=0.15, linewidth=0.6)
    ax.grid(visible=False, axis="y")
    ax.xaxis.set_major_locator(few_ticks())
    ax.xaxis.set_major_formatter(thousands())


def _draw_published(ax: Any, row: int, figure: float, named: bool) -> None:
    ax.plot([figure] * 2, [row - 0.4, row + 0.4], color=INK, linewidth=1.6, linestyle=":")
    if named:
        ax.annotate("published", (figure, row - 0.45), fontsize=7, ha="center", va="bottom")


# --- Scaling --------------------------------------------------------------------------------------------------------


def scaling_pictures(entries: Sequence[Entry], colours: Colours) -> list[Picture]:
    """Return total speed and efficiency over GPUs, for the variants that were run on several numbers of them."""
    if not any(_efficiency(entry) for entry in entries):
        return []
    variants = [same for _, same in by_variant(entries)]
    groups = [variants[i : i + MOST_LINES] for i in range(0, len(variants), MOST_LINES)]
    pages = [[entry for same in group for entry in same] for group in groups]
    found = []
    for name, title, draw, value in (
        ("scaling", "Scaling", _draw_scaling, _total),
        ("efficiency", "Scaling efficiency", _draw_efficiency, _efficiency),
    ):
        draws = [partial(draw, entries=page, colours=colours) for page in pages if any(map(value, page))]
        missing = [same[0].row.label for same in variants if not any(map(value, same))]
        found += paged(name, title, draws, 1.0, left_out(missing, "not known"))
    return found


def _total(entry: Entry) -> float | None:
    return entry.tokens_total if entry.row.world else None


def _efficiency(entry: Entry) -> float | None:
    if entry.efficiency is None or not entry.efficiency.ratio.value or not entry.row.world:
        return None
    return 100 * entry.efficiency.ratio.value


def _draw_scaling(ax: Any, entries: Sequence[Entry], colours: Colours) -> None:
    for label, points in _over_gpus(entries, _total):
        worlds, totals = zip(*points, strict=True)
        colour = colours[label]
        ax.plot(worlds, totals, f"{marker_of(colour)}-", color=colour, label=legend_text(label))
        ideal = [totals[0] * world / worlds[0] for world in worlds]
        ax.plot(worlds, ideal, color=colour, linewidth=0.8, linestyle=":")
    ax.plot([], [], color=INK, linewidth=0.8, linestyle=":", label="ideal")
    _gpu_axis(ax, entries)
    ax.set_yscale("log")
    ax.set_ylabel("tokens/s in all (log scale)")
    plain_log_ticks(ax.yaxis)
    ax.legend()


def _draw_efficiency(ax: Any, entries: Sequence[Entry], colours: Colours) -> None:
    modes = {entry.efficiency.mode for entry in entries if entry.efficiency}
    highest = 100.0
    for label, points in _over_gpus(entries, _efficiency):
        colour = colours[label]
        style = f"{marker_of(colour)}-"
        ax.plot(*zip(*points, strict=True), style, color=colour, label=legend_text(label), fillstyle="none")
        highest = max(highest, *(value for _, value in points))
    ax.axhline(100, color=INK, linewidth=0.8, linestyle=":")
    _gpu_axis(ax, entries)
    ax.set_ylim(0, highest * 1.1)
    ax.set_ylabel(f"speed per GPU, % of the fewest GPUs\n({', '.join(sorted(modes))} scaling)")
    ax.legend(loc="lower left")


def _over_gpus(entries: Sequence[Entry], value: Value) -> list[tuple[str, list[tuple[int, float]]]]:
    """(GPUs, value) of each variant that has any."""
    found = []
    for label, same in by_variant(entries):
        points = []
        for entry in same:
            number = value(entry)
            if entry.row.world and number is not None:
                points.append((entry.row.world, number))
        if points:
            found.append((label, points))
    return found


def _gpu_axis(ax: Any, entries: Sequence[Entry]) -> None:
    worlds = sorted({entry.row.world for entry in entries if entry.row.world})
    ax.set_xscale("log", base=2)
    ax.set_xticks(worlds, [str(world) for world in worlds])
    ax.minorticks_off()
    ax.set_xlabel("GPUs (log scale)")


# --- Over the sequence length ---------------------------------------------------------------------------------------

_QUANTITIES: tuple[tuple[str, str, Value], ...] = (
    ("Step time", "ms", lambda entry: entry.step_time.median if entry.step_time else None),
    ("Tokens per second", "tokens/s/GPU", lambda entry: entry.tokens.median if entry.tokens else None),
    ("TFLOP/s", "model TFLOP/s/GPU", lambda entry: entry.tflops.median if entry.tflops else None),
    ("MFU", "% of each data type's own peak", lambda entry: 100 * entry.mfu.median if entry.mfu else None),
)


@dataclass(frozen=True)
class _Line:
    """A group of variants that differ only in the sequence length."""

    label: str
    colour: str
    points: list[tuple[int, float]]


def sequence_pictures(entries: Sequence[Entry], colours: Colours) -> list[Picture]:
    """Return each quantity over the sequence length, where that varies."""
    if len({entry.row.facts.get("seq_length") for entry in entries}) < 2:
        return []
    found = []
    for title, unit, value in _QUANTITIES:
        lines, missing = _sequence_lines(entries, colours, value)
        groups = [lines[i : i + MOST_LINES] for i in range(0, len(lines), MOST_LINES)]
        draws = [partial(_draw_over_sequence, lines=group, unit=unit) for group in groups]
        name = f"sequence_{title.split()[0].lower().replace('/', '_')}"
        found += paged(name, f"{title} over sequence length", draws, 1.0, left_out(missing, "not known"))
    return found


def _sequence_lines(entries: Sequence[Entry], colours: Colours, value: Value) -> tuple[list[_Line], list[str]]:
    """The lines, named by the rest of the label, and the rows that have no point in any."""
    worlds = {entry.row.world for entry in entries}
    lines: dict[tuple[str, int | None], _Line] = {}
    missing = []
    for entry in entries:
        length, number = entry.row.facts.get("seq_length"), value(entry)
        if not isinstance(length, int) or number is None:
            missing.append(entry.row.name)
            continue
        series = series_of(entry)
        label = series if len(worlds) == 1 else f"{series}, {entry.row.world} GPUs"
        line = lines.setdefault((series, entry.row.world), _Line(legend_text(label), colours[entry.row.label], []))
        line.points.append((length, number))
    return list(lines.values()), missing


def _draw_over_sequence(ax: Any, lines: Sequence[_Line], unit: str) -> None:
    for line in lines:
        style = f"{marker_of(line.colour)}-"
        ax.plot(*zip(*sorted(line.points), strict=True), style, color=line.colour, label=line.label)
    lengths = sorted({length for line in lines for length, _ in line.points})
    ax.set_xscale("log", base=2)
    ax.set_xticks(lengths, [f"{length:,}" for length in lengths])
    ax.minorticks_off()
    ax.set_ylim(0, 1.08 * max(number for line in lines for _, number in line.points))
    ax.set_xlabel("sequence length (tokens, log scale)")
    ax.set_ylabel(unit)
    ax.yaxis.set_major_formatter(thousands())
    legend_below(ax)

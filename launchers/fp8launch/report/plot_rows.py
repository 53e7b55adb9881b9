"""Pictures of rows: bars, scaling over GPUs, everything over the sequence length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fp8launch.report.comparison import Entry
from fp8launch.report.plot_style import (
    INK,
    MOST_LINES,
    Picture,
    by_variant,
    few_ticks,
    legend_below,
    marker_of,
    name_of,
    plain_log_ticks,
    series_of,
    thousands,
    wrapped,
)


def bars(ax: Any, entries: Sequence[Entry], colours: dict[str, str], what: str) -> None:
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
            _bar_text(entry, measure.median, what), (max(measure.runs), i), xytext=(6, 0), textcoords="offset points",
            va="center", fontsize=8,
        )  # fmt: skip
    names = [name_of(entry, entries) for entry in entries]
    ax.set_yticks(range(len(entries)), [wrapped(name) if len(entries) <= MOST_LINES else name for name in names])
    ax.set_ylim(len(entries) - 0.4, -0.9)
    # Room for the text at the end of the longest bar.
    ax.set_xlim(0, highest * 1.5)
    ax.set_xlabel("tokens/s/GPU" if what == "tokens" else "model TFLOP/s/GPU; in brackets MFU and its peak")
    ax.grid(axis="x", color=INK, alpha=0.15, linewidth=0.6)
    ax.grid(visible=False, axis="y")
    ax.xaxis.set_major_locator(few_ticks())
    ax.xaxis.set_major_formatter(thousands())


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


def scaling(ax: Any, entries: Sequence[Entry], colours: dict[str, str]) -> None:
    for label, same in by_variant(entries):
        points = [(e.row.world, e.tokens_total) for e in same if e.row.world and e.tokens_total]
        if not points:
            continue
        worlds, totals = zip(*points, strict=True)
        ax.plot(worlds, totals, f"{marker_of(colours[label])}-", color=colours[label], label=label)
        ideal = [totals[0] * w / worlds[0] for w in worlds]
        ax.plot(worlds, ideal, color=colours[label], linewidth=0.8, linestyle=":")
    ax.plot([], [], color=INK, linewidth=0.8, linestyle=":", label="ideal")
    _gpu_axis(ax, entries)
    ax.set_yscale("log")
    ax.set_ylabel("tokens/s in all (log scale)")
    plain_log_ticks(ax.yaxis)
    ax.legend()


def efficiency(ax: Any, entries: Sequence[Entry], colours: dict[str, str]) -> None:
    modes = set()
    highest = 100.0
    for label, same in by_variant(entries):
        points = [
            (e.row.world, 100 * e.efficiency.ratio.value)
            for e in same
            if e.row.world and e.efficiency and e.efficiency.ratio.value
        ]
        modes |= {e.efficiency.mode for e in same if e.efficiency}
        if points:
            style = f"{marker_of(colours[label])}-"
            ax.plot(*zip(*points, strict=True), style, color=colours[label], label=label, fillstyle="none")
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


def over_sequence(entries: Sequence[Entry], colours: dict[str, str]) -> list[Picture]:
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
            style = f"{marker_of(colour)}-"
            ax.plot([p[0] for p in points], [p[1] for p in points], style, color=colour, label=label + suffix)
            lengths |= {p[0] for p in points}
        ax.set_xscale("log", base=2)
        ax.set_xticks(sorted(lengths), [f"{n:,}" for n in sorted(lengths)])
        ax.minorticks_off()
        ax.set_ylim(0, 1.08 * max(p[1] for points in _sequences(entries, value).values() for p in points))
        ax.set_xlabel("sequence length (tokens, log scale)")
        ax.set_ylabel(unit)
        ax.yaxis.set_major_formatter(thousands())
        legend_below(ax)

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
            lines.setdefault((series_of(entry), entry.row.world), []).append((length, number, entry))
    return {key: sorted(points, key=lambda p: p[0]) for key, points in lines.items()}

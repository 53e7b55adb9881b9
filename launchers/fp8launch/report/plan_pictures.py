"""Pictures of a plan: memory against speed, where the time of a step goes, and time against the number of GPUs."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from fp8launch.planning.step_time import StepTime
from fp8launch.planning.term_groups import GROUPS, grouped
from fp8launch.report.plot_style import COLOURS, HEIGHT, INK, Key, Panel, Picture, doubling_axis, few_ticks, thousands

# Computation in blues and greens; communication from dark to light, so that its kinds differ without their hue.
_COMPUTATION = ("#0072B2", "#56B4E9", "#B5DDF5", "#009E73", "#A6DBC6", "#E3EF9A")
_COMMUNICATION = ("#7A3300", "#D55E00", "#E69F00", "#F2C879", "#F7E6C4")
_REST = ("#B8BDC2", "#CC79A7", "#EBC8DC", "#8C7AE6", INK)
_COLOUR = dict(zip(GROUPS, (*_COMPUTATION, *_COMMUNICATION, *_REST), strict=True))
_FRONT, _OWN, _OTHER = COLOURS[0], COLOURS[1], COLOURS[7]
# More layouts than this are not labelled.
MOST_SHOWN = 8
# Shares of the longest bar: a segment from the first on has room for two letters; below the second it has no name.
_ROOM, _SEEN = 0.045, 0.003
_LINE = 58
# Tokens of the training whose duration is drawn.
_TOKENS = 1e12


@dataclass(frozen=True)
class Shown:
    """A layout with its name, its predicted step and its peak memory in GiB."""

    name: str
    step: StepTime
    peak: float


@dataclass(frozen=True)
class PlanPoints:
    """The data of the pictures of a plan. `cloud` and `front` are pairs of GiB and tokens/s/GPU; `best` is by GPUs.

    `own` is the recipe's own layout, `capacity` the GPU's memory in GiB.
    """

    cloud: Sequence[tuple[float, float]]
    front: Sequence[tuple[float, float]]
    shown: Sequence[Shown]
    own: Shown | None
    capacity: float
    best: Mapping[int, StepTime]


def plan_pictures(points: PlanPoints) -> list[Picture]:
    """Return the pictures side by side; the last one only with several numbers of GPUs."""
    memory = Panel(partial(_draw_memory, points=points))
    found = [Picture("plan_memory", "Memory against speed", (memory,), _keys(points)), _terms_picture(points)]
    if len(points.best) > 1:
        sizes = Panel(partial(_draw_sizes, best=points.best))
        keys = (
            Key("fastest layout at each size, same batch", _FRONT, marker="o"),
            Key("if every GPU stayed as fast", _OTHER, dash="--"),
        )
        found.append(Picture("plan_sizes", "Time against the number of GPUs", (sizes,), keys))
    return found


def _terms_picture(points: PlanPoints) -> Picture:
    bars: list[tuple[int | str, Shown]] = list(enumerate(points.shown[:MOST_SHOWN], 1))
    if points.own:
        bars.append(("recipe", points.own))
    names, steps, rows = [], [], 0.0
    for title, one in bars:
        name = textwrap.fill(f"{title}  {one.name}", _LINE, subsequent_indent="    ")
        names.append(name)
        steps.append(one.step)
        rows += 1 + 0.4 * name.count("\n")
    tall = max((0.65 + 0.4 * rows) / HEIGHT, 1.0)
    used = _groups_seen(steps)
    keys, exposed = [], []
    for group in used:
        keys.append(Key(_legend(group), _COLOUR[group], shape="bar"))
        if group.endswith("communication"):
            exposed.append(_legend(group))
    remark = ", ".join(exposed)
    if remark:
        remark += ": exposed communication"
    panel = Panel(partial(_draw_terms, names=names, steps=steps, used=used), tall=tall, left=0.15)
    return Picture("plan_terms", "Where the time of a step goes", (panel,), tuple(keys), remark)


def _groups_seen(steps: Sequence[StepTime]) -> list[str]:
    """The groups of terms that are long enough in one of the bars."""
    least = _SEEN * _longest(steps)
    seen = set()
    for step in steps:
        for name, ms in grouped(step).items():
            if ms > least:
                seen.add(name)
    return [name for name in GROUPS if name in seen]


def _longest(steps: Sequence[StepTime]) -> float:
    """The time of the longest step in ms."""
    return max(step.ms for step in steps)


def _legend(group: str) -> str:
    return group.removesuffix(" communication").replace(" and ", ", ")


def _keys(points: PlanPoints) -> tuple[Key, ...]:
    keys = [
        Key("a layout that fits", _OTHER, dash="", marker="."),
        Key("Pareto front", _FRONT, marker="o"),
        Key("GPU memory", INK, dash=":"),
    ]
    if points.own:
        keys.append(Key("the recipe's own", _OWN, dash="", marker="D"))
    return tuple(keys)


def _draw_memory(ax: Any, points: PlanPoints) -> None:
    """Draw every layout, the front, and the numbers of the layouts shown in a column at the right."""
    memories, speeds = map(list, zip(*points.cloud, strict=True))
    ax.plot(memories, speeds, ".", color=_OTHER, alpha=0.45, markersize=3.5, markeredgewidth=0)
    ax.plot(*zip(*sorted(points.front), strict=True), "-o", color=_FRONT, markersize=3.5, linewidth=1.2)
    shown = points.shown[:MOST_SHOWN]
    ax.axvline(points.capacity, color=INK, linestyle=":", linewidth=1.2)
    named = list(shown)
    if points.own:
        named.append(points.own)
        ax.plot(points.own.peak, points.own.step.tokens_per_s_per_gpu, "D", color=_OWN, markersize=5, zorder=4)
    widest, fastest = points.capacity, max(speeds)
    for one in named:
        widest = max(widest, one.peak)
        fastest = max(fastest, one.step.tokens_per_s_per_gpu)
    top = 1.1 * fastest
    # Labels in the order of their speeds, far enough apart to be read.
    level = top
    for number, one in sorted(enumerate(shown, 1), key=lambda pair: -pair[1].step.tokens_per_s_per_gpu):
        speed = one.step.tokens_per_s_per_gpu
        level = min(speed, level - 0.065 * top)
        ax.plot([one.peak, widest * 1.06], [speed, level], color=INK, linewidth=0.5, alpha=0.6)
        ax.plot(one.peak, speed, "o", color="white", markersize=5, markeredgecolor=INK, zorder=3)
        ax.annotate(str(number), (widest * 1.07, level), fontsize=8.5, fontweight="bold", va="center")
    ax.set_xlim(0, widest * 1.16)
    ax.set_ylim(0, top)
    ax.set_xlabel(f"peak memory (GiB; the GPU has {points.capacity:g})")
    ax.set_ylabel("tokens/s/GPU")
    ax.xaxis.set_major_locator(few_ticks())
    ax.yaxis.set_major_locator(few_ticks())
    ax.yaxis.set_major_formatter(thousands())


def _draw_terms(ax: Any, names: Sequence[str], steps: Sequence[StepTime], used: Sequence[str]) -> None:
    """Draw a stacked bar for each step below its name."""
    longest = _longest(steps)
    place = {"textcoords": "offset points", "fontsize": 8}
    top = 0.0
    for name, step in zip(names, steps, strict=True):
        top += 0.4 * name.count("\n")
        ax.annotate(name, (0, top), (1, 0), xycoords=("axes fraction", "data"), va="bottom", **place)
        at, left = top + 0.28, 0.0
        for group, ms in grouped(step).items():
            ax.barh(at, ms, left=left, color=_COLOUR[group], height=0.46, edgecolor="white", linewidth=0.4)
            if group.endswith("communication") and ms > _ROOM * longest:
                dark = group in ("TP communication", "CP communication")
                colour = "white" if dark else "black"
                ax.text(left + ms / 2, at, group[:2], ha="center", va="center_baseline", fontsize=7, color=colour)
            left += ms
        ax.annotate(f"{step.ms:,.0f}", (left, at), (4, 0), va="center", **place)
        top += 1
    ax.set_yticks([])
    ax.set_ylim(top - 0.35, -0.5)
    ax.set_xlim(0, longest * 1.13)
    ax.set_xlabel("ms a step")
    ax.grid(axis="x", color=INK, alpha=0.15, linewidth=0.6)
    ax.grid(visible=False, axis="y")
    ax.xaxis.set_major_locator(few_ticks())
    ax.xaxis.set_major_formatter(thousands())


def _draw_sizes(ax: Any, best: Mapping[int, StepTime]) -> None:
    """Draw the days that 10^12 tokens take, with both axes in powers."""
    sizes = sorted(best)
    days = [_TOKENS / (best[size].tokens_per_s_per_gpu * size) / 86400 for size in sizes]
    ax.plot(sizes, [days[0] * sizes[0] / size for size in sizes], "--", color=_OTHER, linewidth=1.2)
    ax.plot(sizes, days, "-o", color=_FRONT, markersize=4.5)
    for size, value in zip(sizes, days, strict=True):
        text = f"{value:.3g}"
        if value >= 100:
            text = f"{value:,.0f}"
        ax.annotate(text, (size, value), (5, 5), textcoords="offset points", fontsize=8.5)
    doubling_axis(ax, sizes, "GPUs (log scale)")
    ax.set_xlim(sizes[0] / 1.15, sizes[-1] * 1.3)
    ax.set_yscale("log")
    ax.set_yticks([])
    ax.minorticks_off()
    ax.set_ylim(days[0] * sizes[0] / sizes[-1] / 1.25, max(days) * 1.4)
    ax.set_ylabel("days for 10\u00b9\u00b2 tokens (log scale)")

"""Pictures of a plan: memory against speed, where the time of a step goes, and time against the number of GPUs.

The first picture needs every layout that fits and the last one plans for more GPUs, so both search again.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

from fp8launch.engines import engine_of
from fp8launch.plugins.plan.layouts import Layout
from fp8launch.plugins.plan.plans import Plan, Planned, accepted, judged
from fp8launch.plugins.plan.predicted import speed_range
from fp8launch.plugins.plan.search import search
from fp8launch.plugins.plan.step_time import StepTime
from fp8launch.plugins.plan.term_groups import GROUPS, grouped
from fp8launch.plugins.plots.figures import DPI, figure_of, save_figure
from fp8launch.plugins.plots.style import (
    COLOURS,
    INK,
    LABEL,
    Key,
    Panel,
    Picture,
    bars_height,
    doubling_axis,
    few_ticks,
    name_bars,
    plain,
    thousands,
    time_unit,
)
from fp8launch.recipe.load import load_recipe

# The picture of sizes plans for these multiples of the nodes.
TIMES = (1, 2, 4, 8)
EVERY = 10**9

# Computation is blue and green. Kinds of communication differ in lightness, for readers who cannot tell their hues.
_COMPUTATION = ("#0072B2", "#56B4E9", "#B5DDF5", "#009E73", "#A6DBC6", "#E3EF9A")
_COMMUNICATION = ("#7A3300", "#D55E00", "#E69F00", "#F2C879", "#F7E6C4")
_REST = ("#B8BDC2", "#CC79A7", "#EBC8DC", "#8C7AE6", INK, "#6E7781")
_COLOUR = dict(zip(GROUPS, (*_COMPUTATION, *_COMMUNICATION, *_REST), strict=True))
_FRONT, _OWN, _OTHER = COLOURS[0], COLOURS[1], COLOURS[7]
# Only the first layouts are labelled.
MOST_SHOWN = 8
# Shares of the longest bar: segments of at least `_ROOM` get two letters, groups below `_SEEN` no entry in the legend.
_ROOM, _SEEN = 0.045, 0.003
_LINE = 58
# Length of the training whose duration is drawn.
_TOKENS = 1e12


@dataclass(frozen=True)
class Shown:
    """A layout with its name, its predicted step and its peak memory in GiB."""

    name: str
    step: StepTime
    peak: float


@dataclass(frozen=True)
class PlanPoints:
    """The data of a plan's pictures.

    `cloud` and `front` are pairs of GiB and tokens/s/GPU: every layout that fits, and the Pareto front. `own` is the
    recipe's own layout, `capacity` the GPU's memory in GiB, `best` the fastest step by number of GPUs.
    """

    cloud: Sequence[tuple[float, float]]
    front: Sequence[tuple[float, float]]
    shown: Sequence[Shown]
    own: Shown | None
    capacity: float
    best: Mapping[int, StepTime]


def draw_plan(file: Path, plan: Plan) -> None:
    """Draw the pictures of a plan side by side into a file."""
    save_figure(figure_of(plan_pictures(plan_points(plan)), _heading(plan)), file, DPI)


def _heading(plan: Plan) -> str:
    """Return what is planned, and how far the predictions may be off."""
    target, length = plan.target, plan.bases[0].args.get("seq_length")
    parts = [
        plain(load_recipe(plan.source, plan.overrides).recipe.name),
        f"{target.gpus:,} × {target.gpu.name.upper()}",
        f"global batch {target.global_batch:,}" + (f" × {length:,} tokens" if length else ""),
        f"predicted, best layout {speed_range(plan.layouts[0].step)}",
    ]
    return " · ".join(parts)


# --- data -------------------------------------------------------------------------------------------------------------


def plan_points(plan: Plan) -> PlanPoints:
    """Return the data of a plan's pictures."""
    every, front = _judged_front(plan)
    return PlanPoints(
        cloud=[_point(layout) for layout in every],
        front=[_point(layout) for layout in front],
        shown=[_shown(layout) for layout in plan.layouts],
        own=_shown(plan.own) if plan.own else None,
        capacity=plan.target.gpu.memory_gib,
        best=_best(plan),
    )


def _point(layout: Layout) -> tuple[float, float]:
    return layout.memory.peak / 2**30, layout.step.tokens_per_s_per_gpu


def _shown(one: Planned) -> Shown:
    memory = one.memory or one.layout.memory
    return Shown(one.layout.short, one.step, memory.peak / 2**30)


def _judged_front(plan: Plan) -> tuple[list[Layout], list[Layout]]:
    """Return every layout that fits, and the Pareto front of the layouts that the rules accept.

    Judging a layout takes much longer than predicting it, so only layouts on the front are judged. Removing a refused
    layout changes the front, so this repeats until the whole front is accepted.
    """
    engine = engine_of(load_recipe(plan.source, plan.overrides))
    every = list(search(plan.bases, plan.target, EVERY, every_split=True).layouts)
    good: set[int] = set()
    while True:
        front = pareto(every)
        refused: set[int] = set()
        for layout in front:
            if id(layout) in good:
                continue
            if isinstance(judged(layout, engine, plan.source, plan.overrides, plan.target), Planned):
                good.add(id(layout))
            else:
                refused.add(id(layout))
        if not refused:
            return every, front
        every = [layout for layout in every if id(layout) not in refused]


def pareto(layouts: Sequence[Layout]) -> list[Layout]:
    """Return the layouts for which no other layout is faster with as little memory, by increasing memory."""
    front: list[Layout] = []
    for layout in sorted(layouts, key=lambda one: (one.memory.peak, one.step.ms)):
        if not front or layout.step.ms < front[-1].step.ms:
            front.append(layout)
    return front


def _best(plan: Plan) -> dict[int, StepTime]:
    """Return the step of the fastest layout by number of GPUs. Numbers without a layout are left out."""
    nodes = load_recipe(plan.source, plan.overrides).recipe.resources.nodes
    found = {plan.target.gpus: min((one.step for one in plan.layouts), key=lambda step: step.ms)}
    for times in TIMES[1:]:
        target = replace(plan.target, gpus=plan.target.gpus * times)
        overrides = [*plan.overrides, f"resources.nodes={nodes * times}"]
        best, _ = accepted(search(plan.bases, target, 4), plan.source, overrides, target, 1)
        if best:
            found[target.gpus] = best[0].step
    return found


# --- drawing ----------------------------------------------------------------------------------------------------------


def plan_pictures(points: PlanPoints) -> list[Picture]:
    """Return the pictures; the last one only if there are several numbers of GPUs."""
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
    names = [textwrap.fill(f"{title}  {one.name}", _LINE, subsequent_indent="    ") for title, one in bars]
    steps = [one.step for _, one in bars]
    tall = max(bars_height(names), 1.0)
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
    """Return the groups of terms that are long enough to be seen in one of the bars."""
    least = _SEEN * _longest(steps)
    seen = set()
    for step in steps:
        for name, ms in grouped(step).items():
            if ms > least:
                seen.add(name)
    return [name for name in GROUPS if name in seen]


def _longest(steps: Sequence[StepTime]) -> float:
    """Return the time of the longest step in ms."""
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
    """Draw every layout and the front, and number the layouts of the table in a column on the right."""
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
    dots = [(one.peak, one.step.tokens_per_s_per_gpu) for one in shown]
    right = widest * 1.06
    for number, ((peak, speed), level) in enumerate(zip(dots, label_levels(dots, right, top), strict=True), 1):
        ax.plot([peak, right], [speed, level], color=INK, linewidth=0.5, alpha=0.6)
        ax.plot(peak, speed, "o", color="white", markersize=5, markeredgecolor=INK, zorder=3)
        ax.annotate(str(number), (widest * 1.07, level), fontsize=8.5, fontweight="bold", va="center")
    ax.set_xlim(0, widest * 1.16)
    ax.set_ylim(0, top)
    ax.set_xlabel(f"peak memory (GiB; the GPU has {points.capacity:g})")
    ax.set_ylabel("tokens/s/GPU")
    ax.xaxis.set_major_locator(few_ticks())
    ax.yaxis.set_major_locator(few_ticks())
    ax.yaxis.set_major_formatter(thousands())


def label_levels(dots: Sequence[tuple[float, float]], right: float, top: float) -> list[float]:
    """Return the heights of the labels in a column at `right`, one for each dot, so that no leader lines cross."""
    order = sorted(range(len(dots)), key=lambda i: -dots[i][1])
    levels = [0.0] * len(dots)
    level = top
    for i in order:
        # Each label is moved down until it does not overlap the one above.
        level = min(dots[i][1], level - 0.065 * top)
        levels[i] = level
    crossing = True
    while crossing:
        crossing = False
        for i, j in combinations(order, 2):
            if _cross(dots[i], dots[j], levels[i], levels[j], right):
                # This shortens the lines, so it comes to an end.
                levels[i], levels[j] = levels[j], levels[i]
                crossing = True
    return levels


def _cross(a: tuple[float, float], b: tuple[float, float], a_end: float, b_end: float, right: float) -> bool:
    """Return whether the lines from two dots to heights at `right` cross."""
    begin = max(a[0], b[0])
    heights = []
    for (x, y), end in ((a, a_end), (b, b_end)):
        heights.append(y + (end - y) * (begin - x) / (right - x))
    return (heights[0] - heights[1]) * (a_end - b_end) < -1e-9 * right


def _draw_terms(ax: Any, names: Sequence[str], steps: Sequence[StepTime], used: Sequence[str]) -> None:
    """Draw the name of each step, with a stacked bar below it."""
    longest = _longest(steps)
    unit = time_unit([step.ms for step in steps])
    for step, position in zip(steps, name_bars(ax, names, f"{unit.name} per step"), strict=True):
        left = 0.0
        for group, ms in grouped(step).items():
            ax.barh(position, ms, left=left, color=_COLOUR[group], height=0.46, edgecolor="white", linewidth=0.4)
            if group.endswith("communication") and ms > _ROOM * longest:
                dark = group in ("TP communication", "CP communication")
                colour = "white" if dark else "black"
                ax.text(left + ms / 2, position, group[:2], ha="center", va="center_baseline", fontsize=7, color=colour)
            left += ms
        total = unit.text(step.ms).split()[0] if unit.per_ms < 1 else f"{step.ms:,.0f}"
        ax.annotate(total, (left, position), (4, 0), va="center", **LABEL)
    ax.set_xlim(0, longest * 1.13)
    ax.xaxis.set_major_locator(few_ticks())
    ax.xaxis.set_major_formatter(thousands(unit.per_ms))


def _draw_sizes(ax: Any, best: Mapping[int, StepTime]) -> None:
    """Draw the days that 10^12 tokens take, on logarithmic axes."""
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

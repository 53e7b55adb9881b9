"""What `fp8launch plan --picture` draws: it searches for every layout that fits, and on more GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fp8launch.cli.planned import Planned, accepted, judged
from fp8launch.engines import engine_of
from fp8launch.planning.change import Change, Target
from fp8launch.planning.layouts import Layout, Search
from fp8launch.planning.search import search
from fp8launch.planning.step_time import StepTime
from fp8launch.recipe.load import RecipeSource, load_recipe
from fp8launch.report.plan_pictures import PlanPoints, Shown, plan_pictures
from fp8launch.report.plots import DPI, figure_of

# The panel of sizes: times the number of nodes.
TIMES = (1, 2, 4, 8)
EVERY = 10**9


@dataclass(frozen=True)
class Drawn:
    """A plan to draw: what was asked for, and what was found."""

    source: RecipeSource
    asked: Sequence[str]
    target: Target
    bases: Sequence[Change]
    planned: Sequence[Planned]
    own: Planned | None


def draw_plan(file: Path, plan: Drawn) -> None:
    figure_of(plan_pictures(plan_points(plan))).savefig(file, dpi=DPI)


def plan_points(plan: Drawn) -> PlanPoints:
    every, front = _judged_front(plan)
    own = None
    if plan.own:
        own = _shown(plan.own)
    return PlanPoints(
        list(map(_point, every)),
        list(map(_point, front)),
        list(map(_shown, plan.planned)),
        own,
        plan.target.gpu.memory_gib,
        _best(plan),
    )


def _point(layout: Layout) -> tuple[float, float]:
    return layout.memory.peak / 2**30, layout.step.tokens_per_s_per_gpu


def _shown(one: Planned) -> Shown:
    memory = one.memory or one.layout.memory
    return Shown(one.layout.short, one.step, memory.peak / 2**30)


def _judged_front(plan: Drawn) -> tuple[list[Layout], list[Layout]]:
    """Every layout that fits, and the Pareto front of those that the rules accept."""
    engine = engine_of(load_recipe(plan.source, plan.asked))
    every = list(search(plan.bases, plan.target, EVERY, every_split=True).layouts)
    good: set[int] = set()
    while True:
        front = pareto(every)
        refused: set[int] = set()
        for layout in front:
            if id(layout) in good:
                continue
            if isinstance(judged(layout, engine, plan.source, plan.asked, plan.target), Planned):
                good.add(id(layout))
            else:
                refused.add(id(layout))
        if not refused:
            return every, front
        every = [layout for layout in every if id(layout) not in refused]


def pareto(layouts: Sequence[Layout]) -> list[Layout]:
    """The layouts that no other exceeds in speed with as little memory, the smallest first."""
    front: list[Layout] = []
    for layout in sorted(layouts, key=lambda one: (one.memory.peak, one.step.ms)):
        if not front or layout.step.ms < front[-1].step.ms:
            front.append(layout)
    return front


def _best(plan: Drawn) -> dict[int, StepTime]:
    """The step of the fastest layout by number of GPUs; numbers that nothing divides or fits are left out."""
    nodes = load_recipe(plan.source, plan.asked).recipe.resources.nodes
    found = {plan.target.gpus: min((one.step for one in plan.planned), key=lambda step: step.ms)}
    for times in TIMES[1:]:
        target = replace(plan.target, gpus=plan.target.gpus * times)
        asked = [*plan.asked, f"resources.nodes={nodes * times}"]
        layouts: Search = search(plan.bases, target, 4)
        best, _ = accepted(layouts, plan.source, asked, target, 1)
        if best:
            found[target.gpus] = best[0].step
    return found

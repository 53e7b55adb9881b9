"""Layouts that the rules of the check accept, as the recipe with their overrides says them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fp8launch.check.checker import check
from fp8launch.check.memory import run_estimate
from fp8launch.check.resolved_run import ResolvedRun, resolve_run
from fp8launch.diagnostics import UserError
from fp8launch.engines import engine_of
from fp8launch.engines.base import Engine
from fp8launch.job.prepared import prepare
from fp8launch.megatron.memory import MemoryEstimate
from fp8launch.planning.change import Change, Target
from fp8launch.planning.layouts import Layout, Search
from fp8launch.planning.step_time import StepTime, step_time_at
from fp8launch.recipe.load import RecipeSource, load_recipe


@dataclass(frozen=True)
class Planned:
    """A layout that the rules accept, as the recipe with its overrides says it."""

    overrides: tuple[str, ...]
    layout: Layout
    step: StepTime
    memory: MemoryEstimate | None


def accepted(
    found: Search, source: RecipeSource, asked: Sequence[str], target: Target, top: int
) -> tuple[list[Planned], list[str]]:
    """The layouts that the rules of the check accept, and why others are refused."""
    planned: list[Planned] = []
    refused: list[str] = []
    engine = engine_of(load_recipe(source, asked))
    for layout in found.layouts:
        if len(planned) == top:
            break
        one = judged(layout, engine, source, asked, target)
        if isinstance(one, str):
            refused.append(f"{layout.short}: {one}")
        elif one is not None:
            planned.append(one)
    return planned, refused


def judged(
    layout: Layout, engine: Engine, source: RecipeSource, asked: Sequence[str], target: Target
) -> Planned | str | None:
    """A layout as the recipe says it, or why that is refused; None for one whose time is not predicted."""
    spelled = engine.spelled(layout.change.overrides)
    assert spelled is not None, layout.short  # the search left out what recipes of this engine have no field for
    own = (f"{key}={value}" for key, value in spelled.items())
    words = tuple(dict.fromkeys((*asked, *own, f"batch.global={target.global_batch}")))
    run = _legal(source, words)
    if isinstance(run, str):
        return run
    step = _step(run, target)
    return None if step is None else Planned(words, layout, step, run_estimate(run))


def own_layout(source: RecipeSource, asked: Sequence[str], target: Target) -> Planned | None:
    """The recipe's own layout on the GPUs that were asked for; None where the rules refuse it."""
    run = _legal(source, asked)
    if isinstance(run, str):
        return None
    step, memory = _step(run, target), run_estimate(run)
    if step is None or memory is None:
        return None
    return Planned(tuple(asked), Layout(Change(run.arguments), step, memory), step, memory)


def _legal(source: RecipeSource, words: Sequence[str]) -> ResolvedRun | str:
    """The run of a recipe with these overrides, or why the rules refuse it."""
    try:
        prepared = prepare(source, words)
        result = check(prepared, layers=("rules",))
    except UserError as problems:
        return problems.problems[0].message
    return resolve_run(prepared) if result.ok else result.problems[0].message


def _step(run: ResolvedRun, target: Target) -> StepTime | None:
    return step_time_at(run.arguments, target.gpus, target.global_batch, target.speeds)

"""Plans: the fastest layouts of a recipe or model on a number of GPUs that the rules of `check` accept."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fp8launch.check.checker import check
from fp8launch.check.resolved_run import ResolvedRun, resolve_run
from fp8launch.cluster.profile import Cluster
from fp8launch.diagnostics import ANSWER_IS_NO, UserError, error
from fp8launch.engines import engine_of
from fp8launch.engines.base import Engine
from fp8launch.job.prepared import prepare
from fp8launch.megatron.model_arithmetic import whole
from fp8launch.plugins.estimate.fit import run_estimate
from fp8launch.plugins.estimate.memory import LIMIT, MemoryEstimate
from fp8launch.plugins.plan.change import Change, Target
from fp8launch.plugins.plan.inputs import SEQUENCE, base_of, resource_overrides, source_of, target_of
from fp8launch.plugins.plan.layouts import Layout, Search
from fp8launch.plugins.plan.search import search
from fp8launch.plugins.plan.settings import timed_arguments
from fp8launch.plugins.plan.step_time import StepTime, step_time_at
from fp8launch.recipe.load import RecipeSource, load_recipe

TOP = 5


@dataclass(frozen=True)
class PlanRequest:
    """A recipe or a model of the pack, and what to plan it for.

    None keeps the recipe's value; for a model it means one H100 node and a default batch. At most one of `gpus` and
    `nodes` is given. `precisions` are compared with one another. `by_memory` ranks by peak memory instead of speed.
    """

    recipe: str
    overrides: Sequence[str] = ()
    gpu: str | None = None
    gpus: int | None = None
    nodes: int | None = None
    sequence: int | None = None
    global_batch: int | None = None
    precisions: Sequence[str] = ()
    cluster: Cluster | None = None
    top: int = TOP
    by_memory: bool = False


@dataclass(frozen=True)
class Planned:
    """A layout that the rules accept, with the overrides that select it."""

    overrides: tuple[str, ...]
    layout: Layout
    step: StepTime
    memory: MemoryEstimate | None


@dataclass(frozen=True)
class Plan:
    """The layouts found for a request, best first.

    `source` with `overrides` is the recipe on the requested GPUs, and `parents` what a recipe for a layout extends.
    `bases` are its arguments in each precision. `refused` says why the rules refuse layouts that were faster. `own` is
    the recipe's own layout; None for a model, or if the rules refuse it.
    """

    source: RecipeSource
    parents: tuple[str, ...]
    overrides: tuple[str, ...]
    target: Target
    bases: tuple[Change, ...]
    found: Search
    layouts: tuple[Planned, ...]
    refused: tuple[str, ...]
    own: Planned | None

    @property
    def faster_alike(self) -> Layout | None:
        """The best layout of the sizes of the recipe's own, if it is at least 1 % faster and not the best of all."""
        if self.own is None:
            return None
        family, own_ms, best_ms = self.own.layout.family, self.own.step.ms, self.layouts[0].step.ms
        alike = next((layout for layout in self.found.layouts if layout.family == family), None)
        if alike is None or alike.step.ms > 0.99 * own_ms or alike.step.ms <= best_ms:
            return None
        return alike


def plan_layouts(request: PlanRequest, say: Callable[[str], None] | None = None) -> Plan:
    """Search for layouts. Raises UserError if there is none, with exit code 1.

    `say` receives remarks, such as an assumption about the cluster's network.
    """
    with tempfile.TemporaryDirectory() as folder:
        source, parents = source_of(request.recipe, request.gpu, request.precisions, Path(folder))
        overrides = _overrides(request, source, len(parents) > 1)
        bases = tuple(base_of(source, overrides, name, request.cluster) for name in request.precisions or (None,))
        target = target_of(source, overrides, request.overrides, request.cluster, say)
        is_recipe = len(parents) == 1  # a model of the pack has no layout
        # Some layouts are refused by the rules, so search for more than are shown.
        found = search(bases, target, 2 * request.top + 4, by_memory=request.by_memory, own=is_recipe)
        layouts, refused = accepted(found, source, overrides, target, request.top)
        if not layouts:
            raise nothing_planned(found, bases, target, refused)
        own = own_layout(source, overrides, target) if is_recipe else None
    return Plan(source, parents, overrides, target, bases, found, tuple(layouts), tuple(refused), own)


def _overrides(request: PlanRequest, source: RecipeSource, is_model: bool) -> tuple[str, ...]:
    """Return the request's overrides, with the requested GPUs and batch."""
    resources = resource_overrides(source, request.overrides, request.gpu, request.gpus, request.nodes)
    overrides = [*request.overrides, *resources]
    # A model has no sequence length, but the written recipe needs one.
    sequence = request.sequence or (SEQUENCE if is_model else None)
    if sequence:
        overrides.append(f"batch.sequence={sequence}")
    if request.global_batch:
        overrides.append(f"batch.global={request.global_batch}")
    return tuple(overrides)


def accepted(
    found: Search, source: RecipeSource, asked: Sequence[str], target: Target, top: int
) -> tuple[list[Planned], list[str]]:
    """Return at most `top` layouts that the rules accept, and why others are refused."""
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
    """Return the recipe with this layout, or why the rules refuse it; None if its step time is not predicted."""
    overrides = engine.translate_overrides(layout.change.overrides)
    assert overrides is not None, layout.short  # the search left out what recipes of this engine have no field for
    own = (f"{key}={value}" for key, value in overrides.items())
    words = tuple(dict.fromkeys((*asked, *own, f"batch.global={target.global_batch}")))
    run = _legal(source, words, target.cluster)
    if isinstance(run, str):
        return run
    step = _step(run, target)
    return None if step is None else Planned(words, layout, step, run_estimate(run))


def own_layout(source: RecipeSource, asked: Sequence[str], target: Target) -> Planned | None:
    """Return the recipe's own layout on the requested GPUs; None if the rules refuse it."""
    run = _legal(source, asked, target.cluster)
    if isinstance(run, str):
        return None
    step, memory = _step(run, target), run_estimate(run)
    if step is None or memory is None:
        return None
    return Planned(tuple(asked), Layout(Change(timed_arguments(run)), step, memory), step, memory)


def _legal(source: RecipeSource, words: Sequence[str], cluster: Cluster | None) -> ResolvedRun | str:
    """Return the run of a recipe with these overrides on a cluster, or why the rules refuse it."""
    try:
        prepared = prepare(source, words)
        result = check(prepared, cluster, layers=("rules",))
    except UserError as problems:
        return problems.problems[0].message
    return resolve_run(prepared, cluster) if result.ok else result.problems[0].message


def _step(run: ResolvedRun, target: Target) -> StepTime | None:
    return step_time_at(timed_arguments(run), target.gpus, target.global_batch, target.speeds)


def nothing_planned(found: Search, bases: Sequence[Change], target: Target, refused: Sequence[str]) -> UserError:
    """Return the error that explains why no layout was found."""
    on = f"{target.gpus} {target.gpu.name}"
    if refused:
        return error("no-layout", f"the rules refuse every layout on {on}: {refused[0]}", None, None, ANSWER_IS_NO)
    if found.misses:
        least = found.misses[0]
        message = (
            f"the model does not fit {on}: the smallest layout found ({least.short}) needs "
            f"{least.memory.total / 2**30:,.0f} GiB, more than {LIMIT:.0%} of {target.gpu.memory_gib:g}"
        )
        return error("does-not-fit", message, "--gpus", "use more GPUs, or GPUs with more memory", ANSWER_IS_NO)
    if not found.legal:
        return _nothing_divides(bases, target)
    message = f"the model does not fit {on}: its weights and gradients alone exceed {target.gpu.memory_gib:g} GiB a GPU"
    return error("does-not-fit", message, "--gpus", "use more GPUs, or GPUs with more memory", ANSWER_IS_NO)


def _nothing_divides(bases: Sequence[Change], target: Target) -> UserError:
    """Return the error for a target that nothing divides: because of overrides, the batch or the model."""
    layers = whole(bases[0].args, "num_layers")
    message = f"no division of {target.gpus} {target.gpu.name} "
    message += f"fits a global batch of {target.global_batch} and {layers} layers"
    stated = []
    for key, value in target.fixed.items():
        if key.startswith(("parallel.", "batch.micro")):
            stated.append(f"{key}={value}")
    if stated:
        message += f" with {', '.join(stated)}"
        fix = "remove these settings, or choose values that divide the batch and layers"
        return error("no-layout", message, "--set", fix, ANSWER_IS_NO)
    more = -(-target.global_batch // target.gpus) * target.gpus
    fix = "another number of GPUs"
    if more != target.global_batch:
        fix = f"for example --global-batch {more}"
    return error("no-layout", message, "--gpus", fix, ANSWER_IS_NO)

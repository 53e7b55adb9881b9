"""Turn recipes into the starts of a search: short runs, the options that the check accepts, and predictions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from fp8launch.check.checker import check_all
from fp8launch.check.resolved_run import ResolvedRun, resolve_run
from fp8launch.check.validation import UNKNOWN_ARGUMENTS
from fp8launch.cluster.profile import Cluster
from fp8launch.diagnostics import Problem, UserError, error, errors_in
from fp8launch.job.prepared import Prepared, prepare
from fp8launch.plugins.estimate.fit import run_estimate
from fp8launch.plugins.plan.step_time import StepTime, predict_step
from fp8launch.plugins.tune.knobs import Knob, Option
from fp8launch.plugins.tune.state import Candidate, Start
from fp8launch.recipe.load import RecipeSource
from fp8launch.submit.grid import Point, point_key
from fp8launch.untyped import as_int

# Two iterations after the start of the process are slow; five are left even if half of the others are warm-up.
ITERATIONS, FEWER_ITERATIONS = 12, 10
# Steps with a longer predicted time are measured in fewer iterations.
LONG_STEP_MS = 2000.0
# A trial's global batch is reduced to keep its training this short, but not below this many micro batches a step:
# work that is done once a step (optimizer, gradient reduction) must keep about its share of the time.
TRAIN_SECONDS, MICRO_BATCHES = 45.0, 8
# On H200 a run needs 35 to 50 s before its first iteration and 10 to 30 s after its last
# (benchmarks/h200/layouts.md).
START_SECONDS = 60.0
# A trial is stopped after this time for its start, image download included, plus three times its predicted training.
START_AT_MOST = 600.0


@dataclass(frozen=True)
class Base:
    """A recipe as a short run of `iterations` iterations on a cluster. `overrides` are the user's, then `tune`'s."""

    name: str
    source: RecipeSource
    overrides: tuple[str, ...]
    prepared: Prepared
    iterations: int
    cluster: Cluster

    def variant(self, values: Mapping[str, Any], repeat: int = 1) -> tuple[Point, Prepared]:
        """Return a point of the study and its prepared run. Raises UserError."""
        point = Point(self.name, None, values, repeat)
        return point, prepare(self.source, [*self.overrides, *point.overrides])

    @cached_property
    def prediction(self) -> Prediction:
        return predict(self.prepared, self.cluster)


@dataclass(frozen=True)
class Prediction:
    """What the speed and memory models predict for a run; None if they do not cover it."""

    step: StepTime | None = None
    peak_gib: float | None = None
    needs_gib: float | None = None

    @property
    def step_ms(self) -> float | None:
        return None if self.step is None else self.step.ms


@dataclass(frozen=True)
class Refused:
    """An option that the check refuses, with the first reason."""

    name: str
    why: str


@dataclass(frozen=True)
class Begin:
    """A start of the search, the overrides of its options by name, and the options that the check refused.

    `step` is the predicted step of the start.
    """

    start: Start
    overrides: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    refused: tuple[Refused, ...] = ()
    step: StepTime | None = None


def predict(prepared: Prepared, cluster: Cluster | None = None) -> Prediction:
    """Predict the step on a cluster, the largest allocation in GiB, and the memory needed with reserves in GiB."""
    run = resolve_run(prepared, cluster)
    if not run.is_estimated:
        return Prediction()
    step, memory = predict_step(run), run_estimate(run)
    if memory is None:
        return Prediction(step)
    return Prediction(step, memory.peak / 2**30, memory.total / 2**30)


# --- short runs -------------------------------------------------------------------------------------------------------


def bases_of(
    sources: Mapping[str, RecipeSource],
    overrides: Sequence[str],
    iterations: int | None,
    global_batch: int | None,
    cluster: Cluster,
) -> list[Base]:
    """Return recipes by name as short runs, with one global batch if the recipes share theirs. Raises UserError."""
    bases = [base_of(name, source, overrides, iterations, global_batch, cluster) for name, source in sources.items()]
    wholes = {prepare(base.source, overrides).layout.global_batch for base in bases}
    layouts = [base.prepared.layout for base in bases]
    shorter = {layout.global_batch for layout in layouts}
    if len(wholes) > 1 or len(shorter) == 1:
        return bases
    step = math.lcm(*(layout.dp * layout.micro_batch for layout in layouts))
    common = _common_batch(wholes.pop(), step, max(shorter))
    return [base_of(name, source, overrides, iterations, common, cluster) for name, source in sources.items()]


def _common_batch(whole: int, step: int, least: int) -> int:
    """Return the smallest divisor of the recipes' global batch that is a multiple of `step` and at least `least`."""
    for size in range(step, whole, step):
        if size >= least and whole % size == 0:
            return size
    return whole


def base_of(
    name: str,
    source: RecipeSource,
    overrides: Sequence[str],
    iterations: int | None,
    global_batch: int | None,
    cluster: Cluster,
) -> Base:
    """Return a recipe as a short run. Raises UserError if the recipe is more than one run."""
    whole = prepare(source, overrides)
    loaded = whole.loaded
    for section, fix in (("phases", "--set phases=null"), ("axes", "tune one point of it"), ("nodes", "set one size")):
        if getattr(loaded.recipe, section):
            message = f"`{section}` makes several runs of the recipe, and tune improves one"
            raise error("tune-one-run", message, loaded.where(section), fix)
    run = resolve_run(whole, cluster)
    expected = predict(whole, cluster).step_ms
    batch = global_batch or _shorter(run, expected)
    step_ms = (expected or 0.0) * batch / run.layout.global_batch
    if iterations:
        count = iterations
    elif step_ms > LONG_STEP_MS:
        count = FEWER_ITERATIONS
    else:
        count = ITERATIONS
    words = tuple(_short_run(whole, run, count, batch))
    return Base(name, source, (*overrides, *words), prepare(source, [*overrides, *words]), count, cluster)


def _shorter(run: ResolvedRun, step_ms: float | None) -> int:
    """Return the global batch of trials: the recipe's, or a divisor of it if steps take long."""
    batch, replicas = run.layout.global_batch, run.layout.dp * run.layout.micro_batch
    least = MICRO_BATCHES * max(run.layout.pp, 1)
    smallest = batch
    for micro_batches in range(batch // replicas, least - 1, -1):
        size = micro_batches * replicas
        if batch % size:
            continue
        if step_ms is None or FEWER_ITERATIONS * step_ms * size / batch <= 1000 * TRAIN_SECONDS:
            return size
        smallest = size
    return smallest


def _short_run(whole: Prepared, run: ResolvedRun, iterations: int, batch: int) -> Iterator[str]:
    recipe = whole.loaded.recipe
    yield f"train.iterations={iterations}"
    if recipe.train.warmup is not None:
        yield f"train.warmup={min(recipe.train.warmup, 2)}"
    if batch != run.layout.global_batch:
        yield f"batch.global={batch}"
    if recipe.checkpoint.dir is not None:
        yield from ("checkpoint.dir=null", "checkpoint.interval=null", "survive.attempts=1")
    for name in ("profile", "profile_iteration", "tensor_stats"):
        if getattr(recipe.launch, name) is not None:
            yield f"launch.{name}=null"
    if run.engine.covers("megatron_lm"):
        yield from ("megatron.log_interval=1", "megatron.eval_iters=0")


def seconds_at_most(base: Base) -> float:
    """Return the seconds after which a trial is stopped."""
    return START_AT_MOST + 3 * training_seconds(base)


def trial_seconds(base: Base) -> float:
    """Return the seconds that a trial is expected to take, including its start and end."""
    return START_SECONDS + training_seconds(base)


def training_seconds(base: Base) -> float:
    """Return the predicted seconds of a trial's iterations, or 0 without a prediction."""
    return (base.prediction.step_ms or 0.0) / 1000 * base.iterations


# --- options ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Asked:
    """An option of a knob, with the untried ways to set it."""

    knob: Knob
    option: Option
    ways: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True)
class _Accepted:
    """An option with overrides that the check accepts, and the resulting run."""

    knob: Knob
    option: Option
    overrides: Mapping[str, Any]
    prepared: Prepared


def begin(base: Base, knobs: Sequence[Knob], say: Callable[[str], None]) -> Begin:
    """Return the options of these knobs that change the run and pass the check, with their predictions."""
    run = resolve_run(base.prepared, base.cluster)
    asked = list(_asked(base, knobs, run))
    order = [one.option.name for one in asked]
    accepted: dict[str, _Accepted] = {}
    refused: dict[str, str] = {}
    while asked:
        found, reasons = _judged(base, asked, say)
        accepted |= found
        refused |= reasons
        asked = [replace(one, ways=one.ways[1:]) for one in asked if one.option.name in reasons and one.ways[1:]]
    expected = base.prediction
    candidates = []
    overrides = {}
    for name in order:
        if name in accepted:
            candidates.append(_candidate(accepted[name], base.cluster, expected, run))
            overrides[name] = accepted[name].overrides
    left_out = tuple(Refused(name, why) for name, why in refused.items() if name not in accepted)
    return Begin(Start(base.name, tuple(candidates), expected.needs_gib), overrides, left_out, expected.step)


def _asked(base: Base, knobs: Sequence[Knob], run: ResolvedRun) -> Iterator[_Asked]:
    """Yield the options that the recipe's engine can set."""
    for knob in knobs:
        for option in knob.options(run):
            ways = []
            for overrides in (option.overrides, *option.instead):
                way = base.prepared.engine.translate_overrides(overrides)
                if way is not None:
                    ways.append(way)
            if ways:
                yield _Asked(knob, option, tuple(ways))


def _judged(
    base: Base, asked: Sequence[_Asked], say: Callable[[str], None]
) -> tuple[dict[str, _Accepted], dict[str, str]]:
    """Check the first untried way of each option. Return accepted options and reasons for refusals, by name.

    If Megatron's validators could not run, a way that they might refuse is accepted only if it is the last one.
    """
    same = point_key(Point(base.name, None), base.prepared)
    changed: list[tuple[_Asked, _Accepted]] = []
    refused: dict[str, str] = {}
    for one in asked:
        try:
            _, prepared = base.variant(one.ways[0])
        except UserError as exc:
            refused[one.option.name] = exc.problems[0].message
            continue
        if point_key(Point(base.name, None), prepared) != same:
            changed.append((one, _Accepted(one.knob, one.option, one.ways[0], prepared)))
    results = check_all([way.prepared for _, way in changed], base.cluster, say=say, layers=("rules", "megatron"))
    accepted = {}
    for (one, way), result in zip(changed, results, strict=True):
        if not result.ok:
            refused[one.option.name] = first_error(result.problems)
        elif result.layers["megatron"] not in ("ran", UNKNOWN_ARGUMENTS.state) and one.ways[1:]:
            refused[one.option.name] = result.layers["megatron"]
        else:
            accepted[one.option.name] = way
    return accepted, refused


def first_error(problems: Iterable[Problem]) -> str:
    """Return the message of the first error."""
    return errors_in(problems)[0].message


def _candidate(one: _Accepted, cluster: Cluster, base: Prediction, run: ResolvedRun) -> Candidate:
    found = predict(one.prepared, cluster)
    gain = one.option.prior
    if base.step_ms and found.step_ms:
        gain *= base.step_ms / found.step_ms
    else:
        gain *= one.option.unpredicted
    more = None
    if base.needs_gib is not None and found.needs_gib is not None:
        more = found.needs_gib - base.needs_gib
    # A larger micro batch needs more memory, even if the memory model does not cover the run.
    level = as_int(one.option.overrides.get("batch.micro"))
    if level is not None and level <= run.layout.micro_batch:
        level = None
    return Candidate(one.option.name, one.knob.name, gain, more, level)

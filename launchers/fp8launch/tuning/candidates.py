"""From recipes to the starts of a search: settings of short runs, options that the check accepts, predictions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fp8launch.check.checker import check_all
from fp8launch.check.memory import run_estimate
from fp8launch.check.resolved_run import ResolvedRun, resolve_run
from fp8launch.cluster.profile import Cluster
from fp8launch.diagnostics import Problem, UserError, error
from fp8launch.job.prepared import Prepared, prepare
from fp8launch.planning.step_time import step_time
from fp8launch.recipe.load import RecipeSource
from fp8launch.submit.grid import Point, point_key
from fp8launch.tuning.knobs import Knob, Option
from fp8launch.tuning.search import Candidate, Start

# Lines of a run: two of a process start, some of warm-up, and five that count even if half of the rest is warm-up.
ITERATIONS, FEWER_ITERATIONS = 12, 10
# Steps that are predicted to take longer are measured in fewer iterations.
LONG_STEP_MS = 2000.0
# Trials train no longer than this while their steps keep as many micro batches, so that what comes once a step
# (optimizer, gradients) keeps nearly its share.
TRAIN_SECONDS, MICRO_BATCHES = 45.0, 8
# From submission to the first iteration, and to the end: 35 to 50 s and 10 to 30 s on H200 (benchmarks/h200/NOTES.md).
START_SECONDS = 60.0
# A trial is ended that takes longer than its start, with an image to fetch, and three times its predicted training.
START_AT_MOST = 600.0


@dataclass(frozen=True)
class Base:
    """A recipe with what makes it a trial: overrides of the user, then of `tune`."""

    name: str
    source: RecipeSource
    overrides: tuple[str, ...]
    prepared: Prepared

    def variant(self, values: Mapping[str, Any], repeat: int = 1) -> tuple[Point, Prepared]:
        """A point of the study, and the run that it stands for. Raises UserError."""
        point = Point(self.name, None, values, repeat)
        return point, prepare(self.source, [*self.overrides, *point.overrides])


@dataclass(frozen=True)
class Prediction:
    """What the models say of a run; None where they say nothing."""

    step_ms: float | None = None
    peak_gib: float | None = None
    needs_gib: float | None = None


@dataclass(frozen=True)
class Refused:
    """An option that the check refuses, with its first reason."""

    name: str
    why: str


@dataclass(frozen=True)
class Begin:
    """A start of the search, the overrides of its options by name, and what was left out of it."""

    start: Start
    overrides: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    refused: tuple[Refused, ...] = ()


def predict(prepared: Prepared) -> Prediction:
    """The time of a step in ms, the largest allocation and the need with reserves in GiB."""
    run = resolve_run(prepared)
    if not run.uses_te:
        return Prediction()
    step = step_time(run.arguments, run.layout.world, run.layout.global_batch, run.gpu)
    memory = run_estimate(run)
    return Prediction(
        step.ms if step else None,
        memory.peak / 2**30 if memory else None,
        memory.total / 2**30 if memory else None,
    )


# --- short runs -------------------------------------------------------------------------------------------------------


def base_of(
    name: str, source: RecipeSource, overrides: Sequence[str], iterations: int | None, global_batch: int | None
) -> Base:
    """A recipe as a short run. Raises UserError for one that is no single run."""
    whole = prepare(source, overrides)
    loaded = whole.loaded
    for section, fix in (("phases", "--set phases=null"), ("axes", "tune one point of it"), ("nodes", "set one size")):
        if getattr(loaded.recipe, section):
            message = f"`{section}` makes several runs of the recipe, and tune improves one"
            raise error("tune-one-run", message, loaded.where(section), fix)
    run = resolve_run(whole)
    expected = predict(whole).step_ms
    batch = global_batch or _shorter(run, expected)
    step_ms = expected * batch / run.layout.global_batch if expected else None
    count = iterations or (FEWER_ITERATIONS if step_ms and step_ms > LONG_STEP_MS else ITERATIONS)
    words = tuple(_short_run(whole, run, count, batch))
    return Base(name, source, (*overrides, *words), prepare(source, [*overrides, *words]))


def _shorter(run: ResolvedRun, step_ms: float | None) -> int:
    """The global batch of trials: a divisor of the recipe's, where its steps take long."""
    batch, replicas = run.layout.global_batch, run.layout.dp * run.layout.micro_batch
    least = MICRO_BATCHES * max(run.layout.pp, 1)
    for micro_batches in range(batch // replicas, least - 1, -1):
        size = micro_batches * replicas
        if batch % size == 0 and (step_ms is None or FEWER_ITERATIONS * step_ms * size / batch <= 1000 * TRAIN_SECONDS):
            return size
    smallest = [n * replicas for n in range(least, batch // replicas + 1) if batch % (n * replicas) == 0]
    return min(smallest, default=batch)


def _short_run(whole: Prepared, run: ResolvedRun, iterations: int, batch: int) -> Iterator[str]:
    recipe = whole.loaded.recipe
    yield f"train.iterations={iterations}"
    if recipe.train.warmup is not None:
        yield f"train.warmup={min(recipe.train.warmup, 2)}"
    if batch != run.layout.global_batch:
        yield f"batch.global={batch}"
    if recipe.checkpoint.dir is not None:
        yield from ("checkpoint.dir=null", "checkpoint.interval=null", "survive.attempts=1")
    for name in ("profile_iteration", "tensor_stats"):
        if getattr(recipe.launch, name) is not None:
            yield f"launch.{name}=null"
    if run.engine.covers("megatron_lm"):
        yield from ("megatron.log_interval=1", "megatron.eval_iters=0")


def seconds_at_most(base: Base) -> float:
    """After how long a trial is ended."""
    return START_AT_MOST + 3 * training_seconds(base)


def trial_seconds(base: Base) -> float:
    """What a trial is expected to take, start and end included."""
    return START_SECONDS + training_seconds(base)


def training_seconds(base: Base) -> float:
    """Predicted seconds of a trial's iterations; 0 where they are not predicted."""
    step = predict(base.prepared).step_ms
    return 0.0 if step is None else step / 1000 * base.prepared.args.integer("train_iters", ITERATIONS)


# --- options ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Way:
    """One way to set an option."""

    knob: Knob
    option: Option
    overrides: Mapping[str, Any]
    prepared: Prepared
    level: int | None


def begin(base: Base, knobs: Sequence[Knob], cluster: Cluster, say: Callable[[str], None]) -> Begin:
    """All options of these knobs that change the run and that the check accepts, with their predictions."""
    run = resolve_run(base.prepared)
    key = point_key(Point(base.name, None), base.prepared)
    refused: dict[str, str] = {}
    ways: list[_Way] = []
    waiting: list[tuple[Knob, Option, tuple[Mapping[str, Any], ...], int | None]] = []
    for knob in knobs:
        for option in knob.options(run):
            ways_of_saying = [base.prepared.engine.spelled(one) for one in (option.overrides, *option.instead)]
            said = tuple(one for one in ways_of_saying if one is not None)
            if said:
                waiting.append((knob, option, said, _level(knob, option, run)))
    accepted: dict[str, _Way] = {}
    while waiting:
        ways = []
        for knob, option, left, level in waiting:
            try:
                point, prepared = base.variant(left[0])
            except UserError as exc:
                refused[option.name] = exc.problems[0].message
                continue
            if point_key(Point(base.name, None), prepared) != key:
                ways.append(_Way(knob, option, point.values, prepared, level))
        results = check_all([way.prepared for way in ways], cluster, say=say, layers=("rules", "megatron"))
        for way, result in zip(ways, results, strict=True):
            if result.ok:
                accepted[way.option.name] = way
            else:
                refused[way.option.name] = _first_error(result.problems)
        later = []
        for knob, option, left, level in waiting:
            if option.name in refused and option.name not in accepted and left[1:]:
                later.append((knob, option, left[1:], level))
        waiting = later
    order = [option.name for knob in knobs for option in knob.options(run)]
    chosen = [accepted[name] for name in order if name in accepted]
    expected = predict(base.prepared)
    candidates = tuple(_candidate(way, expected) for way in chosen)
    return Begin(
        Start(base.name, candidates, expected.needs_gib),
        {way.option.name: way.overrides for way in chosen},
        tuple(Refused(name, why) for name, why in refused.items() if name not in accepted),
    )


def _first_error(problems: Sequence[Problem]) -> str:
    return next(problem.message for problem in problems if problem.severity == "error")


def _level(knob: Knob, option: Option, run: ResolvedRun) -> int | None:
    """Micro batches need ever more memory, also where memory is not predicted."""
    size = option.overrides.get("batch.micro")
    return size if isinstance(size, int) and size > run.layout.micro_batch else None


def _candidate(way: _Way, base: Prediction) -> Candidate:
    found = predict(way.prepared)
    gain = way.option.prior
    if base.step_ms and found.step_ms:
        gain *= base.step_ms / found.step_ms
    more = None
    if base.needs_gib is not None and found.needs_gib is not None:
        more = found.needs_gib - base.needs_gib
    return Candidate(way.option.name, way.knob.name, gain if math.isfinite(gain) else 1.0, more, way.level)

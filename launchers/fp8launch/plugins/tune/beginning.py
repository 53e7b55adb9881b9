"""Start or continue a search: its knobs, the common size of its recipes, its limits and its cost."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any

from fp8launch.diagnostics import UserError, did_you_mean, error
from fp8launch.hardware.gpus import gpu
from fp8launch.plugins.plan.predicted import speeds_as_json, speeds_in_words
from fp8launch.plugins.tune.candidates import Base, begin, seconds_at_most, trial_seconds
from fp8launch.plugins.tune.knobs import Knob, knobs
from fp8launch.plugins.tune.memory_fit import fits
from fp8launch.plugins.tune.record import Record
from fp8launch.plugins.tune.state import Limits, State, Variant, seconds_spent, trials_run
from fp8launch.submit.grid import Point, point_key
from fp8launch.wording import counted

# The number of trials if the user sets no limit.
TRIALS = 12


def choose_knobs(names: str | None, numerics: str) -> list[Knob]:
    """Return the knobs of a comma-separated list, or all of them.

    Raises UserError for unknown knobs, and for knobs that change numerics unless `numerics` is "allow".
    """
    known = knobs()
    chosen = []
    for name in [part.strip() for part in names.split(",")] if names else known:
        if name not in known:
            fix = did_you_mean(name, known, f"knobs: {', '.join(known)}")
            raise error("unknown-knob", f"'{name}' is not a knob", "--knobs", fix)
        if numerics == "allow" or known[name].keeps_numerics:
            chosen.append(known[name])
        elif names:
            message = f"the knob '{name}' changes what is computed"
            raise error("changes-numerics", message, "--knobs", "add --numerics allow")
    return chosen


def common_size(bases: Sequence[Base]) -> int:
    """Return the number of GPUs of all recipes. Raises UserError if they differ in GPUs or global batch."""
    layouts = [base.prepared.layout for base in bases]
    if len(set(map(attrgetter("world", "global_batch"), layouts))) > 1:
        message = "the recipes differ in GPUs or global batch, so their speeds cannot be compared"
        raise error("tune-sizes", message, "RECIPE", "tune them one by one, or set resources and --global-batch")
    return layouts[0].world


def limits(gpu_hours: float | None, minutes: float | None, trials: int | None, gpus: int) -> Limits:
    """Return the limits of a search. Without any, it stops after `TRIALS` trials."""
    seconds = None
    if gpu_hours is not None:
        seconds = gpu_hours * 3600 / gpus
    if trials is None and gpu_hours is None and minutes is None:
        trials = TRIALS
    return Limits(trials, seconds)


def study_name(bases: Sequence[Base], chosen: Sequence[Knob], numerics: str) -> str:
    """Return the name of a search's study.

    The name depends only on the recipes, knobs and short runs, so a repeated command finds its search.
    """
    keys = [point_key(Point(base.name, None), base.prepared) for base in bases]
    content = [keys, [knob.name for knob in chosen], numerics]
    digest = hashlib.sha256(json.dumps(content).encode()).hexdigest()[:6]
    return f"{bases[0].prepared.loaded.recipe.name}-tune-{digest}"


def new_record(bases: Sequence[Base], chosen: Sequence[Knob], gpus: int, say: Callable[[str], None]) -> Record:
    """Return the record of a new search, with the changes that the check accepts."""
    starts, overrides, refused, memory = [], [], [], []
    basis: Mapping[str, Any] | None = None
    remarks: tuple[str, ...] = ()
    for base in bases:
        found = begin(base, chosen, say)
        starts.append(found.start)
        overrides.append(found.overrides)
        refused.append(found.refused)
        if found.step is not None:
            basis, remarks = speeds_as_json(found.step.speeds), tuple(speeds_in_words(found.step.speeds))
        memory.append(gpu(base.prepared.loaded.recipe.resources.gpu).memory_gib)
    expected = max(map(trial_seconds, bases))
    state = State(tuple(starts), capacity_gib=min(memory) or None, expected_seconds=expected)
    return Record(state, tuple(overrides), tuple(refused), gpus, basis=basis, remarks=remarks)


def need_same_search(found: Record, bases: Sequence[Base], study: str, identity: str) -> None:
    """Raise UserError if a study is a search with other recipes, settings or knobs."""
    starts = [start.name for start in found.state.starts]
    same = found.identity == identity
    if not found.identity:
        same = starts == [base.name for base in bases]
    if not same:
        message = f"the study {study} is a search from {', '.join(starts)}, with other settings or knobs"
        raise error("other-tune", message, "--study", "choose another name, or repeat the command that began it")


def nothing_to_change(bases: Sequence[Base], numerics: str, say: Callable[[str], None]) -> UserError:
    """Return the error for knobs without an effect on these recipes; its fix lists knobs that have one."""
    known = choose_knobs(None, numerics)
    legal: set[str] = set()
    for base in bases:
        legal |= {candidate.knob for candidate in begin(base, known, say).start.candidates}
    message = "none of these knobs changes this recipe in a way that the check accepts"
    fix = "no knob does; --numerics allow adds more knobs"
    if legal:
        names = [knob.name for knob in known if knob.name in legal]
        fix = f"knobs that do: {', '.join(names)}"
    return error("tune-nothing", message, "--knobs", fix)


def gpu_hours_at_most(record: Record, bases: Sequence[Base], minutes: float | None) -> float:
    """Return the most GPU-hours that the rest of a search can use within `minutes`."""
    bounds = []
    if record.state.limits.seconds is not None:
        bounds.append(record.state.limits.seconds - seconds_spent(record.state))
    if minutes is not None:
        bounds.append(60 * minutes)
    if record.state.limits.trials is not None:
        left = max(record.state.limits.trials - trials_run(record.state), 0)
        bounds.append(left * max(map(seconds_at_most, bases)))
    return max(min(bounds), 0.0) * record.gpus / 3600


def describe_cost(record: Record, bases: Sequence[Base], minutes: float | None) -> str:
    """Describe a search in a sentence: the changes, the size and length of a trial, and the maximum GPU-hours."""
    changes = 0
    for number, start in enumerate(record.state.starts):
        changes += sum(fits(record.state, Variant(number, (change.name,))) for change in start.candidates)
    shape = bases[0].prepared
    need = shape.loaded.recipe.resources
    devices = f"{record.gpus} {need.gpu}"
    if need.gpu == "cpu":
        devices = f"{counted(record.gpus, 'process')} on CPUs"
    done = ""
    if record.state.results:
        done = f"; {counted(len(record.state.results), 'trial')} done"
    return (
        f"{counted(changes, 'change')} to try on {devices}: runs of {bases[0].iterations} iterations with global "
        f"batch {shape.layout.global_batch}, about {record.state.expected_seconds:,.0f} s each{done}; "
        f"at most {gpu_hours_at_most(record, bases, minutes):,.2f} GPU-hours"
    )

"""The state of a search: recipes with their candidate changes, trials with their outcomes, and limits."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Status = Literal["ok", "out_of_memory", "failed", "refused", "skipped"]


@dataclass(frozen=True)
class Candidate:
    """A change of a recipe that the check accepts.

    `gain` is the predicted ratio of speeds and `memory_gib` the predicted change of memory. Options of a knob with a
    higher `level` need more memory.
    """

    name: str
    knob: str
    gain: float = 1.0
    memory_gib: float | None = None
    level: int | None = None


@dataclass(frozen=True)
class Start:
    """A recipe, the candidate changes to it, and its predicted total memory (None without a prediction)."""

    name: str
    candidates: tuple[Candidate, ...]
    memory_gib: float | None = None


@dataclass(frozen=True)
class Variant:
    """A start, by its index, with the names of the changes applied to it."""

    start: int = 0
    changes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Trial:
    variant: Variant
    repeat: int = 1


@dataclass(frozen=True)
class Outcome:
    """The end of a trial.

    `speeds` are the tokens/s/GPU of the measured iterations, `step_ms` and `tflops` (per GPU) their medians.
    `predicted_gib` and `peak_gib` are the largest allocation, `needs_gib` is the predicted memory with reserves.
    `seconds` is how long its processes were alive. `refused` and `skipped` trials never ran. `why` is the reason for
    any status but `ok`.
    """

    status: Status
    run: str = ""
    speeds: tuple[float, ...] = ()
    step_ms: float | None = None
    tflops: float | None = None
    predicted_ms: float | None = None
    predicted_gib: float | None = None
    needs_gib: float | None = None
    peak_gib: float | None = None
    seconds: float = 0.0
    why: str = ""


@dataclass(frozen=True)
class Limits:
    """Limits of a search: the number of trials and their total seconds. None means no limit."""

    trials: int | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class State:
    """The state of a search.

    `expected_seconds` is the estimate for a trial before the first one was measured. `seconds_left` is the remaining
    wall-clock time, None without a limit. `cut_seconds` were spent on a trial that was cut off.
    """

    starts: tuple[Start, ...]
    results: tuple[tuple[Trial, Outcome], ...] = ()
    limits: Limits = field(default_factory=Limits)
    capacity_gib: float | None = None
    expected_seconds: float = 0.0
    seconds_left: float | None = None
    cut_seconds: float = 0.0


# The number of latest trials from which the length of the next one is estimated.
_LATEST = 3


def seconds_spent(state: State) -> float:
    """Return how long the processes of all trials were alive, in seconds."""
    return state.cut_seconds + sum(outcome.seconds for _, outcome in state.results)


def trials_run(state: State) -> int:
    """Return the number of trials whose processes were started."""
    return sum(outcome.status not in ("refused", "skipped") for _, outcome in state.results)


def expected_seconds(state: State) -> float:
    """Estimate the seconds of another trial: the longest of the latest successful ones.

    The first trial takes longer than the others because it also fills the caches.
    """
    took = [outcome.seconds for _, outcome in state.results if outcome.status == "ok" and outcome.seconds]
    return max(took[-_LATEST:], default=state.expected_seconds)


def candidates_of(state: State, best: Variant) -> dict[str, Candidate]:
    return {candidate.name: candidate for candidate in state.starts[best.start].candidates}


def gain_over(state: State, best: Variant, variant: Variant) -> float:
    """Return the predicted speed of a variant divided by the best variant's."""
    known = candidates_of(state, best)
    gain = 1.0
    for name in variant.changes:
        gain *= known[name].gain
    for name in best.changes:
        gain /= known[name].gain
    return gain


def predicted_gain(state: State, best: Variant, variant: Variant, step_ms: float | None = None) -> float:
    """Return the ratio of the two variants' predicted speeds, each predicted with all of its changes.

    `step_ms` is the variant's predicted step time, by default the one recorded with its outcome. If either step is not
    predicted, or the speed model does not cover the change, fall back to `gain_over`, which multiplies single gains.
    """
    steps = {trial.variant: outcome.predicted_ms for trial, outcome in state.results if outcome.predicted_ms}
    here, there = step_ms or steps.get(variant), steps.get(best)
    if here and there and here != there:
        return there / here
    return gain_over(state, best, variant)


def describe(variant: Variant) -> str:
    """Return the changes of a variant as text."""
    return " + ".join(variant.changes) or "the unchanged recipe"


def speed_in_words(tflops: float | None, step_ms: float | None) -> str:
    """Format the speed of a run in TFLOP/s/GPU, or as a step time if that is unknown or below 1."""
    if tflops and tflops >= 1:
        return f"{tflops:,.1f} TFLOP/s/GPU"
    return f"{step_ms or 0:,.1f} ms a step"

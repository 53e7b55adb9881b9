"""What the search of `tune` knows: recipes with the changes to them, trials and their outcomes, limits."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Status = Literal["ok", "out_of_memory", "failed", "refused", "skipped"]


@dataclass(frozen=True)
class Candidate:
    """A change that the check accepts on its start.

    `gain` is the predicted ratio of speeds, `memory_gib` the predicted change of memory. `level` orders options of a
    knob that need ever more memory.
    """

    name: str
    knob: str
    gain: float = 1.0
    memory_gib: float | None = None
    level: int | None = None


@dataclass(frozen=True)
class Start:
    """A recipe, its predicted memory in total (None where it is not predicted) and the changes to it."""

    name: str
    candidates: tuple[Candidate, ...]
    memory_gib: float | None = None


@dataclass(frozen=True)
class Variant:
    """A start with changes, by name."""

    start: int = 0
    changes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Trial:
    variant: Variant
    repeat: int = 1


@dataclass(frozen=True)
class Outcome:
    """The end of a trial.

    `speeds` are tokens/s/GPU of the iterations that count, `step_ms` and `tflops` (per GPU) their medians.
    `predicted_gib` and `peak_gib` are the largest allocation, `needs_gib` the predicted need with reserves. `seconds`
    is the time that its processes were alive. `refused` and `skipped` trials never ran; `why` says what kept them, or
    what failed.
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
    """Bounds: trials that run, and seconds of them together. None for no bound."""

    trials: int | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class State:
    """All that the search knows.

    `expected_seconds` is what a trial takes until one was measured; `seconds_left` what the wall clock leaves, None
    for all the time in the world. `cut_seconds` were spent on a trial that was cut off.
    """

    starts: tuple[Start, ...]
    results: tuple[tuple[Trial, Outcome], ...] = ()
    limits: Limits = field(default_factory=Limits)
    capacity_gib: float | None = None
    expected_seconds: float = 0.0
    seconds_left: float | None = None
    cut_seconds: float = 0.0


# Trials that say how long the next one takes.
_LATEST = 3


def seconds_spent(state: State) -> float:
    """Seconds that the processes of all trials were alive."""
    return state.cut_seconds + sum(outcome.seconds for _, outcome in state.results)


def trials_run(state: State) -> int:
    """Trials whose processes were started."""
    return sum(outcome.status not in ("refused", "skipped") for _, outcome in state.results)


def expected_seconds(state: State) -> float:
    """What another trial takes: the most of the latest that ended well; the first one also fills the caches."""
    took = [outcome.seconds for _, outcome in state.results if outcome.status == "ok" and outcome.seconds]
    return max(took[-_LATEST:], default=state.expected_seconds)


def candidates_of(state: State, best: Variant) -> dict[str, Candidate]:
    return {candidate.name: candidate for candidate in state.starts[best.start].candidates}


def gain_over(state: State, best: Variant, variant: Variant) -> float:
    """The predicted speed of a variant over that of the best."""
    known = candidates_of(state, best)
    gain = 1.0
    for name in variant.changes:
        gain *= known[name].gain
    for name in best.changes:
        gain /= known[name].gain
    return gain


def describe(variant: Variant) -> str:
    """A variant in words."""
    return " + ".join(variant.changes) or "the recipe as it is"


def speed_in_words(tflops: float | None, step_ms: float | None) -> str:
    """The speed of a run: TFLOP/s/GPU where they are known and not tiny, else the time of a step."""
    if tflops and tflops >= 1:
        return f"{tflops:,.1f} TFLOP/s/GPU"
    return f"{step_ms or 0:,.1f} ms a step"

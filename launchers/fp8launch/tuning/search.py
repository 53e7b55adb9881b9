"""The search of `tune` as a pure function: what has been measured so far -> the next trial, or the end.

Every start (a recipe) is run once; the fastest one is improved. Changes are tried one at a time on the best so far,
those with the best predicted speed-up first, and kept where the interval of the ratio says so. Then pairs of changes
that were not kept. Only a trial whose interval holds both 1 and a gain worth having is repeated.
"""

from __future__ import annotations

import functools
import itertools
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from fp8launch.report.intervals import Interval, ratio_interval

# A gain below this is not worth another run.
LEAST_GAIN = 0.003
# Runs of one variant at most; then an undecided one is not kept.
MOST_RUNS = 3
# A change that is predicted to be slower than this is not tried alone.
LEAST_PREDICTED = 0.985
# Of the GPU's memory; at 97 % a run was seen to slow down and then end out of memory (check/memory.py).
FILLED = 0.97

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


@dataclass(frozen=True)
class Finished:
    why: str


Verdict = Literal["start", "better", "worse", "same", "undecided", "not settled", "failed"]


@dataclass(frozen=True)
class Judgement:
    """A variant against the best at that time. `ratio` is that of its speed to the best's, with its interval."""

    variant: Variant
    against: Variant | None
    verdict: Verdict
    ratio: float | None = None
    interval: Interval | None = None
    why: str = ""


@dataclass(frozen=True)
class Standing:
    """What the results say: the best variant, each variant's judgement, and the one that is undecided."""

    best: Variant | None
    judgements: Mapping[Variant, Judgement]
    undecided: Variant | None
    runs: Mapping[Variant, tuple[tuple[float, ...], ...]]


def standing(state: State) -> Standing:
    """Judge the results in their order."""
    best: Variant | None = None
    open_: Variant | None = None
    judgements: dict[Variant, Judgement] = {}
    runs: dict[Variant, tuple[tuple[float, ...], ...]] = {}
    for trial, outcome in state.results:
        variant = trial.variant
        if outcome.status == "ok":
            runs[variant] = (*runs.get(variant, ()), outcome.speeds)
        elif variant not in runs:
            judgements[variant] = Judgement(variant, best, "failed", why=outcome.why)
            continue
        if best is None:
            best = variant
            judgements[variant] = Judgement(variant, None, "start", 1.0)
            continue
        if variant != best:
            open_ = variant
        if open_ is None:
            continue
        failed_again = outcome.status != "ok"
        found = _judged(open_, best, runs, failed_again)
        judgements[open_] = found
        if found.verdict == "better":
            best = open_
        if found.verdict != "undecided":
            open_ = None
    return Standing(best, judgements, open_, runs)


def _judged(
    variant: Variant, best: Variant, runs: Mapping[Variant, tuple[tuple[float, ...], ...]], last: bool
) -> Judgement:
    mine, theirs = runs[variant], runs[best]
    interval = _interval(mine, theirs)
    ratio = _median(mine) / _median(theirs)
    if interval is None:
        return Judgement(variant, best, "failed", ratio, why="too few iterations to judge")
    verdict: Verdict = "undecided"
    if interval.low > 1:
        verdict = "better"
    elif interval.high < 1:
        verdict = "worse"
    elif interval.high < 1 + LEAST_GAIN:
        verdict = "same"
    elif last or min(len(mine), len(theirs)) >= MOST_RUNS:
        verdict = "not settled"
    return Judgement(variant, best, verdict, ratio, interval)


@functools.lru_cache(maxsize=4096)
def _interval(mine: tuple[tuple[float, ...], ...], theirs: tuple[tuple[float, ...], ...]) -> Interval | None:
    return ratio_interval(mine, theirs)


def _median(runs: tuple[tuple[float, ...], ...]) -> float:
    return statistics.median(statistics.median(speeds) for speeds in runs)


# --- what comes next --------------------------------------------------------------------------------------------------


def next_trial(state: State) -> Trial | Finished:
    """Return the next trial, or why there is none."""
    now = standing(state)
    trial = _wanted(state, now)
    if isinstance(trial, Finished):
        return trial
    if state.limits.trials is not None and trials_run(state) >= state.limits.trials:
        return Finished(f"{state.limits.trials} trials were run")
    if state.limits.seconds is not None and seconds_spent(state) + expected_seconds(state) > state.limits.seconds:
        return Finished("what is left of the budget is too little for another trial")
    if state.seconds_left is not None and expected_seconds(state) > state.seconds_left:
        return Finished("the time that is left is too short for another trial")
    return trial


def seconds_spent(state: State) -> float:
    """Seconds that the processes of all trials were alive."""
    return state.cut_seconds + sum(outcome.seconds for _, outcome in state.results)


def trials_run(state: State) -> int:
    """Trials whose processes were started."""
    return sum(outcome.status not in ("refused", "skipped") for _, outcome in state.results)


def expected_seconds(state: State) -> float:
    """What another trial takes: the most that one took, of those that ended well."""
    took = [outcome.seconds for _, outcome in state.results if outcome.status == "ok" and outcome.seconds]
    return max(took, default=state.expected_seconds)


def _wanted(state: State, now: Standing) -> Trial | Finished:
    for number in range(len(state.starts)):
        if Variant(number) not in now.judgements:
            return Trial(Variant(number))
        if now.undecided == Variant(number):
            return _again(state, now, now.undecided)
    if now.best is None:
        return Finished("no recipe ran as it is")
    if now.undecided is not None:
        return _again(state, now, now.undecided)
    for variant in itertools.chain(_singles(state, now, now.best), _pairs(state, now, now.best)):
        return Trial(variant)
    return Finished("every change was tried, or is predicted to be slower or not to fit")


def _again(state: State, now: Standing, variant: Variant) -> Trial:
    """Another run of the variant or of the best, whichever has fewer."""
    assert now.best is not None
    fewer = variant if len(now.runs[variant]) <= len(now.runs[now.best]) else now.best
    return Trial(fewer, 1 + sum(trial.variant == fewer for trial, _ in state.results))


def _candidates(state: State, best: Variant) -> dict[str, Candidate]:
    return {candidate.name: candidate for candidate in state.starts[best.start].candidates}


def _with(state: State, best: Variant, *names: str) -> Variant:
    """The best with changes laid on it; of one knob the last option holds."""
    known = _candidates(state, best)
    replaced = {known[name].knob for name in names}
    return Variant(best.start, (*(name for name in best.changes if known[name].knob not in replaced), *names))


def gain_over(state: State, best: Variant, variant: Variant) -> float:
    """The predicted speed of a variant over that of the best."""
    known = _candidates(state, best)
    gain = 1.0
    for name in variant.changes:
        gain *= known[name].gain
    for name in best.changes:
        gain /= known[name].gain
    return gain


def _singles(state: State, now: Standing, best: Variant) -> Iterator[Variant]:
    """Changes to try alone, the best prediction first."""
    tried = _tried_alone(now, best.start)
    wanted = []
    for candidate in state.starts[best.start].candidates:
        if candidate.name in tried or candidate.name in best.changes:
            continue
        variant = _with(state, best, candidate.name)
        if gain_over(state, best, variant) >= LEAST_PREDICTED and fits(state, variant):
            wanted.append(variant)
    # Sorting is stable: equal predictions come in the order of the knobs.
    yield from sorted(wanted, key=lambda variant: -gain_over(state, best, variant))


def _tried_alone(now: Standing, start: int) -> dict[str, Judgement]:
    """Changes that were tried as the last one on what was best, with their judgement."""
    found = {}
    for variant, judged in now.judgements.items():
        if variant.start != start or not variant.changes:
            continue
        before = judged.against.changes if judged.against else ()
        if sum(name not in before for name in variant.changes) == 1:
            found[variant.changes[-1]] = judged
    return found


def _pairs(state: State, now: Standing, best: Variant) -> Iterator[Variant]:
    """Pairs of changes that were not kept, if together they can be faster by what is known of each."""
    alone = _tried_alone(now, best.start)
    turned = {_candidates(state, best)[name].knob for name in best.changes}
    hopes = {}
    for candidate in state.starts[best.start].candidates:
        if candidate.knob not in turned:
            hopes[candidate.name] = _hope(state, best, candidate, alone.get(candidate.name))
    found = []
    for first, second in itertools.combinations(hopes, 2):
        known = _candidates(state, best)
        hope = hopes[first] * hopes[second]
        if known[first].knob == known[second].knob or hope < 1 + LEAST_GAIN:
            continue
        variant = _with(state, best, first, second)
        if _is_new(now, variant) and fits(state, variant):
            found.append((hope, variant))
    for _, variant in sorted(found, key=lambda one: -one[0]):
        yield variant


def _hope(state: State, best: Variant, candidate: Candidate, judged: Judgement | None) -> float:
    """The most that a change can bring: the upper end of its interval; its prediction where it never ran."""
    if judged is not None and judged.interval is not None:
        return judged.interval.high
    return gain_over(state, best, _with(state, best, candidate.name))


def _is_new(now: Standing, variant: Variant) -> bool:
    wanted = frozenset(variant.changes)
    return not any(one.start == variant.start and frozenset(one.changes) == wanted for one in now.judgements)


# --- memory -----------------------------------------------------------------------------------------------------------


def needs_gib(state: State, variant: Variant) -> float | None:
    """The predicted need of a variant, before any correction; None where memory is not predicted."""
    start = state.starts[variant.start]
    if start.memory_gib is None:
        return None
    known = {candidate.name: candidate for candidate in start.candidates}
    return start.memory_gib + sum(known[name].memory_gib or 0.0 for name in variant.changes)


def memory_shift(state: State) -> float:
    """GiB by which predictions are corrected: the median error of the peaks, and more after an out-of-memory end.

    A run that ended out of memory needs all that the GPU has, at least.
    """
    errors = [
        outcome.peak_gib - outcome.predicted_gib
        for _, outcome in state.results
        if outcome.status == "ok" and outcome.peak_gib is not None and outcome.predicted_gib is not None
    ]
    shift = statistics.median(errors) if errors else 0.0
    for _, outcome in state.results:
        if outcome.status == "out_of_memory" and outcome.needs_gib is not None and state.capacity_gib is not None:
            shift = max(shift, state.capacity_gib - outcome.needs_gib)
    return shift


def fits(state: State, variant: Variant) -> bool:
    """Whether a variant is predicted to fit, by the corrected model and by what ran out of memory before."""
    return why_not_fits(state, variant, needs_gib(state, variant)) is None


def why_not_fits(state: State, variant: Variant, need: float | None) -> str | None:
    """Why a variant with this predicted need cannot fit; None if it can, or if nothing is known."""
    for trial, outcome in state.results:
        if outcome.status == "out_of_memory" and _needs_as_much(state, variant, trial.variant):
            return f"{describe(trial.variant)} ran out of memory with less"
    if need is None or state.capacity_gib is None:
        return None
    held = [o.needs_gib for _, o in state.results if o.status == "ok" and o.needs_gib is not None]
    shifted = need + memory_shift(state)
    if shifted <= FILLED * state.capacity_gib or need <= max(held, default=0.0):
        return None
    corrected = f", corrected by {memory_shift(state):+.1f}" if abs(memory_shift(state)) >= 0.05 else ""
    return f"predicted to need {shifted:.1f} GiB{corrected}, of {state.capacity_gib:.1f}"


def _needs_as_much(state: State, variant: Variant, other: Variant) -> bool:
    """Whether a variant differs from another one only in options of higher levels of the same knobs."""
    if variant.start != other.start:
        return False
    known = _candidates(state, variant)
    mine, theirs = ({known[n].knob: known[n] for n in one.changes} for one in (variant, other))
    if mine.keys() != theirs.keys():
        return False
    for knob, candidate in mine.items():
        level, least = candidate.level, theirs[knob].level
        same = candidate.name == theirs[knob].name
        if not same and (level is None or least is None or level < least):
            return False
    return True


def speed_in_words(tflops: float | None, step_ms: float | None) -> str:
    """The speed of a run: TFLOP/s/GPU where they are known and not tiny, else the time of a step."""
    return f"{tflops:,.1f} TFLOP/s/GPU" if tflops and tflops >= 1 else f"{step_ms or 0:,.1f} ms a step"


def describe(variant: Variant) -> str:
    """A variant in words."""
    return " + ".join(variant.changes) or "the recipe as it is"

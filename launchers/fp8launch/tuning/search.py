"""The search of `tune` as a pure function: what has been measured so far -> the next trial, or the end.

Every start (a recipe) is run once; the fastest one is improved. Changes are tried one at a time on the best so far,
those with the best predicted speed-up first, and kept where the interval of the ratio says so. Then pairs of changes
that were not kept. Only a trial whose interval holds both 1 and a gain worth having is repeated.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from fp8launch.tuning.judgement import LEAST_GAIN, Judgement, Standing, standing
from fp8launch.tuning.memory_fit import fits
from fp8launch.tuning.state import (
    Candidate,
    State,
    Trial,
    Variant,
    candidates_of,
    expected_seconds,
    gain_over,
    seconds_spent,
    trials_run,
)

# A change that is predicted to be slower than this is not tried alone.
LEAST_PREDICTED = 0.985


@dataclass(frozen=True)
class Finished:
    why: str


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
    fewer = min(variant, now.best, key=lambda one: len(now.runs[one]))
    return Trial(fewer, 1 + sum(trial.variant == fewer for trial, _ in state.results))


def _with(state: State, best: Variant, *names: str) -> Variant:
    """The best with changes laid on it; of one knob the last option holds."""
    known = candidates_of(state, best)
    replaced = {known[name].knob for name in names}
    kept = [name for name in best.changes if known[name].knob not in replaced]
    return Variant(best.start, (*kept, *names))


def _singles(state: State, now: Standing, best: Variant) -> Iterator[Variant]:
    """Changes to try alone, the best prediction first."""
    tried = _tried_alone(now, best.start)
    wanted = []
    for candidate in state.starts[best.start].candidates:
        if candidate.name in tried or candidate.name in best.changes:
            continue
        variant = _with(state, best, candidate.name)
        likely = gain_over(state, best, variant) >= LEAST_PREDICTED
        # On a pair that was kept, it may be a pair that ran: the other option of a knob in its place.
        if likely and _is_new(now, variant) and fits(state, variant):
            wanted.append(variant)
    # Sorting is stable: equal predictions come in the order of the knobs.
    yield from sorted(wanted, key=lambda variant: -gain_over(state, best, variant))


def _tried_alone(now: Standing, start: int) -> dict[str, Judgement]:
    """Changes that were tried as the last one on what was best, with their judgement."""
    found = {}
    for variant, judged in now.judgements.items():
        if variant.start != start or not variant.changes:
            continue
        if len(judged.new_changes) == 1:
            found[variant.changes[-1]] = judged
    return found


def _pairs(state: State, now: Standing, best: Variant) -> Iterator[Variant]:
    """Pairs of changes that were not kept, if together they can be faster by what is known of each."""
    alone = _tried_alone(now, best.start)
    turned = {candidates_of(state, best)[name].knob for name in best.changes}
    hopes = {}
    for candidate in state.starts[best.start].candidates:
        if candidate.knob not in turned:
            hopes[candidate.name] = _hope(state, best, candidate, alone.get(candidate.name))
    found = []
    for first, second in itertools.combinations(hopes, 2):
        known = candidates_of(state, best)
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

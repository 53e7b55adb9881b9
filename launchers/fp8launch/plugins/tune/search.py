"""The search of `tune` as a pure function: from the results so far to the next trial, or to the end.

Each start (a recipe) runs once, and the fastest one is improved. Changes are applied to the best variant one at a time,
the best predicted speed-up first, and kept if the confidence interval of the speed ratio lies above 1. Then pairs of
changes that were not kept are tried. A trial is repeated only if its interval includes both 1 and a worthwhile gain.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from fp8launch.plugins.tune.judgement import LEAST_GAIN, Judgement, Standing, standing
from fp8launch.plugins.tune.memory_fit import fits
from fp8launch.plugins.tune.state import (
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

# A change with a lower predicted speed ratio is not tried on its own.
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
        return Finished("the remaining budget is too small for another trial")
    if state.seconds_left is not None and expected_seconds(state) > state.seconds_left:
        return Finished("the remaining time is too short for another trial")
    return trial


def _wanted(state: State, now: Standing) -> Trial | Finished:
    for number in range(len(state.starts)):
        if Variant(number) not in now.judgements:
            return Trial(Variant(number))
        if now.undecided == Variant(number):
            return _again(state, now, now.undecided)
    if now.best is None:
        return Finished("no recipe ran unchanged")
    if now.undecided is not None:
        return _again(state, now, now.undecided)
    for variant in itertools.chain(_singles(state, now, now.best), _pairs(state, now, now.best)):
        return Trial(variant)
    return Finished("all changes were tried, or are predicted to be slower or not to fit")


def _again(state: State, now: Standing, variant: Variant) -> Trial:
    """Return another run of the variant or of the best one, whichever has fewer runs."""
    assert now.best is not None
    fewer = min(variant, now.best, key=lambda one: len(now.runs[one]))
    return Trial(fewer, 1 + sum(trial.variant == fewer for trial, _ in state.results))


def _with(state: State, best: Variant, *names: str) -> Variant:
    """Return the best variant with more changes. Of several options of a knob the last one wins."""
    known = candidates_of(state, best)
    replaced = {known[name].knob for name in names}
    kept = [name for name in best.changes if known[name].knob not in replaced]
    return Variant(best.start, (*kept, *names))


def _singles(state: State, now: Standing, best: Variant) -> Iterator[Variant]:
    """Yield the best variant with one more change, the best prediction first."""
    tried = _tried_alone(now, best.start)
    wanted = []
    for candidate in state.starts[best.start].candidates:
        if candidate.name in tried or candidate.name in best.changes:
            continue
        variant = _with(state, best, candidate.name)
        likely = gain_over(state, best, variant) >= LEAST_PREDICTED
        # After a pair was kept, replacing one of its options may give a pair that ran before.
        if likely and _is_new(now, variant) and fits(state, variant):
            wanted.append(variant)
    # Sorting is stable, so equal predictions keep the order of the knobs.
    yield from sorted(wanted, key=lambda variant: -gain_over(state, best, variant))


def _tried_alone(now: Standing, start: int) -> dict[str, Judgement]:
    """Return the changes that were tried one at a time, with their judgements."""
    found = {}
    for variant, judged in now.judgements.items():
        if variant.start != start or not variant.changes:
            continue
        if len(judged.new_changes) == 1:
            found[variant.changes[-1]] = judged
    return found


def _pairs(state: State, now: Standing, best: Variant) -> Iterator[Variant]:
    """Yield pairs of changes that were not kept, if together they may be faster."""
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
    """Return the most that a change can gain: the upper end of its interval, or its prediction if it never ran."""
    if judged is not None and judged.interval is not None:
        return judged.interval.high
    return gain_over(state, best, _with(state, best, candidate.name))


def _is_new(now: Standing, variant: Variant) -> bool:
    wanted = frozenset(variant.changes)
    return not any(one.start == variant.start and frozenset(one.changes) == wanted for one in now.judgements)

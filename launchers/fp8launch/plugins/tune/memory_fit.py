"""Decide whether a variant fits on the GPU, from predictions corrected by measured peaks and failures."""

from __future__ import annotations

import statistics

from fp8launch.plugins.tune.state import Candidate, State, Variant, candidates_of, describe

# Usable share of the GPU's memory. At 97 %, a run slowed down and then ran out of memory (estimate/memory.py, `LIMIT`).
FILLED = 0.97


def needs_gib(state: State, variant: Variant) -> float | None:
    """Return the predicted memory of a variant in GiB, uncorrected, or None without a prediction."""
    start = state.starts[variant.start]
    if start.memory_gib is None:
        return None
    known = {candidate.name: candidate for candidate in start.candidates}
    return start.memory_gib + sum(known[name].memory_gib or 0.0 for name in variant.changes)


def memory_shift(state: State) -> float:
    """Return the correction of predictions in GiB: the median error of measured peaks, or more after a failure.

    A run that went out of memory needs at least all of the GPU's memory.
    """
    errors = []
    for _, outcome in state.results:
        if outcome.status == "ok" and outcome.peak_gib is not None and outcome.predicted_gib is not None:
            errors.append(outcome.peak_gib - outcome.predicted_gib)
    shift = statistics.median(errors or [0.0])
    for _, outcome in state.results:
        if outcome.status == "out_of_memory" and outcome.needs_gib is not None and state.capacity_gib is not None:
            shift = max(shift, state.capacity_gib - outcome.needs_gib)
    return shift


def misfit(state: State, variant: Variant) -> str | None:
    """Return why a variant cannot fit; None if it can."""
    return why_not_fits(state, variant, needs_gib(state, variant))


def fits(state: State, variant: Variant) -> bool:
    """Return whether a variant is predicted to fit."""
    return misfit(state, variant) is None


def why_not_fits(state: State, variant: Variant, need: float | None) -> str | None:
    """Return why a variant that is predicted to need `need` GiB cannot fit, or None if it may."""
    for trial, outcome in state.results:
        if outcome.status == "out_of_memory" and _needs_as_much(state, variant, trial.variant):
            return f"{describe(trial.variant)} ran out of memory with less"
    if need is None or state.capacity_gib is None:
        return None
    held = [o.needs_gib for _, o in state.results if o.status == "ok" and o.needs_gib is not None]
    shift = memory_shift(state)
    if need + shift <= FILLED * state.capacity_gib or need <= max(held, default=0.0):
        return None
    need_text = f"{need + shift:.1f} GiB"
    if abs(shift) >= 0.05:
        need_text += f", corrected by {shift:+.1f}"
    return f"predicted to need {need_text}, of {state.capacity_gib:.1f}"


def _needs_as_much(state: State, variant: Variant, other: Variant) -> bool:
    """Return whether a variant differs from another only in options of the same knobs that need more memory."""
    if variant.start != other.start:
        return False
    mine, theirs = _by_knob(state, variant), _by_knob(state, other)
    if mine.keys() != theirs.keys():
        return False
    for knob, candidate in mine.items():
        if candidate.name == theirs[knob].name:
            continue
        level, least = candidate.level, theirs[knob].level
        if level is None or least is None or level < least:
            return False
    return True


def _by_knob(state: State, variant: Variant) -> dict[str, Candidate]:
    """Return the changes of a variant by knob."""
    known = candidates_of(state, variant)
    return {known[name].knob: known[name] for name in variant.changes}

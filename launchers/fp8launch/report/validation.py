"""The validation loss of a row over its seeds, and relative to the baseline's runs with the same seeds.

Runs with one seed start from the same weights and see the same data, so their losses share most of the noise between
seeds. The interval is therefore Student's t of the differences within each seed, not of two independent means.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

from fp8launch.report.differences import validation_differences
from fp8launch.report.intervals import mean_interval
from fp8launch.report.losses import RunEnd, seed_means, summary_over_seeds
from fp8launch.report.parity import conclusive
from fp8launch.report.rows import Row, ValidationLoss
from fp8launch.report.run_report import RunReport

# An iteration, and the name of the validation set: empty unless a run has several sets.
_Place = tuple[int, str]
_Evaluated = Sequence[tuple[RunReport, dict[_Place, float]]]


def validation_loss(row: Row, base: Row | None) -> ValidationLoss | None:
    """Return the validation loss of a row, relative to `base` if there is one. None if its runs share no evaluation."""
    mine = _evaluations(row)
    own = _last_common(mine)
    if own is None:
        return None
    if base is None or base is row:
        return _at(own, row, mine)
    theirs = _evaluations(base)
    common = _last_common([*mine, *theirs]) if theirs else None
    reasons = validation_differences(row.facts, base.facts)
    if common is None:
        missing = "its runs and the baseline's evaluated no validation set at a common iteration"
        reasons.append(missing if theirs else "the baseline logged no validation loss")
    found = replace(_at(own if common is None or reasons else common, row, mine), against=base.name)
    if common is None or reasons:
        return replace(found, reasons=tuple(reasons))
    ours, others = seed_means(_ends(common, mine)), seed_means(_ends(common, theirs))
    relative = [(ours[seed] - others[seed]) / others[seed] for seed in ours if seed in others]
    if not relative:
        return replace(found, reasons=("no seed in common",))
    if not all(map(math.isfinite, relative)):
        return replace(found, reasons=(f"a loss is NaN or infinite at iteration {found.iteration}",))
    interval = mean_interval(relative)
    if interval:
        # A cross entropy is never negative, so it cannot be lower by more than itself.
        interval = replace(interval, low=max(interval.low, -1.0), method=f"t over {len(relative)} pairs of equal seeds")
    return replace(found, relative=statistics.fmean(relative), interval=interval, seeds=len(relative))


def _evaluations(row: Row) -> _Evaluated:
    """Return the losses of each run that ended well, or of all runs if none did. Test sets are left out."""
    found = []
    for run in conclusive(row.runs):
        losses: dict[_Place, float] = {}
        for one in run.training.validations:
            # Megatron names the set only in the evaluation after the last iteration.
            dataset = one["name"].removesuffix("on validation set").strip()
            if one["iteration"] is not None and one["losses"] and not dataset.endswith("on test set"):
                losses[one["iteration"], dataset] = one["losses"].get("lm loss", next(iter(one["losses"].values())))
        if losses:
            found.append((run, losses))
    return found


def _last_common(runs: _Evaluated) -> _Place | None:
    """Return the last iteration that all runs evaluated, with the first of its validation sets."""
    common = set.intersection(*(set(losses) for _, losses in runs)) if runs else set()
    return min(common, key=lambda place: (-place[0], place[1]), default=None)


def _ends(place: _Place, runs: _Evaluated) -> list[RunEnd]:
    return [RunEnd(str(run.facts.get("seed")), losses[place], losses[place]) for run, losses in runs]


def _at(place: _Place, row: Row, runs: _Evaluated) -> ValidationLoss:
    iteration, dataset = place
    ends = _ends(place, runs)
    loss = summary_over_seeds(ends) if all(math.isfinite(end.last) for end in ends) else None
    batch, length = row.facts.get("global_batch_size"), row.facts.get("seq_length")
    tokens = None
    if isinstance(batch, int) and isinstance(length, int) and not row.facts.get("rampup_batch_size"):
        tokens = iteration * batch * length
    return ValidationLoss(iteration, tokens, loss, dataset)

"""The validation loss of a row over its seeds, and relative to the baseline's runs with the same seeds.

Runs with one seed start from the same weights and see the same data, so their losses share most of the noise between
seeds. The interval is therefore Student's t of the differences within each seed, not of two independent means.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

from fp8launch.report.differences import described_or_unknown
from fp8launch.report.intervals import Interval, mean_interval
from fp8launch.report.losses import LossSummary, RunEnd, seed_means, summary_over_seeds
from fp8launch.report.parity import conclusive
from fp8launch.report.rows import Row
from fp8launch.report.run_report import RunReport, json_mapping

# Facts that determine what a validation loss averages over, and how much training comes before it.
_DECIDING = frozenset(
    ("valid_data_path", "data_path", "data_args_path", "per_split_data_args_path", "split", "mock_data",
     "tokenizer_type", "tokenizer_model", "seq_length", "global_batch_size", "rampup_batch_size", "eval_iters",
     "eval_global_batch_size", "full_validation", "eod_mask_loss", "reset_position_ids", "reset_attention_mask")
)  # fmt: skip
_NEEDED = ("seed", "seq_length", "global_batch_size")
# An iteration, and the name of the validation set: empty unless a run has several sets.
_Place = tuple[int, str]
_Evaluated = Sequence[tuple[RunReport, dict[_Place, float]]]


@dataclass(frozen=True)
class ValidationLoss:
    """The validation loss of a row at `iteration`, the last one that all its runs and the baseline's runs evaluated.

    `tokens` were trained on until then. `loss` is None if a loss is NaN or infinite. `relative` is the mean over the
    `seeds` that both rows have of (loss - baseline's loss) / baseline's loss, with its 95 % `interval` (None for one
    seed). If `relative` is None, `reasons` say why (none for the baseline itself), and `iteration` may be any.
    """

    iteration: int
    tokens: int | None
    loss: LossSummary | None
    dataset: str = ""
    against: str | None = None
    relative: float | None = None
    interval: Interval | None = None
    seeds: int = 0
    reasons: tuple[str, ...] = ()

    def as_json(self) -> dict[str, object]:
        return json_mapping(vars(self))


# Columns, cells of the CSV file and sentences all read the loss of a row.
_KNOWN: WeakKeyDictionary[Row, ValidationLoss | None] = WeakKeyDictionary()


def validation_loss(row: Row) -> ValidationLoss | None:
    """Return the validation loss of a row, relative to its baseline's; None if its runs share no evaluation."""
    if row not in _KNOWN:
        _KNOWN[row] = _computed(row)
    return _KNOWN[row]


def _computed(row: Row) -> ValidationLoss | None:
    mine = _evaluations(row)
    own = _last_common(mine)
    if own is None:
        return None
    base = row.base
    if base is None:
        return _at(own, row, mine)
    theirs = _evaluations(base)
    common = _last_common([*mine, *theirs]) if theirs else None
    reasons = described_or_unknown(_DECIDING, _NEEDED, row.facts, base.facts)
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
    return ValidationLoss(iteration, runs[0][0].tokens_until(iteration), loss, dataset)

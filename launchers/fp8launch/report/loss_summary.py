"""The loss of a row in numbers: last, smoothed over the end of the training, and as perplexity."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from fp8launch.report.differences import LEARNING, TASK, HasFacts, differing_facts, settings_change_speed
from fp8launch.report.intervals import Interval, interval_json, mean_interval
from fp8launch.report.json_values import json_mapping
from fp8launch.report.loss_curves import finite_losses, losses, values_of
from fp8launch.report.run_data import RunData

Row = TypeVar("Row", bound=HasFacts)

# The end of a training that is smoothed: this share of its iterations, and at least so many.
SHARE, LEAST = 0.1, 5
# Above this loss (in nats) the perplexity is too large to be read.
_LARGEST = 50.0


@dataclass(frozen=True)
class LossSummary:
    """The loss at the end of a row's runs, in nats.

    `last` and `smoothed` are medians over the runs; `values` has the smoothed loss of each run. The end of a run is
    smoothed over `iterations`. `seed_values` has the mean of the runs of each seed; `mean`, `std` (of the sample), the
    95 % `interval` of the mean and the range, `spread`, are over these seeds. Only different seeds show how much a loss
    varies: repeats of one seed compute the same, up to the order of additions. With one seed, `std`, `interval` and
    `spread` are None.
    """

    last: float
    smoothed: float
    perplexity: float | None
    spread: float | None
    iterations: int
    runs: int
    values: tuple[float, ...] = ()
    seed_values: tuple[float, ...] = ()
    mean: float | None = None
    std: float | None = None
    interval: Interval | None = None

    @property
    def seeds(self) -> int:
        return len(self.seed_values)

    @property
    def end(self) -> float:
        """The number that rows are ranked by: the mean over several seeds, else the smoothed loss."""
        if self.seeds > 1 and self.mean is not None:
            return self.mean
        return self.smoothed

    def as_json(self) -> dict[str, object]:
        return {**json_mapping(vars(self)), "seeds": self.seeds, "interval": interval_json(self.interval)}

    @property
    def text(self) -> str:
        """The loss at the end with the standard deviation over several seeds, and the perplexity."""
        text = self.end_text
        if self.perplexity is not None:
            text += f" ({self.perplexity:,.2f})"
        return text

    @property
    def end_text(self) -> str:
        """The loss at the end with the standard deviation over several seeds."""
        text = f"{self.end:.4f}"
        if self.std is not None:
            text += f" ± {self.std:.4f}"
        return text


def loss_summary(runs: Sequence[RunData]) -> LossSummary | None:
    """Summarize the losses of a row's runs. Return None if none of them logged a finite loss."""
    lasts, smoothed, counts = [], [], []
    of_seed: dict[str, list[float]] = {}
    for run in runs:
        curve = losses(run)
        values = values_of(finite_losses(run))
        count = min(len(curve), max(LEAST, round(SHARE * len(curve))))
        at_end = sorted(curve)[-count:] if count else []
        # A loss that is NaN or infinite for most of the end has no number there, whatever it was before.
        if 2 * sum(math.isfinite(curve[number]) for number in at_end) > count:
            count = min(count, len(values))
            lasts.append(values[-1])
            smoothed.append(statistics.fmean(values[-count:]))
            of_seed.setdefault(str(run.facts.get("seed")), []).append(smoothed[-1])
            counts.append(count)
    if not counts:
        return None
    by_seed = [statistics.fmean(same) for same in of_seed.values()]
    found = LossSummary(
        last=statistics.median(lasts),
        smoothed=statistics.median(smoothed),
        perplexity=None,
        spread=max(by_seed) - min(by_seed) if len(by_seed) > 1 else None,
        iterations=min(counts),
        runs=len(counts),
        values=tuple(smoothed),
        seed_values=tuple(by_seed),
        mean=statistics.fmean(by_seed),
        std=statistics.stdev(by_seed) if len(by_seed) > 1 else None,
        interval=mean_interval(by_seed),
    )
    if found.end < _LARGEST:
        found = replace(found, perplexity=math.exp(found.end))
    return found


def by_task(rows: Sequence[Row]) -> list[list[Row]]:
    """Group rows that train the same model on the same data: only their losses can be ranked."""
    names = sorted(TASK.intersection(differing_facts(rows)))
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(str(row.facts.get(name)) for name in names), []).append(row)
    return list(groups.values())


def ranked_by_loss(rows: Sequence[Row]) -> list[list[Row]]:
    """Return the tasks whose rows learn differently, so that their losses are a result.

    Among several tasks, rows that also differ in what changes their speed belong to a comparison of speeds, such as a
    collection of logs of different experiments.
    """
    tasks = by_task(rows)
    found = [task for task in tasks if swept_learning(task)]
    if len(found) == len(tasks):
        return found
    return [task for task in found if not settings_change_speed(task)]


def learning_settings(rows: Sequence[HasFacts]) -> list[str]:
    """Return the differing facts that decide the loss of rows of one task: rows with equal ones share a loss."""
    differ = differing_facts(rows)
    return [*swept_learning(rows), *(name for name in ("precision", "train_iters") if name in differ)]


def swept_learning(rows: Sequence[HasFacts]) -> list[str]:
    """Return the arguments by which rows of one task learn differently."""
    differ = differing_facts(rows)
    found = [name for name in LEARNING if name in differ]
    if "world_size" in differ and "global_batch_size" in found:
        found.remove("global_batch_size")  # weak scaling
    return found

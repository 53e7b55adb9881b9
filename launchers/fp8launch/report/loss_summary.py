"""The loss of a row in numbers: last, smoothed over the end of the training, and as perplexity."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fp8launch.report.differences import UNLIKE, Facts
from fp8launch.report.intervals import Interval, interval_json, mean_interval
from fp8launch.report.json_values import json_mapping
from fp8launch.report.loss_curves import finite_losses, values_of
from fp8launch.report.run_data import RunData

# The end of a training that is smoothed: this share of its iterations, and at least so many.
SHARE, LEAST = 0.1, 5
# Arguments whose variants are compared by their loss.
LEARNING = ("lr", "min_lr", "lr_warmup_iters", "lr_decay_style", "weight_decay", "adam_beta1", "adam_beta2", "seed",
            "init_method_std", "optimizer")  # fmt: skip
# Above this loss (in nats) the perplexity is too large to be read.
_LARGEST = 50.0


@dataclass(frozen=True)
class LossSummary:
    """Losses in nats, each the median over a row's runs. `spread` is the range of the runs' smoothed losses.

    `iterations` were smoothed in each run; `runs` have a loss; `values` are their smoothed losses, `seed_values` the
    means of the runs of one seed, with `mean` and its 95 % `interval` over the seeds. Only different seeds show how
    much a loss varies: repeats of one seed compute the same, up to the order of additions.
    """

    last: float
    smoothed: float
    perplexity: float | None
    spread: float
    iterations: int
    runs: int
    values: tuple[float, ...] = ()
    seed_values: tuple[float, ...] = ()
    mean: float | None = None
    interval: Interval | None = None

    @property
    def seeds(self) -> int:
        return len(self.seed_values)

    def as_json(self) -> dict[str, object]:
        return {**json_mapping(vars(self)), "seeds": self.seeds, "interval": interval_json(self.interval)}

    @property
    def text(self) -> str:
        """The smoothed loss, with half the range of several runs, and the perplexity."""
        text = self.smoothed_text
        if self.perplexity is not None:
            text += f" ({self.perplexity:,.2f})"
        return text

    @property
    def smoothed_text(self) -> str:
        """The smoothed loss, with half the range over several seeds."""
        text = f"{self.smoothed:.4f}"
        if self.seeds > 1:
            text += f" ± {self.spread / 2:.4f}"
        return text


def loss_summary(runs: Sequence[RunData]) -> LossSummary | None:
    """Summarise the losses of runs of one kind; None where none has logged a finite one."""
    lasts, smoothed, counts = [], [], []
    of_seed: dict[str, list[float]] = {}
    for run in runs:
        values = values_of(finite_losses(run))
        if values:
            count = min(len(values), max(LEAST, round(SHARE * len(values))))
            lasts.append(values[-1])
            smoothed.append(statistics.fmean(values[-count:]))
            of_seed.setdefault(str(run.facts.get("seed")), []).append(smoothed[-1])
            counts.append(count)
    if not counts:
        return None
    by_seed = [statistics.fmean(same) for same in of_seed.values()]
    middle = statistics.median(smoothed)
    perplexity = None
    if middle < _LARGEST:
        perplexity = math.exp(middle)
    return LossSummary(
        last=statistics.median(lasts),
        smoothed=middle,
        perplexity=perplexity,
        spread=max(smoothed) - min(smoothed),
        iterations=min(counts),
        runs=len(counts),
        values=tuple(smoothed),
        seed_values=tuple(by_seed),
        mean=statistics.fmean(by_seed),
        interval=mean_interval(by_seed),
    )


def compares_learning(rows: Sequence[Sequence[RunData]]) -> bool:
    """Return whether rows of one program, precision and amount of work differ in how they learn (learning rate, seed,
    optimizer): then the loss is the result."""
    alike: dict[tuple[str, ...], set[tuple[str, ...]]] = {}
    for runs in filter(None, rows):
        facts = runs[0].facts
        work = _texts(facts, ("precision", "script", *sorted(UNLIKE)))
        alike.setdefault(work, set()).add(_texts(facts, LEARNING))
    return max(map(len, alike.values()), default=0) > 1


def _texts(facts: Facts, names: Iterable[str]) -> tuple[str, ...]:
    return tuple(map(str, map(facts.get, names)))

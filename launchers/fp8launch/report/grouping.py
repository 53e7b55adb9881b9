"""Runs -> the rows of a comparison: one row for each variant on each number of GPUs, with its repeats."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from fp8launch.report.differences import Facts
from fp8launch.report.intervals import Interval, mean_interval
from fp8launch.report.machines import compressed
from fp8launch.report.run_data import RunData, Unit
from fp8launch.report.run_report import RunReport, Statistic
from fp8launch.report.variant_labels import variant_labels


@dataclass(frozen=True)
class Measure:
    """A quantity of a row: the median of its runs' medians. `iqr` is the runs' usual (median) spread inside a run."""

    median: float
    runs: tuple[float, ...]
    iqr: float
    n: int
    interval: Interval | None

    @property
    def spread(self) -> float:
        """The ± of tables and error bars: half the range of the runs, for a single run half its interquartile range."""
        return (max(self.runs) - min(self.runs) if len(self.runs) > 1 else self.iqr) / 2

    def as_json(self) -> dict[str, object]:
        ci95 = self.interval.as_json() if self.interval else None
        return {"median": self.median, "runs": list(self.runs), "iqr": self.iqr, "n": self.n, "ci95_mean": ci95}


@dataclass(frozen=True)
class ComparisonRow:
    """All runs of one variant on one number of GPUs. Only those that ended as planned give numbers.

    `by_gpus`: the number of nodes does not tell the rows of a variant apart.
    """

    label: str
    runs: tuple[RunData, ...]
    notes: tuple[str, ...] = ()
    by_gpus: bool = False

    @property
    def good(self) -> tuple[RunData, ...]:
        return tuple(run for run in self.runs if run.good)

    @cached_property
    def facts(self) -> Facts:
        """The facts of the first run, with the nodes of all runs."""
        runs = self.good or self.runs
        nodes = compressed(node for run in runs for node in run.report.machines.nodes)
        return {**runs[0].facts, **({"node set": nodes} if nodes else {})}

    @property
    def world(self) -> int | None:
        value = self.facts.get("world_size")
        return value if isinstance(value, int) else None

    @property
    def nodes(self) -> int | None:
        value = self.facts.get("nodes")
        return value if isinstance(value, int) else None

    @property
    def size(self) -> str:
        """`2 nodes`, `8 GPUs`, or nothing where neither is known."""
        if self.nodes and not (self.by_gpus and self.world):
            return f"{self.nodes} node{'s' * (self.nodes > 1)}"
        return f"{self.world} GPU{'s' * (self.world > 1)}" if self.world else ""

    @property
    def name(self) -> str:
        """The label with the size, which together no other row has."""
        return ", ".join(filter(None, (self.label, self.size)))

    @property
    def status(self) -> str:
        """`ok`, or how many runs have a number and why the others do not."""
        bad = sorted({run.status_text() for run in self.runs if not run.good})
        if not bad:
            return "ok"
        counts = f"{len(self.good)} of {len(self.runs)} ok; " if len(self.runs) > 1 else ""
        return counts + ", ".join(bad)

    def measure(self, of: Callable[[RunReport], Statistic | None]) -> Measure | None:
        """Summarise one statistic of the runs that have it."""
        found = [statistic for run in self.good if (statistic := of(run.report))]
        if not found:
            return None
        runs = tuple(statistic.median for statistic in found)
        spread = statistics.median(statistic.iqr for statistic in found)
        lines = sum(statistic.n for statistic in found)
        return Measure(statistics.median(runs), runs, spread, lines, mean_interval(runs))

    def speeds(self, unit: Unit) -> list[list[float]]:
        """Return the speed at every kept line, a list for each run that has it in this unit."""
        return [speeds for run in self.good if (speeds := run.speeds(unit))]


def group_runs(runs: Sequence[RunData]) -> list[ComparisonRow]:
    """Return the rows in the order of their first runs, sizes ascending within a variant."""
    runs, notes = _newest(runs)
    labels = variant_labels(runs)
    grouped: dict[tuple[str, object], list[RunData]] = {}
    for run, label in zip(runs, labels, strict=True):
        size = run.facts.get("world_size") or run.facts.get("nodes")
        grouped.setdefault((label, size), []).append(run)
    order = list(dict.fromkeys(labels))
    found = sorted(grouped.items(), key=lambda item: (order.index(item[0][0]), _number(item[0][1])))
    rows = [
        ComparisonRow(label, tuple(same), tuple(n for r in same for n in notes.get(r.name, ())))
        for (label, _), same in found
    ]
    return rows if len({row.name for row in rows}) == len(rows) else [replace(row, by_gpus=True) for row in rows]


def _number(value: object) -> float:
    return value if isinstance(value, int | float) else 0


def _newest(runs: Sequence[RunData]) -> tuple[list[RunData], dict[str, list[str]]]:
    """Of several runs of the same repeat of a point, a resubmission, only the last one that ended well counts."""
    chosen: dict[object, RunData] = {}
    replaced: dict[str, list[str]] = {}
    for i, run in enumerate(runs):
        study = run.study
        place = (run.facts.get("nodes"), run.facts.get("recipe"))
        key = (study.name, repr(sorted(study.point.items())), study.repeat, place) if study else i
        other = chosen.get(key)
        if other is not None:
            old, run = (other, run) if run.good or not other.good else (run, other)
            replaced.setdefault(run.name, []).append(f"{old.name} ({old.report.status}) is replaced by {run.name}")
        chosen[key] = run
    return list(chosen.values()), replaced

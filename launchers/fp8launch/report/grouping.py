"""Runs -> the rows of a comparison: one row for each variant on each number of GPUs, with its repeats."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import PurePath
from typing import TypeVar

from fp8launch.report.differences import Facts
from fp8launch.report.intervals import Interval, interval_json, mean_interval
from fp8launch.report.machines import compressed
from fp8launch.report.run_data import RunData, Unit
from fp8launch.report.run_report import RunReport, Statistic
from fp8launch.report.variant_labels import variant_labels
from fp8launch.untyped import as_int
from fp8launch.wording import counted

T = TypeVar("T")


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
        if len(self.runs) > 1:
            return (max(self.runs) - min(self.runs)) / 2
        return self.iqr / 2

    def over(self, whole: float) -> Measure:
        """Return the share of a whole, without an interval."""
        runs = tuple(value / whole for value in self.runs)
        return Measure(self.median / whole, runs, self.iqr / whole, self.n, None)

    def as_json(self) -> dict[str, object]:
        return {
            "median": self.median,
            "runs": list(self.runs),
            "iqr": self.iqr,
            "n": self.n,
            "ci95_mean": interval_json(self.interval),
        }


@dataclass(frozen=True)
class ComparisonRow:
    """All runs of one variant on one number of GPUs. Only those that ended as planned give numbers.

    `by_gpus`: the number of nodes is unknown or does not tell the rows of a variant apart. `one_size`: all rows have
    the same size, so names leave it out.
    """

    label: str
    runs: tuple[RunData, ...]
    notes: tuple[str, ...] = ()
    by_gpus: bool = False
    one_size: bool = False

    @property
    def good(self) -> tuple[RunData, ...]:
        return tuple(run for run in self.runs if run.good)

    @cached_property
    def facts(self) -> Facts:
        """The facts of the first run, with the nodes of all runs."""
        runs = self.good or self.runs
        facts = dict(runs[0].facts)
        nodes: set[str] = set()
        for run in runs:
            nodes.update(run.report.machines.nodes)
        if nodes:
            facts["node set"] = compressed(nodes)
        return facts

    @property
    def world(self) -> int | None:
        return as_int(self.facts.get("world_size"))

    @property
    def trained_tokens(self) -> float | None:
        """The number of tokens that the first good run was trained on; None if its log does not say."""
        for run in self.good:
            report, batch = run.report, self.facts.get("global_batch_size")
            if report.iteration_last and report.seq_length and isinstance(batch, int | float):
                return report.iteration_last * batch * report.seq_length
        return None

    @property
    def nodes(self) -> int | None:
        return as_int(self.facts.get("nodes"))

    @property
    def size(self) -> str:
        """`2 nodes`, `8 GPUs`, or nothing where neither is known."""
        if self.nodes and not (self.by_gpus and self.world):
            return counted(self.nodes, "node")
        if self.world:
            return counted(self.world, "GPU")
        return ""

    @property
    def name(self) -> str:
        """The label, with the size if sizes differ; no other row has the same name."""
        if self.one_size:
            return self.label
        return ", ".join(filter(None, (self.label, self.size)))

    @property
    def faults(self) -> str:
        """Why some of the runs have no number; empty if all have one."""
        return ", ".join(sorted({run.status_text() for run in self.runs if not run.good}))

    @property
    def status(self) -> str:
        """`ok`, or how many runs have a number and why the others do not."""
        if not self.faults:
            return "ok"
        if len(self.runs) == 1:
            return self.faults
        return f"{len(self.good)} of {len(self.runs)} ok; {self.faults}"

    def known(self, of: Callable[[RunReport], T | None]) -> list[T]:
        """Return a value of the reports of the runs that have it."""
        return list(filter(None, (of(run.report) for run in self.good)))

    def measure(self, of: Callable[[RunReport], Statistic | None]) -> Measure | None:
        """Summarise one statistic of the runs that have it."""
        medians, spreads, lines = [], [], 0
        for statistic in self.known(of):
            medians.append(statistic.median)
            spreads.append(statistic.iqr)
            lines += statistic.n
        if not medians:
            return None
        spread = statistics.median(spreads)
        return Measure(statistics.median(medians), tuple(medians), spread, lines, mean_interval(medians))

    def speeds(self, unit: Unit) -> list[list[float]]:
        """Return the speed at every kept line, a list for each run that has it in this unit."""
        return list(filter(None, (run.speeds(unit) for run in self.good)))


def group_runs(runs: Sequence[RunData]) -> list[ComparisonRow]:
    """Return the rows in the order of their first runs, sizes ascending within a variant."""
    runs, notes = _newest(runs)
    labels = variant_labels(runs)
    grouped: dict[tuple[str, object], list[RunData]] = {}
    for run, label in zip(runs, labels, strict=True):
        size = run.facts.get("world_size") or run.facts.get("nodes")
        grouped.setdefault((label, size), []).append(run)
    order = list(dict.fromkeys(labels))

    def place(key: tuple[str, object]) -> tuple[int, float]:
        label, size = key
        return order.index(label), _number(size)

    rows = []
    for key in sorted(grouped, key=place):
        same = grouped[key]
        own_notes: list[str] = []
        for run in same:
            own_notes += notes.get(run.name, ())
        rows.append(ComparisonRow(key[0], tuple(same), tuple(own_notes)))
    distinct = len({row.name for row in rows}) == len(rows)
    if not distinct or (not all(row.nodes for row in rows) and all(row.world for row in rows)):
        rows = [replace(row, by_gpus=True) for row in rows]
    if len(rows) > 1 and len({row.size for row in rows}) == 1 and len(labels_of(rows)) == len(rows):
        rows = [replace(row, one_size=True) for row in rows]
    return rows


def labels_of(rows: Sequence[ComparisonRow]) -> list[str]:
    """Return the labels of rows, each once."""
    return list(dict.fromkeys(row.label for row in rows))


def _number(value: object) -> float:
    if isinstance(value, int | float):
        return value
    return 0


def _newest(runs: Sequence[RunData]) -> tuple[list[RunData], dict[str, list[str]]]:
    """Of several runs of the same repeat of a point, a resubmission, only the last one that ended well counts."""
    chosen: dict[object, RunData] = {}
    replaced: dict[str, list[str]] = {}
    for i, run in enumerate(runs):
        study = run.study
        key: object = i
        if study:
            place = (run.facts.get("nodes"), run.facts.get("recipe"))
            folder = PurePath(run.sources[0]).parent if run.sources else None
            key = (study.name, folder, repr(sorted(study.point.items())), study.repeat, place)
        other = chosen.get(key)
        if other is None:
            chosen[key] = run
            continue
        new, old = run, other
        if other.good and not run.good:
            new, old = other, run
        replaced.setdefault(new.name, []).append(f"{old.name} ({old.report.status}) is replaced by {new.name}")
        chosen[key] = new
    return list(chosen.values()), replaced

"""Group runs into the rows of a comparison, one row per variant and number of GPUs, with its repeats."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import PurePath
from typing import Literal, TypeVar

from fp8launch.report.differences import Comparability, Facts
from fp8launch.report.goodput import goodput_of_runs
from fp8launch.report.intervals import Interval
from fp8launch.report.losses import LossSummary, loss_summary, ranked_by_loss
from fp8launch.report.machines import compressed
from fp8launch.report.run_report import RunReport, Statistic, Unit, over_runs
from fp8launch.report.variant_labels import variant_labels
from fp8launch.untyped import as_int
from fp8launch.wording import and_more, counted, for_hardware

T = TypeVar("T")


ScalingMode = Literal["weak", "strong", "neither"]


@dataclass(frozen=True)
class Ratio:
    """The speed of a row divided by the speed of another row, both in `unit`.

    If `value` is None, `comparability` or `missing` says why. `noise` is set between two single runs: the sum of the
    interquartile ranges of their steps, relative to the medians. It is needed because the interval of a median over
    many steps is narrow and does not cover how much two runs of the same recipe differ.
    """

    value: float | None
    interval: Interval | None
    against: str
    comparability: Comparability
    missing: str = ""
    unit: Unit | None = None
    noise: float = 0.0

    @property
    def excludes_one(self) -> bool:
        return self.interval is not None and not self.interval.low <= 1 <= self.interval.high

    @property
    def distinguishable(self) -> bool:
        """Whether the ratio differs from 1 by more than chance: outside its interval, and by more than `noise`."""
        return self.excludes_one and self.value is not None and abs(self.value - 1) > self.noise

    def as_json(self) -> dict[str, object]:
        return {
            "value": self.value,
            "unit": self.unit,
            "ci95": self.interval,
            "distinguishable": self.distinguishable if self.interval else None,
            "against": self.against,
            "comparable": self.comparability.comparable,
            "reasons": list(self.comparability.unlike),
            "noted": list(self.comparability.noted),
            "missing": self.missing or None,
        }


@dataclass(frozen=True)
class ScalingEfficiency:
    mode: ScalingMode
    ratio: Ratio

    def as_json(self) -> dict[str, object]:
        return {"scaling": self.mode, **self.ratio.as_json()}


@dataclass(frozen=True)
class Published:
    """The speed quoted by the recipe. `ratio` is the measured speed divided by it, both in tokens/s/GPU."""

    tokens_per_s_per_gpu: float
    tflops_per_gpu: float | None
    gpus: int | None
    source: str
    ratio: float | None
    notes: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Row:
    """All runs of one variant on one number of GPUs. Only runs that ended as planned contribute numbers.

    `by_gpus` is true if the number of nodes is unknown or does not distinguish the rows of a variant. `one_size` is
    true if all rows have the same size, so that names can omit it. `shared_with` names the runs that used a GPU at the
    same time as one of these. It and the fields from `base` on depend on other rows and are set by
    `comparison.compare`; `base` is None for the baseline itself. Units: tokens/s/GPU, ms, dense model TFLOP/s/GPU, MiB,
    J/token, and currency per million tokens. Rows are compared by identity.
    """

    label: str
    runs: tuple[RunReport, ...]
    notes: tuple[str, ...] = ()
    shared_with: tuple[str, ...] = ()
    by_gpus: bool = False
    one_size: bool = False
    base: Row | None = None
    speedup: Ratio | None = None
    efficiency: ScalingEfficiency | None = None
    published: Published | None = None
    recomputed_tflops: bool = False
    price_per_gpu_hour: float | None = None

    @property
    def good(self) -> tuple[RunReport, ...]:
        return tuple(run for run in self.runs if run.good)

    @property
    def sharing(self) -> str:
        """A note on the runs in `shared_with`; empty if there are none."""
        if not self.shared_with:
            return ""
        return f"used the same GPU at the same time as {and_more(self.shared_with, 3)}"

    @cached_property
    def facts(self) -> Facts:
        """The facts of the first run, with the node set of all runs."""
        runs = self.good or self.runs
        facts = dict(runs[0].facts)
        nodes: set[str] = set()
        for run in runs:
            nodes.update(run.machines.nodes)
        if nodes:
            facts["node set"] = compressed(nodes)
        return facts

    @property
    def world(self) -> int | None:
        return as_int(self.facts.get("world_size"))

    @property
    def nodes(self) -> int | None:
        return as_int(self.facts.get("nodes"))

    @property
    def size(self) -> str:
        """The size as `2 nodes` or `8 GPUs`; empty if neither is known."""
        if self.nodes and not (self.by_gpus and self.world):
            return counted(self.nodes, "node")
        if self.world:
            return in_units([self], counted(self.world, "GPU"))
        return ""

    @property
    def name(self) -> str:
        """The label, followed by the size if sizes differ. It is unique."""
        if self.one_size:
            return self.label
        return ", ".join(filter(None, (self.label, self.size)))

    @property
    def faults(self) -> str:
        """Why some runs have no numbers; empty if all have them."""
        return ", ".join(sorted({run.why_no_number for run in self.runs if not run.good}))

    @property
    def status(self) -> str:
        """`ok`, or how many runs have numbers and why the others have none."""
        if not self.faults:
            return "ok"
        if len(self.runs) == 1:
            return self.faults
        return f"{len(self.good)} of {len(self.runs)} ok; {self.faults}"

    def known(self, of: Callable[[RunReport], T | None]) -> list[T]:
        """Return a value from the report of every good run that has it."""
        return list(filter(None, (of(run) for run in self.good)))

    def measure(self, of: Callable[[RunReport], Statistic | None]) -> Statistic | None:
        """Summarize a statistic over the runs that have it."""
        return over_runs(self.known(of))

    @cached_property
    def tokens(self) -> Statistic | None:
        return self.measure(lambda run: run.speed.tokens_per_s_per_gpu)

    @cached_property
    def step_time(self) -> Statistic | None:
        return self.measure(lambda run: run.speed.step_time_ms)

    @cached_property
    def tflops(self) -> Statistic | None:
        return self.measure(self._tflops)

    def _tflops(self, run: RunReport) -> Statistic | None:
        if self.recomputed_tflops and run.speed.tflops_per_gpu_recomputed:
            return run.speed.tflops_per_gpu_recomputed
        return run.speed.tflops_per_gpu

    @property
    def peak_tflops(self) -> float | None:
        """The peak to which MFU is relative."""
        denominators = self.known(lambda run: run.speed.mfu_denominator)
        return float(str(denominators[0]["peak_tflops"])) if denominators else None

    @property
    def mfu(self) -> Statistic | None:
        if self.tflops is None or not self.peak_tflops:
            return None
        return self.tflops.over(self.peak_tflops)

    @property
    def peak_memory_mib(self) -> float | None:
        return max(self.known(lambda run: run.peak_memory_mib), default=None)

    @property
    def tokens_total(self) -> float | None:
        if self.tokens is None or not self.world:
            return None
        return self.tokens.median * self.world

    @property
    def energy_per_token(self) -> float | None:
        """Joules per iteration divided by tokens per iteration, both for one GPU."""
        energy = self.measure(lambda run: run.speed.energy_j_per_gpu)
        if energy is None or self.tokens is None or self.step_time is None:
            return None
        return energy.median / (self.tokens.median * self.step_time.median / 1e3)

    @property
    def cost_per_million_tokens(self) -> float | None:
        if self.tokens is None or not self.price_per_gpu_hour:
            return None
        return self.price_per_gpu_hour / 3600 / self.tokens.median * 1e6

    @cached_property
    def loss(self) -> LossSummary | None:
        return loss_summary(self.good)

    @property
    def goodput(self) -> float | None:
        return goodput_of_runs([run.goodput for run in self.runs])

    def speeds(self, unit: Unit) -> list[list[float]]:
        """Return the speeds at all kept lines, one list per run that has speeds in this unit."""
        return list(filter(None, (run.speeds(unit) for run in self.good)))


def in_units(rows: Iterable[Row], text: str) -> str:
    """Return a unit, size or title for these rows: on CPUs there are processes instead of GPUs."""
    return for_hardware(text, (row.facts.get("gpu") for row in rows))


def group_runs(runs: Sequence[RunReport]) -> list[Row]:
    """Return rows in the order of their first runs. Within a variant, sizes ascend."""
    runs, notes = _newest(runs)
    labels = variant_labels(runs)
    grouped: dict[tuple[str, object], list[RunReport]] = {}
    for run, label in zip(runs, labels, strict=True):
        size = run.facts.get("world_size") or run.facts.get("nodes")
        grouped.setdefault((label, size), []).append(run)
    order = list(dict.fromkeys(labels))

    def place(key: tuple[str, object]) -> tuple[int, float]:
        label, size = key
        return order.index(label), size if isinstance(size, int | float) else 0

    rows = []
    for key in sorted(grouped, key=place):
        same = grouped[key]
        own_notes: list[str] = []
        for run in same:
            own_notes += notes.get(run.name, ())
        rows.append(Row(key[0], tuple(same), tuple(own_notes)))
    distinct = len({row.name for row in rows}) == len(rows)
    if not distinct or (not all(row.nodes for row in rows) and all(row.world for row in rows)):
        rows = [replace(row, by_gpus=True) for row in rows]
    if len(rows) > 1 and len({row.size for row in rows}) == 1 and len(labels_of(rows)) == len(rows):
        rows = [replace(row, one_size=True) for row in rows]
    return rows


def labels_of(rows: Sequence[Row]) -> list[str]:
    """Return the distinct labels of the rows, in order."""
    return list(dict.fromkeys(row.label for row in rows))


def _newest(runs: Sequence[RunReport]) -> tuple[list[RunReport], dict[str, list[str]]]:
    """Keep one run per repeat of a point. After a resubmission, keep the last run that ended well."""
    chosen: dict[object, RunReport] = {}
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
        replaced.setdefault(new.name, []).append(f"{old.name} ({old.status}) is replaced by {new.name}")
        chosen[key] = new
    return list(chosen.values()), replaced


def about_loss(rows: Sequence[Row]) -> bool:
    """Return whether the loss is a result worth showing: there are several seeds, or settings that affect learning."""
    if any(row.loss and row.loss.seeds > 1 for row in rows):
        return True
    return bool(ranked_by_loss(rows))


def scaling_modes(rows: Iterable[Row]) -> list[str]:
    """Return the scaling modes of the variants: weak, strong or neither."""
    return sorted({row.efficiency.mode for row in rows if row.efficiency})

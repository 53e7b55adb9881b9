"""Runs -> the rows of a comparison: one for each variant on each number of GPUs, its repeats together."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePath

from fp8launch.report.differences import Facts, differing, facts_of_axis, kind_of
from fp8launch.report.intervals import Interval, mean_interval
from fp8launch.report.machines import compressed
from fp8launch.report.measured import OWN_SCRIPT, SETTINGS, UNSET, Measured
from fp8launch.report.run_report import RunReport
from fp8launch.report.statistics import Statistic

# Facts that do not make a variant: repeats may be of another day, place or state of the checkout.
_CIRCUMSTANCES = frozenset(
    {"commit", "uncommitted changes", "cluster", "fp8launch", "recipe", "nodes", "world_size", "node set", "driver"}
)
# How labels call what differs, in this order. A size of 1 and a flag that is off are not worth a word.
_SHORT = {
    "gpu": "",
    "GPU": "",
    "seq_length": "seq",
    "num_layers": "layers",
    "num_experts": "experts",
    "tensor_model_parallel_size": "TP",
    "sequence_parallel": "SP",
    "pipeline_model_parallel_size": "PP",
    "virtual_pipeline_model_parallel_size": "VP",
    "context_parallel_size": "CP",
    "expert_model_parallel_size": "EP",
    "use_megatron_fsdp": "FSDP",
    "use_torch_fsdp2": "FSDP2",
    "micro_batch_size": "MBS",
    "global_batch_size": "GBS",
    "recompute_granularity": "recompute",
}
_SILENT = ("1", "None", "False")
# More parts than these make a name nobody reads; the table of differences has them all.
_MOST_PARTS = 4
_NODE_KEYS = ("nodes", "resources.nodes")
Key = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Measure:
    """A quantity of a row: the median of its runs' medians. `iqr` is the runs' usual (median) spread inside a run."""

    median: float
    runs: tuple[float, ...]
    iqr: float
    n: int
    interval: Interval | None

    def as_json(self) -> dict[str, object]:
        ci95 = self.interval.as_json() if self.interval else None
        return {"median": self.median, "runs": list(self.runs), "iqr": self.iqr, "n": self.n, "ci95_mean": ci95}


@dataclass(frozen=True)
class Row:
    """All runs of one variant on one number of GPUs. Only those that ended well give numbers."""

    label: str
    runs: tuple[Measured, ...]
    notes: tuple[str, ...] = ()

    @property
    def good(self) -> tuple[Measured, ...]:
        return tuple(run for run in self.runs if run.good)

    @cached_property
    def facts(self) -> Facts:
        """Those of its first run; its nodes are all that its runs ran on."""
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
    def name(self) -> str:
        """The label with the size, which together no other row has."""
        if self.nodes:
            return f"{self.label}, {self.nodes} node{'s' * (self.nodes > 1)}"
        return f"{self.label}, {self.world} GPU{'s' * (self.world > 1)}" if self.world else self.label

    @property
    def status(self) -> str:
        """`ok`, or what is wrong: of how many runs, and with those that have no number."""
        bad = sorted({run.why_not() for run in self.runs if not run.good})
        if not bad:
            return "ok"
        counts = f"{len(self.good)} of {len(self.runs)} ok; " if len(self.runs) > 1 else ""
        return counts + ", ".join(bad)

    def measure(self, of: Callable[[RunReport], Statistic | None]) -> Measure | None:
        found = [s for run in self.good if (s := of(run.report))]
        if not found:
            return None
        runs = tuple(s.median for s in found)
        spread = statistics.median(s.iqr for s in found)
        return Measure(statistics.median(runs), runs, spread, sum(s.n for s in found), mean_interval(runs))

    def speeds(self) -> list[list[float]]:
        return [speeds for run in self.good if (speeds := run.speeds())]


def rows_of(runs: Sequence[Measured]) -> list[Row]:
    """The rows, in the order of their first runs, sizes ascending within a variant."""
    runs, notes = _newest(runs)
    keys = _by_point(runs) if all(run.study for run in runs) else _by_facts(runs)
    labels = _labels(keys, runs)
    grouped: dict[tuple[str, object], list[Measured]] = {}
    for run, label in zip(runs, labels, strict=True):
        size = run.facts.get("world_size") or run.facts.get("nodes")
        grouped.setdefault((label, size), []).append(run)
    order = list(dict.fromkeys(labels))
    found = sorted(grouped.items(), key=lambda item: (order.index(item[0][0]), _number(item[0][1])))
    return [
        Row(label, tuple(same), tuple(n for r in same for n in notes.get(r.name, ()))) for (label, _), same in found
    ]


def _number(value: object) -> float:
    return value if isinstance(value, int | float) else 0


def _newest(runs: Sequence[Measured]) -> tuple[list[Measured], dict[str, list[str]]]:
    """Of several runs of the same repeat of a point, a resubmission, only the last one that ended well counts."""
    chosen: dict[object, Measured] = {}
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


def _by_point(runs: Sequence[Measured]) -> list[Key]:
    points = [{**(run.study.point if run.study else {}), "recipe": run.facts.get("recipe")} for run in runs]
    varied = [name for name in _ordered(points) if len({repr(p.get(name)) for p in points}) > 1]
    return [tuple((n, str(p[n])) for n in varied if n not in _NODE_KEYS and p.get(n) is not None) for p in points]


def _ordered(points: Sequence[Mapping[str, object]]) -> list[str]:
    return list(dict.fromkeys(name for point in points for name in point))


def _by_facts(runs: Sequence[Measured]) -> list[Key]:
    """Without a study: whatever may change the speed and differs between the runs."""
    # A global batch in step with the number of GPUs is weak scaling, no variant.
    per_gpu = [_per_gpu(run) for run in runs]
    weak = len(set(per_gpu)) == 1 and per_gpu[0] is not None
    names = [
        name
        for name in differing([run.facts for run in runs])
        if (kind_of(name) != "neutral" or name == "precision")
        and name not in _CIRCUMSTANCES
        and not (weak and name == "global_batch_size")
    ]
    if "gpu" in names and "GPU" in names:
        names.remove("GPU")
    known = ["precision", "script", *_SHORT]
    names.sort(key=lambda n: (known.index(n) if n in known else len(known), n))
    return [
        (
            *((n, str(run.facts[n])) for n in names if n in run.facts),
            # A log that does not say what it was started with may be of anything: nobody's repeat.
            *((("run", run.name),) if "num_layers" not in run.facts else ()),
        )
        for run in runs
    ]


def _per_gpu(run: Measured) -> float | None:
    batch, world = run.facts.get("global_batch_size"), run.world
    return batch / world if isinstance(batch, int | float) and world else None


def _labels(keys: Sequence[Key], runs: Sequence[Measured]) -> list[str]:
    """A short name for each variant, with environment and such only where they tell it apart; else its first run's."""
    first = {key: runs[keys.index(key)] for key in dict.fromkeys(keys)}
    parts = {key: _parts(key, run) for key, run in first.items()}
    short = {key: ", ".join(parts[key][:_MOST_PARTS]) for key in first}
    labels = {}
    for key, label in short.items():
        alike = [other for other in first if short[other] == label]
        labels[key] = label if len(alike) == 1 else ", ".join([*parts[key], *_own_settings(key, alike)])
    count = Counter(labels.values())
    return [labels[key] if count[labels[key]] == 1 else f"{labels[key]} ({first[key].name})" for key in keys]


def _own_settings(key: Key, alike: Sequence[Key]) -> list[str]:
    """What a variant sets in its environment and Megatron's configuration, and not all that are called alike do."""
    own = (fact for fact in key if fact not in set(key).intersection(*alike))
    return [f"{name.partition(' ')[2]}={value}" for name, value in own if name.startswith(SETTINGS) and value != UNSET]


def _parts(key: Key, run: Measured) -> list[str]:
    parts = []
    for name, value in key:
        field = name.rpartition(".")[2]
        if run.study:
            # `parallel.tp` is called as the argument that it sets.
            name = next((fact for fact in facts_of_axis(name) if fact in _SHORT), name)
        if name in _SHORT:
            if value not in _SILENT or name in ("micro_batch_size", "global_batch_size"):
                parts.append(f"{_SHORT[name]} {'' if value == 'True' else value}".strip())
        elif name in ("precision", "precision.recipe", "recipe", "run"):
            parts.append(value)
        elif name == "script" and value != OWN_SCRIPT:
            parts.append(PurePath(value).stem)
        elif run.study:
            parts.append(f"{field} {value}")
    return parts or [str(run.facts.get("precision") or run.name)]

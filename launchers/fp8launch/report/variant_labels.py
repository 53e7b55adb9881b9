"""Short names for the variants of a comparison: by the axes of a study, else by what differs between the runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import PurePath

from fp8launch.engines.base import OWN_ENTRY_TITLE
from fp8launch.report.differences import differing, facts_of_axis, kind_of
from fp8launch.report.run_data import RunData
from fp8launch.report.run_facts import SETTINGS, UNSET

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
# Sizes, which rows have beside their label.
_SIZE_KEYS = ("nodes", "resources.nodes", "resources.gpus_per_node")
Key = tuple[tuple[str, str], ...]


def variant_labels(runs: Sequence[RunData]) -> list[str]:
    """Return the label of each run; runs of the same label are of one variant."""
    keys = _by_point(runs) if all(run.study for run in runs) else _by_facts(runs)
    return _labels(keys, runs)


def _by_point(runs: Sequence[RunData]) -> list[Key]:
    points = [{**(run.study.point if run.study else {}), "recipe": run.facts.get("recipe")} for run in runs]
    varied = [name for name in _ordered(points) if len({repr(p.get(name)) for p in points}) > 1]
    return [tuple((n, str(p[n])) for n in varied if n not in _SIZE_KEYS and p.get(n) is not None) for p in points]


def _ordered(points: Sequence[Mapping[str, object]]) -> list[str]:
    return list(dict.fromkeys(name for point in points for name in point))


def _by_facts(runs: Sequence[RunData]) -> list[Key]:
    """Without a study, whatever may change the speed and differs between the runs makes a variant."""
    names = [name for name in differing([run.facts for run in runs]) if _makes_variant(name)]
    # A global batch in step with the number of GPUs is weak scaling, not a variant.
    per_gpu = {_batch_per_gpu(run) for run in runs}
    if len(per_gpu) == 1 and None not in per_gpu and "global_batch_size" in names:
        names.remove("global_batch_size")
    if "gpu" in names and "GPU" in names:
        names.remove("GPU")
    known = ["precision", "script", *_SHORT]
    names.sort(key=lambda n: (known.index(n) if n in known else len(known), n))
    keys = []
    for run in runs:
        key = [(name, str(run.facts[name])) for name in names if name in run.facts]
        if "num_layers" not in run.facts and "script" not in run.facts:
            # A log without arguments or a manifest may be of anything: it is not a repeat of another.
            key.append(("run", run.name))
        keys.append(tuple(key))
    return keys


def _makes_variant(name: str) -> bool:
    if name in _CIRCUMSTANCES:
        return False
    return name == "precision" or kind_of(name) != "neutral"


def _batch_per_gpu(run: RunData) -> float | None:
    batch, world = run.facts.get("global_batch_size"), run.world
    return batch / world if isinstance(batch, int | float) and world else None


def _labels(keys: Sequence[Key], runs: Sequence[RunData]) -> list[str]:
    """A short name for each variant, with environment and such only where they distinguish it; else its first run's."""
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
    """Settings of a variant's environment and Megatron configuration that others with the same name lack."""
    own = (fact for fact in key if fact not in set(key).intersection(*alike))
    return [f"{name.partition(' ')[2]}={value}" for name, value in own if name.startswith(SETTINGS) and value != UNSET]


def _parts(key: Key, run: RunData) -> list[str]:
    parts = []
    for name, value in key:
        part = _part(name, value, in_study=run.study is not None)
        if part:
            parts.append(part)
    return parts or [str(run.facts.get("precision") or run.name)]


def _part(name: str, value: str, in_study: bool) -> str:
    """The words for one fact or axis; empty where it is not worth a word."""
    field = name.rpartition(".")[2]
    if in_study:
        # `parallel.tp` is called as the argument that it sets.
        name = next((fact for fact in facts_of_axis(name) if fact in _SHORT), name)
    if name in _SHORT:
        if value in _SILENT and name not in ("micro_batch_size", "global_batch_size"):
            return ""
        return f"{_SHORT[name]} {'' if value == 'True' else value}".strip()
    if name in ("precision", "precision.recipe", "recipe", "run"):
        return value
    if name == "script" and value != OWN_ENTRY_TITLE:
        return PurePath(value).stem
    return f"{field} {value}" if in_study else ""

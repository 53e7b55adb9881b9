"""Short names for the variants of a comparison: by the axes of a study, else by what differs between the runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import PurePath

from fp8launch.engines.base import OWN_ENTRY_TITLE
from fp8launch.report.differences import (
    differing_facts,
    facts_of_axis,
    makes_variant,
    shortened,
)
from fp8launch.report.run_data import RunData, StudyPoint
from fp8launch.report.run_facts import SETTINGS, UNSET

# Facts that do not make a variant: repeats may be of another day, place or state of the checkout.
_CIRCUMSTANCES = frozenset(
    {"commit", "uncommitted changes", "cluster", "fp8launch", "recipe", "nodes", "world_size", "node set", "driver"}
)
# Names of facts in labels, in this order. Labels omit a size of 1 and a flag that is off.
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
    "sharding": "",
    "micro_batch_size": "MBS",
    "global_batch_size": "GBS",
    "recompute_granularity": "recompute",
}
_LOSS_NAMES = {"train_iters": "iterations", "lr_warmup_iters": "warm-up", "init_method_std": "init std"}
_SILENT = ("1", "None", "False")
# Labels have at most this many parts; the table of differences has them all.
_MOST_PARTS = 4
# Arguments without a short name that a label has at most.
_MOST_OTHERS = 2
# Sizes, which rows have beside their label.
_SIZE_KEYS = ("nodes", "resources.nodes", "resources.gpus_per_node")
Key = tuple[tuple[str, str], ...]


def variant_labels(runs: Sequence[RunData]) -> list[str]:
    """Return the label of each run; runs of the same label are of one variant."""
    studies = [run.study for run in runs if run.study]
    if len(studies) == len(runs):
        return _labels(_by_point(runs, studies), runs)
    return _labels(_by_facts(runs), runs)


def _by_point(runs: Sequence[RunData], studies: Sequence[StudyPoint]) -> list[Key]:
    """In a study, the axes that vary make a variant, except sizes and seeds."""
    points = []
    for study, run in zip(studies, runs, strict=True):
        points.append({**study.point, "recipe": run.facts.get("recipe")})
    varied = []
    for name in dict.fromkeys(chain.from_iterable(points)):
        if name not in _SIZE_KEYS and facts_of_axis(name) != {"seed"} and _varies(name, points):
            varied.append(name)
    keys = []
    for point in points:
        key = []
        for name in varied:
            if point.get(name) is not None:
                key.append((name, str(point[name])))
        keys.append(tuple(key))
    return keys


def _varies(name: str, points: Sequence[Mapping[str, object]]) -> bool:
    return len({repr(point.get(name)) for point in points}) > 1


def _by_facts(runs: Sequence[RunData]) -> list[Key]:
    """Without a study, whatever differs between the runs makes a variant, except seeds, paths and circumstances."""
    names = list(filter(_makes_variant, differing_facts(runs)))
    # A global batch in step with the number of GPUs is weak scaling, not a variant.
    per_gpu = set(map(_batch_per_gpu, runs))
    if len(per_gpu) == 1 and None not in per_gpu and "global_batch_size" in names:
        names.remove("global_batch_size")
    if "gpu" in names and "GPU" in names:
        names.remove("GPU")
    order = {name: i for i, name in enumerate(("precision", "script", *_SHORT))}
    names.sort(key=lambda name: (order.get(name, len(order)), name))
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
    return name == "precision" or makes_variant(name)


def _batch_per_gpu(run: RunData) -> float | None:
    batch, world = run.facts.get("global_batch_size"), run.world
    if isinstance(batch, int | float) and world:
        return batch / world
    return None


def _labels(keys: Sequence[Key], runs: Sequence[RunData]) -> list[str]:
    """A short name for each variant, with environment and such only where they distinguish it; else its first run's."""
    first: dict[Key, RunData] = {}
    for key, run in zip(keys, runs, strict=True):
        first.setdefault(key, run)
    parts: dict[Key, list[str]] = {}
    by_label: dict[str, list[Key]] = {}
    for key, run in first.items():
        parts[key] = _parts(key, run)
        by_label.setdefault(", ".join(parts[key][:_MOST_PARTS]), []).append(key)
    labels: dict[Key, str] = {}
    for label, alike in by_label.items():
        for key in alike:
            labels[key] = label
            if len(alike) > 1:
                labels[key] = ", ".join([*parts[key], *_own_settings(key, alike)])
    count = Counter(labels.values())
    for key, label in labels.items():
        if count[label] > 1:
            labels[key] = f"{label} ({first[key].name})"
    return [labels[key] for key in keys]


def _own_settings(key: Key, alike: Sequence[Key]) -> list[str]:
    """Further settings of a variant that others with the same name lack."""
    shared = set(key).intersection(*alike)
    settings, others = [], []
    for name, value in key:
        if (name, value) in shared:
            continue
        if name.startswith(SETTINGS):
            if value != UNSET:
                settings.append(f"{name.partition(' ')[2]}={value}")
        elif name not in _SHORT and name not in ("precision", "script", "recipe", "run"):
            others.append(f"{_LOSS_NAMES.get(name, name.replace('_', ' '))} {shortened(value)}")
    if len(others) > _MOST_OTHERS:
        return settings  # the run's name is easier to read
    return [*settings, *others]


def _parts(key: Key, run: RunData) -> list[str]:
    words = []
    for name, value in key:
        word = _part(name, value, in_study=run.study is not None)
        if word:
            words.append(word)
    return words or [str(run.facts.get("precision") or run.name)]


def _part(name: str, value: str, in_study: bool) -> str:
    """The words for one fact or axis; empty where it is not worth a word."""
    field = name.rpartition(".")[2]
    if in_study:
        # `parallel.tp` is called as the argument that it sets.
        for fact in facts_of_axis(name) & _SHORT.keys():
            name = fact
    if name in _SHORT:
        if value in _SILENT and name not in ("micro_batch_size", "global_batch_size"):
            return ""
        if value == "True":
            return _SHORT[name]
        return f"{_SHORT[name]} {value}".strip()
    if name in ("precision", "precision.recipe", "recipe", "run"):
        return value
    if name == "script" and value != OWN_ENTRY_TITLE:
        return PurePath(value).stem
    if in_study:
        return f"{field} {value}"
    return ""

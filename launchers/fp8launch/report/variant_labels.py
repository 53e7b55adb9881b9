"""Short names for the variants of a comparison: by the axes of a study, else by the differences between the runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import PurePath

from fp8launch.engines.base import OWN_ENTRY_TITLE
from fp8launch.report.differences import (
    LEARNING,
    differing_facts,
    facts_of_axis,
    makes_variant,
    shortened,
)
from fp8launch.report.read_run import SETTINGS, UNSET
from fp8launch.report.run_report import RunReport, StudyPoint

# Names of facts in labels, in this order. Labels omit parallel sizes of 1 and features that are off.
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
    "optimizer": "",
    "lr": "lr",
    "min_lr": "min lr",
    "lr_decay_style": "decay",
    "lr_warmup_iters": "warm-up",
    "weight_decay": "weight decay",
    "init_method_std": "init std",
    "train_iters": "iterations",
}
_OFF = ("None", "False", "none")
_PARALLEL = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size",
    "context_parallel_size", "expert_model_parallel_size",
)  # fmt: skip
# Labels with more letters lose parts that do not distinguish anything; the table of differences has them all. Parts
# that are off in other labels, such as FSDP, are only dropped from far longer ones, because a missing part reads as
# off.
_LONG, _FAR_TOO_LONG = 28, 64
# Parts that are never dropped, because they identify the measurement.
_KEPT = (
    "precision", "precision.recipe", "recipe", "script", "run", "gpu", "GPU", "seq_length", "num_layers",
    "num_experts",
)  # fmt: skip
# The largest number of other facts in labels.
_MOST_OTHERS = 3
# Sizes, which rows have in addition to their label.
_SIZE_KEYS = ("nodes", "resources.nodes", "resources.gpus_per_node")
# Facts that labels by facts include even if other facts distinguish the runs.
_ALWAYS = {"precision", "script", "run", *_SHORT} - {*LEARNING, "train_iters"} | {"global_batch_size"}
Key = tuple[tuple[str, str], ...]


def variant_labels(runs: Sequence[RunReport]) -> list[str]:
    """Return the label of each run. Runs with the same label are repeats of one variant.

    The axes of a study name its variants. Between studies, only the facts of the runs show whether they are repeats.
    """
    studies = [run.study for run in runs if run.study]
    if len(studies) == len(runs) and _same_study(runs):
        return _labels(_by_point(runs, studies), runs, by_point=True)
    return _labels(_by_facts(runs), runs, by_point=False)


def _same_study(runs: Sequence[RunReport]) -> bool:
    """Return whether all runs are points of one study; studies in different folders may share a name."""
    axes = {(run.study.name, tuple(sorted(run.study.point))) for run in runs if run.study}
    folders = {PurePath(run.sources[0]).parent for run in runs if run.sources}
    return len(axes) == 1 and len(folders) <= 1


def _by_point(runs: Sequence[RunReport], studies: Sequence[StudyPoint]) -> list[Key]:
    """In a study, all axes that vary, except sizes and seeds, define a variant."""
    points = []
    for study, run in zip(studies, runs, strict=True):
        # A stage has a single recipe, so its name is enough.
        points.append(study.point if "stage" in study.point else {**study.point, "recipe": run.facts.get("recipe")})
    varied = []
    for name in dict.fromkeys(chain.from_iterable(points)):
        varies = len({repr(point.get(name)) for point in points}) > 1
        if varies and name not in _SIZE_KEYS and facts_of_axis(name) != {"seed"}:
            varied.append(name)
    keys = []
    for point in points:
        key = []
        for name in varied:
            if point.get(name) is not None:
                key.append((name, str(point[name])))
        keys.append(tuple(key))
    return keys


def _by_facts(runs: Sequence[RunReport]) -> list[Key]:
    """Without a study, all differing facts, except seeds, paths and circumstances, define a variant."""
    names = list(filter(makes_variant, differing_facts(runs)))
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


def _batch_per_gpu(run: RunReport) -> float | None:
    batch, world = run.facts.get("global_batch_size"), run.setup.world_size
    if isinstance(batch, int | float) and world:
        return batch / world
    return None


def _labels(keys: Sequence[Key], runs: Sequence[RunReport], by_point: bool) -> list[str]:
    """Name each variant by as few facts as distinguish it, or by its first run if too many would be needed."""
    first: dict[Key, RunReport] = {}
    for key, run in zip(keys, runs, strict=True):
        first.setdefault(key, run)
    variants = [dict(key) for key in first]
    names: dict[str, None] = {}
    for variant in variants:
        names |= dict.fromkeys(variant)
    words: dict[str, list[str]] = {}
    others: dict[str, list[str]] = {}
    for name in names:
        texts = [_word(name, variant[name], by_point) if name in variant else "" for variant in variants]
        if not by_point and name not in _ALWAYS:
            others[name] = texts
        elif any(texts):
            words[name] = texts
    _add_needed(words, others, len(variants))
    _shorten(words, variants)
    labels = dict.fromkeys(first, "")
    for i, key in enumerate(first):
        labels[key] = _joined(words, i)
    if "" in labels.values():
        for key, run in first.items():
            known = str(run.facts.get("precision") or run.name)
            labels[key] = ", ".join(filter(None, (known if known not in labels[key] else "", labels[key])))
    count = Counter(labels.values())
    for key, label in labels.items():
        if count[label] > 1:
            labels[key] = f"{label} ({first[key].name})"
    return [labels[key] for key in keys]


def _distinct(words: Mapping[str, Sequence[str]], variants: int) -> int:
    """Count the variants that these words distinguish."""
    return len({tuple(texts[i] for texts in words.values()) for i in range(variants)})


def _add_needed(words: dict[str, list[str]], others: Mapping[str, list[str]], variants: int) -> None:
    """Add facts that distinguish further variants, if few suffice: a run's name is easier to read than many facts."""
    added: dict[str, list[str]] = {}
    for name, texts in others.items():
        more = {**words, **added, name: texts}
        if _distinct(more, variants) > _distinct({**words, **added}, variants):
            added[name] = texts
    if len(added) <= _MOST_OTHERS:
        words |= added


def _joined(words: Mapping[str, Sequence[str]], variant: int) -> str:
    return ", ".join(texts[variant] for texts in words.values() if texts[variant])


def _shorten(words: dict[str, list[str]], variants: Sequence[Mapping[str, str]]) -> None:
    """Drop facts that distinguish nothing from long labels, the least important first.

    First from all labels, then from single ones.
    """
    every = range(len(variants))
    distinct = _distinct(words, len(variants))
    optional = []
    for name in reversed(list(words)):
        limit = _LONG
        off_in_some = any(name in variant and not text for variant, text in zip(variants, words[name], strict=True))
        if name != "sequence_parallel" and off_in_some:
            limit = _FAR_TOO_LONG
        fewer = {other: texts for other, texts in words.items() if other != name}
        if name in _KEPT or max(len(_joined(words, i)) for i in every) <= limit:
            continue
        if _distinct(fewer, len(variants)) == distinct:
            del words[name]
        elif limit == _LONG:
            optional.append(name)
    full = {name: list(texts) for name, texts in words.items()}
    for name in optional:
        # Learning settings are kept if they differ among rows of one model, other settings if only they differ.
        alike = [_words_of_model(full, i) if name in LEARNING else _without(full, name, i) for i in every]
        too_long = {alike[i] for i in every if len(_joined(words, i)) > _LONG}
        for i in every:
            values = {full[name][j] for j in every if alike[j] == alike[i]}
            if alike[i] in too_long and len(values) == 1:
                words[name][i] = ""
                if _distinct(words, len(variants)) < distinct:
                    words[name][i] = full[name][i]


def _words_of_model(words: Mapping[str, Sequence[str]], variant: int) -> tuple[str, ...]:
    return tuple(texts[variant] for name, texts in words.items() if name in _KEPT and not name.startswith("precision"))


def _without(words: Mapping[str, Sequence[str]], name: str, variant: int) -> tuple[str, ...]:
    """Return the other words of a variant."""
    return tuple(texts[variant] for other, texts in words.items() if other != name)


def short_name(fact: str) -> str:
    """Return the name of a fact in labels and pictures."""
    return _SHORT.get(fact) or fact.replace("_", " ")


def words_of(fact: str, value: object) -> str:
    """Return the words for a fact in labels."""
    return _word(fact, str(value), by_point=False)


def _word(name: str, value: str, by_point: bool) -> str:
    """Return the words for one fact or axis; empty for a parallel size of 1 and for a feature that is off."""
    if by_point:
        # `parallel.tp` has the short name of the argument that it sets.
        for fact in facts_of_axis(name) & _SHORT.keys():
            name = fact
    if name in _SHORT:
        if value in _OFF or (value == "1" and name in _PARALLEL):
            return ""
        if value == "True":
            return _SHORT[name]
        return f"{_SHORT[name]} {value}".strip()
    if name in ("precision", "precision.recipe", "recipe", "run"):
        return value
    if name == "script":
        return "" if value == OWN_ENTRY_TITLE else PurePath(value).stem
    if by_point:
        return f"{name.rpartition('.')[2]} {value}"
    if name.startswith(SETTINGS):
        return "" if value == UNSET else f"{name.partition(' ')[2]}={value}"
    words = name.replace("_", " ")
    if value in _OFF:
        return ""
    if "/" in value and len(value) > _LONG:
        value = f"…/{PurePath(value).name}"
    return words if value == "True" else f"{words} {shortened(value)}"

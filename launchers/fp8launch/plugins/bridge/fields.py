"""Fields of Megatron-Bridge's configuration, their places in a recipe, and Megatron's names for the same.

Sources, release 0.6.0: `ConfigContainer` of megatron/bridge/training/config.py, `MixedPrecisionConfig` of
training/mixed_precision.py, `CommOverlapConfig` of training/comm_overlap.py, and Megatron-LM's own mapping of its
arguments to the same dataclasses (megatron/training/arguments.py, core_transformer_config_from_args).
"""

from __future__ import annotations

import functools
import json
import lzma
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

_DATA = pathlib.Path(__file__).with_name("fields.json.xz")
Path: TypeAlias = "tuple[str, ...]"

# Sections of Bridge's configuration; `env_vars` are a recipe's `env`.
SECTIONS = (
    "rng", "rerun_state_machine", "train", "model", "optimizer", "ddp", "validation", "scheduler", "dataset", "logger",
    "tokenizer", "checkpoint", "dist", "ft", "straggler", "nvrx_straggler", "profiling", "peft", "comm_overlap",
    "mixed_precision", "tensor_inspect", "inprocess_restart",
)  # fmt: skip

# Fields of Bridge with a recipe key. The first field of a key determines it; the fields
# after it are set along with it.
OWN_KEYS: Mapping[str, Path] = {
    "train.train_iters": ("train", "iterations"),
    "optimizer.lr": ("train", "lr"),
    "optimizer.min_lr": ("train", "min_lr"),
    "scheduler.lr_warmup_iters": ("train", "warmup"),
    "train.micro_batch_size": ("batch", "micro"),
    "train.global_batch_size": ("batch", "global"),
    "dataset.seq_length": ("batch", "sequence"),
    "model.seq_length": ("batch", "sequence"),
    "model.tensor_model_parallel_size": ("parallel", "tp"),
    "model.pipeline_model_parallel_size": ("parallel", "pp"),
    "model.virtual_pipeline_model_parallel_size": ("parallel", "vp"),
    "model.context_parallel_size": ("parallel", "cp"),
    "model.expert_model_parallel_size": ("parallel", "ep"),
    "model.expert_tensor_parallel_size": ("parallel", "etp"),
    "model.sequence_parallel": ("parallel", "sequence"),
    "checkpoint.save": ("checkpoint", "dir"),
    "checkpoint.save_interval": ("checkpoint", "interval"),
    "checkpoint.load": ("checkpoint", "load"),
}

# The axes of the index, and the field of each.
AXES: Mapping[str, str] = {key[1]: field for field, key in OWN_KEYS.items() if key[0] == "parallel"}

# Megatron's attribute for a field, where it has another name.
ATTRIBUTES: Mapping[str, str] = {
    "model.virtual_pipeline_model_parallel_size": "num_virtual_stages_per_pipeline_rank",
    "model.num_moe_experts": "num_experts",
    "model.gated_linear_unit": "swiglu",
    "model.num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
    "model.num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
    "model.bias_activation_fusion": "bias_swiglu_fusion",
    "model.use_te_rng_tracker": "te_rng_tracker",
    "mixed_precision.grad_reduce_in_fp32": "accumulate_allreduce_grads_in_fp32",
    "ddp.grad_reduce_in_fp32": "accumulate_allreduce_grads_in_fp32",
    "dataset.fast_cache_load": "dataloader_fast_cache_load",
    "dataset.defer_npy_index_mmap": "dataloader_defer_npy_index_mmap",
    "dataset.path_to_cache": "data_cache_path",
    "ddp.bucket_size": "ddp_bucket_size",
    "ddp.num_buckets": "ddp_num_buckets",
    "ddp.average_in_collective": "ddp_average_in_collective",
    "scheduler.lr_warmup_iters": "lr_warmup_iters",
    "scheduler.lr_decay_iters": "lr_decay_iters",
    "rng.seed": "seed",
}
# Sections whose other fields have Megatron's own names.
SAME_NAMES = ("model", "mixed_precision", "ddp", "optimizer", "comm_overlap", "train", "checkpoint", "dataset")
# Fields of Bridge that Megatron-LM derives from other arguments, names differently, or does not use in a model.
DERIVED = frozenset((
    "cuda_graph_scope", "expert_tensor_parallel_size", "fp4_param", "fp8_param", "num_virtual_stages_per_pipeline_rank",
    "params_dtype", "pipeline_dtype", "pipeline_model_parallel_layout", "should_pad_vocab", "tokenizer_type",
))  # fmt: skip
# Letters of what a field takes, and the types of values.
_KINDS = {"b": "true or false", "i": "a whole number", "f": "a number", "s": "a text", "l": "a list"}
_LETTERS = {bool: "b", int: "i", float: "f", str: "s", list: "l", type(None): "n"}
_DTYPES = {"torch.float32": "fp32", "torch.float16": "fp16", "torch.bfloat16": "bf16", "torch.uint8": "fp8"}
# Layers of a pipeline's layout, and the letters for them on Megatron-LM's command line.
PIPELINE_LAYERS = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
_WORD = re.compile(r"[A-Za-z_/][A-Za-z0-9_./@+-]*")
# What Hydra reads as another value than the text.
_NO_TEXT = frozenset(("true", "false", "null", "nan", "inf"))


@functools.cache
def fields_of(release: str) -> Mapping[str, Mapping[str, str]]:
    """Return the fields of each section in a release, over all its possible classes, with the values that each takes.

    `kind_of` in tools/bridge_fields.py defines the notation. The result is empty for a release without an entry.
    """
    known = json.loads(lzma.decompress(_DATA.read_bytes())).get(release, {})
    found: dict[str, dict[str, str]] = {}
    for section, fields in known.items():
        found[section] = {}
        for field in fields.split():
            name, _, kind = field.partition("=")
            found[section][name] = kind
    return found


def refused_value(kind: str, value: Any) -> str | None:
    """Return a description of the values that a field takes if `value` is not one of them, else None."""
    letters, _, words = kind.partition(":")
    own = "m" if isinstance(value, Mapping) else _LETTERS.get(type(value), "?")
    fits = own in letters or (own == "i" and "f" in letters)
    allowed: list[str] = []
    if words:
        allowed = words.split("|")
    if not letters or (fits and not (own == "s" and allowed and value not in allowed)):
        return None
    taken = []
    for letter in "bifsl":
        # Of a text with allowed values those are named instead.
        if letter in letters and not (letter == "s" and allowed):
            taken.append(_KINDS[letter])
    taken += allowed
    if "n" in letters:
        taken.append("null")
    return " or ".join(taken)


def attribute_of(field: str) -> str | None:
    """Return Megatron's name for a field such as `model.num_layers`, or None for a section that Megatron-LM lacks."""
    if field in ATTRIBUTES:
        return ATTRIBUTES[field]
    section, _, name = field.partition(".")
    if section not in SAME_NAMES:
        return None
    return name


def attribute_value(name: str, value: Any) -> Any:
    """Return an attribute's value as Megatron's arguments hold it: data types and a pipeline's layout as short text."""
    if name == "pipeline_model_parallel_layout" and isinstance(value, list):
        return pipeline_text(value)
    if isinstance(value, str):
        return _DTYPES.get(value, value)
    return value


def are_stages(value: Sequence[Any]) -> bool:
    """Return whether a value lists the layers of each pipeline stage, by Megatron's names."""
    return all(isinstance(stage, list) and set(map(str, stage)) <= PIPELINE_LAYERS.keys() for stage in value)


def pipeline_text(stages: Sequence[Sequence[str]]) -> str:
    """Return the layers of each pipeline stage in Megatron-LM's notation, such as `Ettt|tttL`."""
    texts = []
    for stage in stages:
        texts.append("".join(PIPELINE_LAYERS.get(layer, layer) for layer in stage))
    return "|".join(texts)


def flat(overrides: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Path, Any]]:
    """Yield (field, path in `overrides`, value) of nested or dotted overrides, such as `{train: {train_iters: 50}}`."""
    for key, value in overrides.items():
        field = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            for below, path, found in flat(value, f"{field}."):
                yield below, (key, *path), found
        else:
            yield field, (key,), value


def blend_prefixes(blend: Any) -> list[str]:
    """Return the paths of a blend in Bridge's format, `[[PATH, ...], [WEIGHT, ...]]` or `[[PATH, ...], null]`.

    The paths have no suffix. The result is empty for anything else.
    """
    if not isinstance(blend, list) or len(blend) != 2 or not isinstance(blend[0], list):
        return []
    paths: list[Any] = blend[0]
    weights = blend[1]
    if not all(isinstance(path, str) for path in paths):
        return []
    if weights is not None:
        numbers = isinstance(weights, list) and all(type(weight) in (int, float) for weight in weights)
        if not numbers or len(weights) != len(paths) or min(weights, default=0) < 0 or sum(weights) <= 0:
            return []
    return paths


def hydra(field: str, value: Any) -> str:
    """Return `field=value` in the syntax of Hydra, which Bridge parses overrides with."""
    return f"{field}={_text(value)}"


def _text(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list):
        return f"[{','.join(map(_text, value))}]"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_text(item)}" for key, item in value.items()) + "}"
    text = str(value)
    if _WORD.fullmatch(text) and text.lower() not in _NO_TEXT:
        return text
    # Inside quotes, Hydra unescapes quotes, and backslashes only before a quote.
    return '"' + re.sub(r'(\\*)("|$)', lambda found: found[1] * 2 + found[2].replace('"', '\\"'), text) + '"'

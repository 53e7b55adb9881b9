"""The settings of a Bridge recipe by Megatron's attribute names: the pack's model, the index, and overrides."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fp8launch.injob.regular_files import read_regular
from fp8launch.megatron.arguments import as_parsed, attributes
from fp8launch.megatron.schema import load_schema
from fp8launch.plugins.bridge.fields import AXES, attribute_of, attribute_value
from fp8launch.plugins.bridge.hybrids import HYBRID_DEFAULTS, HYBRIDS
from fp8launch.plugins.bridge.index import BridgeRecipe
from fp8launch.plugins.bridge.settings import Setting
from fp8launch.recipe.load import read_recipe
from fp8launch.resources import pack_folder
from fp8launch.untyped import as_int, as_mapping

# Release to the Megatron-Core of its container (docs/releases/software-versions.md), 0.6.0 by its submodule's version.
# No table states 0.6.2's: pip installs the newest 0.19 with its wheel.
MEGATRON = {"0.4.0": "0.17.0", "0.5.0": "0.18.0", "0.6.0": "0.19.0", "0.6.2": "0.19.2"}


def megatron_of(release: str) -> str:
    """Return the Megatron-Core of a release of Bridge; of one without an entry, the newest entry's."""
    return MEGATRON.get(release, list(MEGATRON.values())[-1])


# Models on the hub that performance recipes read and whose published configuration is in the pack.
PARTS = {
    "meta-llama/Meta-Llama-3-8B": "llama3_8b",
    "meta-llama/Meta-Llama-3-70B": "llama3_70b",
    "meta-llama/Meta-Llama-3.1-405B": "llama3_1_405b",
    "deepseek-ai/DeepSeek-V3": "deepseek_v3",
    "moonshotai/Kimi-K2-Instruct": "kimi_k2",
    "Qwen/Qwen3-30B-A3B": "qwen3_30b_a3b",
    "Qwen/Qwen3-235B-A22B": "qwen3_235b_a22b",
    "Qwen/Qwen3-Next-80B-A3B-Instruct": "qwen3_next_80b_a3b",
    "openai/gpt-oss-20b": "gpt_oss_20b",
    "openai/gpt-oss-120b": "gpt_oss_120b",
}
_LLAMA: Mapping[str, Any] = {"init_method_std": 0.02, "bias_dropout_fusion": True}
_QWEN3: Mapping[str, Any] = {"moe_router_load_balancing_type": "aux_loss"}
# Settings that Bridge gives a model and the pack's part does not (megatron/bridge/models, *_bridge.py of 0.6.2).
_OF_BRIDGE: Mapping[str, Mapping[str, Any]] = {
    "llama3_8b": _LLAMA,
    "llama3_70b": _LLAMA,
    "llama3_1_405b": _LLAMA,
    "deepseek_v3": {"moe_aux_loss_coeff": 1e-3, "bias_dropout_fusion": True, "moe_router_dtype": "fp32"},
    "qwen3_30b_a3b": _QWEN3,
    "qwen3_235b_a22b": _QWEN3,
    "qwen3_next_80b_a3b": {
        "moe_router_load_balancing_type": "global_aux_loss",
        "moe_aux_loss_coeff": 1e-3,
        "moe_router_dtype": "fp32",
        "moe_grouped_gemm": True,
        "moe_permute_fusion": True,
        "moe_token_dispatcher_type": "alltoall",
    },
}
# The same up to 0.5, where the bridge did not read `aux_loss_alpha` of the model.
_UP_TO_0_5: Mapping[str, Mapping[str, Any]] = {"deepseek_v3": {"moe_aux_loss_coeff": 1e-4}}
# Bucket size, in elements, with which Bridge overlaps data parallel communication (comm_overlap.py).
_BUCKET = 128 * 1024 * 1024
# Megatron's attribute for a key of a Hugging Face configuration: the sizes that a model of the same kind may change.
_SIZES = {
    "num_hidden_layers": "num_layers",
    "hidden_size": "hidden_size",
    "intermediate_size": "ffn_hidden_size",
    "moe_intermediate_size": "moe_ffn_hidden_size",
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_query_groups",
    "head_dim": "kv_channels",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_position_embeddings",
}
_LARGEST_CONFIG = 1 << 20  # bytes
# Bridge's tokenizer for mock data, which has a vocabulary size but no vocabulary.
NULL_TOKENIZER = "NullTokenizer"
# Defaults of Bridge's MixedPrecisionConfig that differ from Megatron-LM's if a precision is set.
_PRECISION_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "fp8": {"fp8_recipe": "tensorwise"},
    "fp4": {"fp4_recipe": "nvfp4"},
}


def of_recipe(recipe: BridgeRecipe, folder: str | None = None) -> dict[str, Any]:
    """Return the settings of the recipe itself, without the model's shape if the pack does not have the model.

    `folder` has a configuration that replaces the hub's. If it cannot be read from here, it is assumed to equal the
    configuration of the model that the recipe names.
    """
    found = _of_hub_models(recipe)
    if found and folder is not None:
        found |= _sizes(Path(folder))
    hybrid = [HYBRIDS[hub] for hub in recipe.hub if hub in HYBRIDS]
    if hybrid or "hybrid_layer_pattern" in recipe.settings:
        found |= HYBRID_DEFAULTS
        for sizes in hybrid:
            found |= sizes
    for field, value in _fields(recipe):
        name = attribute_of(field)
        if name is not None:
            found[name] = attribute_value(name, value)
    if recipe.sections.get("comm_overlap"):
        found.setdefault("ddp_bucket_size", _BUCKET)
    # Megatron-LM's flag for the gradients' type has the opposite sense.
    found["grad_reduce_in_bf16"] = not found.get("accumulate_allreduce_grads_in_fp32", True)
    if recipe.task == "peft":
        # Without it, memory, FLOPs and speed are not estimated: the models assume that all weights are trained.
        found.pop("vocab_size", None)
    if "cpu_offloading_num_layers" in found:
        found.setdefault("cpu_offloading", False)  # the switch; Megatron-LM's is the number
    for operands, defaults in _PRECISION_DEFAULTS.items():
        if found.get(operands):
            found = {**defaults, **found}
    return found


def _of_hub_models(recipe: BridgeRecipe) -> dict[str, Any]:
    """Return the shape of the hub models that the recipe names, as far as the pack has them."""
    found: dict[str, Any] = {}
    for hub in recipe.hub:
        if hub in PARTS:
            part = PARTS[hub]
            found |= {**_model(part, megatron_of(recipe.release)), **_OF_BRIDGE.get(part, {})}
            if recipe.release < "0.6":
                found |= _UP_TO_0_5.get(part, {})
    return found


def of_run(recipe: BridgeRecipe, settings: Mapping[str, Setting], folder: str | None = None) -> dict[str, Any]:
    """Return the settings of a run: the recipe's with the fields that the run sets."""
    result = of_recipe(recipe, folder)
    for field, setting in settings.items():
        name = attribute_of(field)
        if name is not None:
            result[name] = attribute_value(name, setting.value)
    if (result.get("tensor_model_parallel_size") or 1) < 2:
        result["tp_comm_overlap"] = False  # as Bridge does when it sets a run up
    words = null_vocabulary(recipe, settings)
    if words is not None:
        result["vocab_size"] = words
    return {name: value for name, value in result.items() if value is not None}


def own_vocabulary(recipe: BridgeRecipe, folder: str | None) -> int | None:
    """Return the size of the vocabulary in the model's configuration, or None if neither folder nor pack has it."""
    sizes = _sizes(Path(folder)) if folder is not None else {}
    return as_int(sizes.get("vocab_size", of_recipe(recipe).get("vocab_size")))


def null_vocabulary(recipe: BridgeRecipe, settings: Mapping[str, Setting]) -> int | None:
    """Return the size of the vocabulary that a NullTokenizer gives the model, or None if the model keeps its own.

    Source: `_validate_and_set_vocab_size` of megatron/bridge/training/setup.py, 0.6.0.
    """
    if recipe.task != "pretrain":
        return None
    stated = {field: setting.value for field, setting in settings.items()}
    always = stated.get("tokenizer.use_tokenizer_vocab_size", recipe.takes_vocabulary == "always")
    if not always and (recipe.takes_vocabulary != "if unset" or stated.get("model.vocab_size") is not None):
        return None
    null = NULL_TOKENIZER if recipe.null_vocabulary is not None else None
    if stated.get("tokenizer.tokenizer_type", null) != NULL_TOKENIZER:
        return None
    return as_int(stated.get("tokenizer.vocab_size", recipe.null_vocabulary))


def _fields(recipe: BridgeRecipe) -> Iterator[tuple[str, Any]]:
    """Yield the fields that a recipe of the index sets, each with its section."""
    for axis, size in recipe.layout.items():
        yield AXES[axis], size
    for name, value in recipe.settings.items():
        yield f"model.{name}", value
    # When Bridge sets up a run, communication and precision settings win over the model's own values.
    for section in ("optimizer", "ddp", "mixed_precision", "comm_overlap", "dataset"):
        for name, value in as_mapping(recipe.sections.get(section)).items():
            yield f"{section}.{name}", value
    yield "train.micro_batch_size", recipe.micro_batch
    yield "train.global_batch_size", recipe.global_batch
    yield "train.train_iters", recipe.iterations
    yield "model.seq_length", recipe.sequence
    if recipe.fsdp:
        yield "ddp.use_megatron_fsdp", True


def _sizes(folder: Path) -> dict[str, Any]:
    """Return the sizes in a folder's config.json, by Megatron's names."""
    try:
        stated = json.loads(read_regular(folder / "config.json", _LARGEST_CONFIG))
    except (OSError, ValueError, RecursionError):
        return {}
    sizes = as_mapping(stated)
    found = {name: sizes[key] for key, name in _SIZES.items() if isinstance(sizes.get(key), int)}
    heads = found.get("num_attention_heads")
    if "hidden_size" in found and heads and "kv_channels" not in found:
        found["kv_channels"] = found["hidden_size"] // heads
    return found


@functools.cache
def _model(part: str, version: str) -> Mapping[str, Any]:
    """Return the attributes that a model of the pack sets, as far as this Megatron has them."""
    schema = load_schema(version)
    tree = read_recipe(str(pack_folder("recipes") / "models" / f"{part}.yaml")).tree
    stated = {**tree.find(("model",)).plain(), **tree.find(("megatron",)).plain()}
    values = {name: value for name, value in stated.items() if value is not None and schema.find(name)}
    return attributes(as_parsed(values, schema), schema)

"""Stop a conversion that would lose something: unmapped parameters, tensors on one side only, other settings."""
# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fp8launch.injob.rank import worker
from fp8launch.plugins.convert.injob.output import of_all_ranks

LOAD = "megatron.bridge.training.checkpointing"
# Sizes and settings that must be the same on both sides: by TransformerConfig's name, and by the attribute of
# Megatron-LM's arguments.
_SETTINGS = {
    "num_layers": "num_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "ffn_hidden_size",
    "num_attention_heads": "num_attention_heads",
    "num_query_groups": "num_query_groups",
    "kv_channels": "kv_channels",
    "normalization": "normalization",
    "layernorm_epsilon": "layernorm_epsilon",
    "qk_layernorm": "qk_layernorm",
    "gated_linear_unit": "swiglu",
    "position_embedding_type": "position_embedding_type",
    "rotary_base": "rotary_base",
    "rotary_percent": "rotary_percent",
    "rope_scaling": "use_rope_scaling",
    "num_moe_experts": "num_experts",
    "moe_ffn_hidden_size": "moe_ffn_hidden_size",
    "moe_router_topk": "moe_router_topk",
    "moe_router_pre_softmax": "moe_router_pre_softmax",
}
_OF_EXPERTS = frozenset(("num_moe_experts", "moe_ffn_hidden_size", "moe_router_topk", "moe_router_pre_softmax"))
# Hugging Face tensors that are computed from the configuration.
_DERIVED = ("rotary_emb.inv_freq",)


def refuse_unmapped(source: Any, model: Sequence[Any]) -> set[str]:
    """Exit if a parameter of Megatron's model has no Hugging Face tensor. Return the tensors that are used."""
    core: Any = importlib.import_module("megatron.core.utils")
    tasks = source._model_bridge.build_conversion_tasks(source.hf_pretrained, core.unwrap_model(list(model)))
    mapped = [task for task in tasks if task is not None]
    here = {task.global_param_name for task in mapped if task.megatron_module is not None}
    everywhere: set[str] = set().union(*of_all_ranks(here))
    lost = len(tasks) - len(mapped)
    names = sorted({task.global_param_name for task in mapped} - everywhere)
    if lost or names:
        shown = ""
        if names:
            shown = f": {', '.join(names[:3])}"
        worker.stop(
            worker.WRONG_REQUEST,
            f"{lost + len(names)} parameters of Megatron's model have no tensor in the Hugging Face model{shown}",
        )
    used: set[str] = set()
    for task in tasks:
        stated = task.mapping.hf_param
        if isinstance(stated, str):
            used.add(stated)
        else:
            used.update(stated.values())
    return used


def unused_tensors(source: Any, used: set[str]) -> list[str]:
    """Return the Hugging Face tensors that become no parameter of Megatron's model."""
    config = source.hf_pretrained.config
    tied = bool(getattr(config, "tie_word_embeddings", False))
    found = []
    for name in sorted(source.hf_pretrained.state.keys()):
        if name not in used and not name.endswith(_DERIVED) and not (tied and name == "lm_head.weight"):
            found.append(name)
    return found


def refuse_other_tensors(checkpoint: Path, model: Sequence[Any], provider: Any) -> None:
    """Exit if the checkpoint has tensors that the model lacks, which would be dropped silently."""
    dist: Any = importlib.import_module("megatron.core.dist_checkpointing")
    stored = dist.load_tensors_metadata(str(checkpoint))
    mine: set[str] = set().union(*of_all_ranks(_tensors_of(model)))
    left = []
    for name in sorted(stored):
        of_model = not name.startswith(("optimizer.", "chained_")) and "_extra_state" not in name
        if of_model and name not in mine:
            left.append(name)
    if left:
        worker.stop(
            worker.WRONG_REQUEST,
            f"{checkpoint} has {len(left)} tensors that the Hugging Face model lacks, such as {', '.join(left[:3])}; "
            "name the model that the run trained with --model",
        )
    embeddings = [name for name in stored if name.endswith("word_embeddings.weight")]
    if not embeddings:
        return
    rows = stored[embeddings[0]].global_shape[0]
    if rows < provider.vocab_size:
        worker.stop(
            worker.WRONG_REQUEST,
            f"{checkpoint} has {rows} token embeddings, the Hugging Face model {provider.vocab_size}; "
            "name the model that the run trained with --model",
        )


def _tensors_of(model: Sequence[Any]) -> set[str]:
    """Return the names of this rank's tensors in a checkpoint."""
    mapping: Any = importlib.import_module("megatron.core.dist_checkpointing.mapping")
    utils: Any = importlib.import_module("megatron.core.dist_checkpointing.dict_utils")
    core: Any = importlib.import_module("megatron.core.utils")
    sharded = (mapping.ShardedTensor, mapping.ShardedTensorFactory)
    names: set[str] = set()
    for part in core.unwrap_model(list(model)):
        for value in utils.nested_values(part.sharded_state_dict()):
            if isinstance(value, sharded):
                names.add(value.key)
    return names


def settings_of(provider: Any) -> dict[str, Any]:
    """Return the model settings that a run must state, by the names of Megatron-LM's arguments."""
    found = {}
    for name, argument in _SETTINGS.items():
        value = getattr(provider, name, None)
        if value is not None and (name not in _OF_EXPERTS or getattr(provider, "num_moe_experts", None)):
            found[argument] = value
    found["untie_embeddings_and_output_weights"] = not getattr(provider, "share_embeddings_and_output_weights", False)
    return found


def recorded_settings(checkpoint: Path) -> Mapping[str, Any]:
    """Return these settings of a checkpoint, from the Megatron-LM arguments or the Bridge configuration in it."""
    run_config = checkpoint / "run_config.yaml"
    if run_config.is_file():
        load: Any = importlib.import_module(LOAD)
        stated = load.read_run_config(str(run_config)).get("model", {})
        found = {argument: stated.get(name) for name, argument in _SETTINGS.items()}
        if "share_embeddings_and_output_weights" in stated:
            found["untie_embeddings_and_output_weights"] = not stated["share_embeddings_and_output_weights"]
        return found
    dist: Any = importlib.import_module("megatron.core.dist_checkpointing")
    args = dist.load_common_state_dict(str(checkpoint)).get("args")
    if args is None:
        return {}
    found = {argument: getattr(args, argument, None) for argument in _SETTINGS.values()}
    found["untie_embeddings_and_output_weights"] = getattr(args, "untie_embeddings_and_output_weights", None)
    if not getattr(args, "group_query_attention", True):
        found["num_query_groups"] = found["num_attention_heads"]
    return found


def differences(model: Mapping[str, Any], checkpoint: Mapping[str, Any]) -> list[str]:
    """Return the settings that both sides state with different values."""
    found = []
    for name, wanted in model.items():
        there = checkpoint.get(name)
        if there is not None and there != wanted:
            found.append(f"{name} is {there} in the checkpoint and {wanted} in the model")
    return found

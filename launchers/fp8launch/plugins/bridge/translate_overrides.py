"""Translate overrides for recipes of Megatron-LM to fields of Bridge's configuration, release 0.6.0."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fp8launch.megatron.model_arithmetic import parse_layout

# Keys of a recipe that mean the same for every engine.
_SHARED = ("batch.", "parallel.", "env.")
_FIELDS: Mapping[str, tuple[str, ...]] = {
    **{f"megatron.recompute_{name}": (f"model.recompute_{name}",) for name in ("granularity", "method", "num_layers")},
    "megatron.recompute_modules": ("model.recompute_modules",),
    "megatron.pipeline_model_parallel_layout": ("model.pipeline_model_parallel_layout",),
    "megatron.cross_entropy_loss_fusion": ("model.cross_entropy_loss_fusion",),
    "megatron.cross_entropy_fusion_impl": ("model.cross_entropy_fusion_impl",),
    "megatron.moe_permute_fusion": ("model.moe_permute_fusion",),
    "megatron.moe_router_fusion": ("model.moe_router_fusion",),
    "precision.param_gather": ("mixed_precision.fp8_param_gather", "mixed_precision.fp8_param"),
}
# Switches of its configuration, which `null` turns off.
_SWITCHES = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
_PRECISIONS: Mapping[str, Mapping[str, Any]] = {
    "tensorwise": {},
    "delayed": {"mixed_precision.fp8_amax_history_len": 1024, "mixed_precision.fp8_amax_compute_algo": "max"},
    "blockwise": {},
    "mxfp8": {},
}


def translate_overrides(overrides: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the same overrides for a recipe of Bridge, or None if it has no field for one of them.

    Types of gradients are a field of `mixed_precision`, which lays it on `ddp` (training/mixed_precision.py, 0.6.0).
    """
    found: dict[str, Any] = {}
    stages = parse_layout(str(overrides.get("megatron.pipeline_model_parallel_layout", "")))
    for key, value in overrides.items():
        if key == "parallel.sequence" and value == "auto":
            # Without an override, the value of Bridge's recipe would apply.
            found[key] = str(str(overrides.get("parallel.tp", "1")) != "1").lower()
        elif key == "parallel.vp" and stages:
            # Megatron-LM counts the virtual stages of a layout; Megatron-Core needs the number as well.
            chunks = len(stages) // int(overrides.get("parallel.pp", 1))
            found[key] = str(chunks) if chunks > 1 else "null"
        elif key == "parallel.fsdp":
            return None  # Bridge's recipes with FSDP also change other settings
        elif key.startswith(_SHARED):
            found[key] = value
        elif key.removeprefix("megatron.") in _SWITCHES:
            off = str(value).lower() in ("null", "none", "false")
            found[f"model.{key.removeprefix('megatron.')}"] = str(not off).lower()
        elif key == "megatron.cpu_offloading_num_layers":
            found["model.cpu_offloading"] = str(str(value) != "null").lower()
            if str(value) != "null":
                found["model.cpu_offloading_num_layers"] = value
        elif key in _FIELDS:
            found |= dict.fromkeys(_FIELDS[key], value)
        elif key == "precision.recipe" and value in _PRECISIONS:
            found |= {"mixed_precision.fp8_recipe": value, **_PRECISIONS[value]}
        elif key == "optimizer.grad_reduce":
            fields = ("mixed_precision.grad_reduce_in_fp32", "ddp.grad_reduce_in_fp32")
            found |= dict.fromkeys(fields, value == "fp32")
        else:
            return None
    return found

"""Plan a checkpoint at the end of a rehearsal, without writing it, for runs whose checkpoints `resuming` cannot load.

Megatron's own code builds the model and optimizer state in the checkpoint's format, and torch's planner decides what
this rank would write. It is not checked that all ranks together write every part exactly once.
"""
# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import importlib
from inspect import signature
from typing import Any

from fp8launch.plugins.rehearse.shrink import ITERATIONS


def as_images(transformer_engine: str) -> None:
    """Keep the same extra states as this Transformer Engine release does in container images."""
    if transformer_engine.startswith("2.16."):
        # Images have 2.16.0, which keeps extra state for every recipe. 2.16.1 keeps it for delayed scaling only.
        modules: Any = importlib.import_module("transformer_engine.pytorch.module.base")
        modules.is_stateless_recipe = lambda recipe: False


def plan(args: Any, model: Any, optimizer: Any, scheduler: Any) -> Any:
    """Return torch's plan of what this rank would write in an FSDP format."""
    saving: Any = importlib.import_module("megatron.training.checkpointing")
    model = saving.unwrap_model(model)
    kind = {"metadata": saving._build_sharded_state_dict_metadata(args)}
    state = saving.generate_state_dict(
        args, model, optimizer, scheduler, None, iteration=ITERATIONS, optim_sd_kwargs=kind, model_sd_kwargs=kind
    )
    if args.ckpt_format == "fsdp_dtensor":
        state = saving.preprocess_fsdp_dtensor_state_dict(args, state, model[0])
    return _plan_of(state, args.ckpt_format)


def of_bridge(config: Any, model: Any, optimizer: Any, scheduler: Any, groups: Any) -> Any:
    """Return the same plan, made by Megatron-Bridge's code for its configuration and process groups."""
    saving: Any = importlib.import_module("megatron.bridge.training.checkpointing")
    own = config.checkpoint
    model = importlib.import_module("megatron.core.utils").unwrap_model(model)
    kind = saving._build_sharded_state_dict_metadata(config.optimizer.use_distributed_optimizer, own)
    kind["dp_cp_group"] = groups.dp_cp
    more = {"pg_collection": groups} if "pg_collection" in signature(saving.generate_state_dict).parameters else {}
    state = saving.generate_state_dict(
        own, model, optimizer, scheduler, None, iteration=ITERATIONS,
        optim_sd_kwargs={"metadata": kind}, model_sd_kwargs={"metadata": kind}, **more,
    )  # fmt: skip
    if own.ckpt_format == "fsdp_dtensor":
        state = saving.preprocess_fsdp_dtensor_state_dict(config, state, model[0])
    return _plan_of(state, own.ckpt_format)


def _plan_of(state: Any, file_format: str) -> Any:
    """Return what torch's planner decides for a state."""
    planner, state = _megatron(state) if file_format == "torch_dist" else _torch(state)
    planner.set_up_planner(state, is_coordinator=True)
    return planner.create_local_plan()


def _megatron(state: Any) -> tuple[Any, Any]:
    """Return the planner for Megatron's distributed checkpoints, and the state in the format it expects."""
    serialization: Any = importlib.import_module("megatron.core.dist_checkpointing.serialization")
    strategy: Any = importlib.import_module("megatron.core.dist_checkpointing.strategies.torch")
    sharded, _common = serialization.save_preprocess(state, False)
    sharded, _flat, _renamed = strategy._replace_state_dict_keys_with_sharded_keys(sharded, True)
    planner = strategy.MCoreSavePlanner(
        dedup_replicated_tensors=False, flatten_state_dict=False, flatten_sharded_tensors=False
    )
    return planner, strategy.mcore_to_pyt_state_dict(sharded, False)


def _torch(state: Any) -> tuple[Any, Any]:
    planners: Any = importlib.import_module("torch.distributed.checkpoint.default_planner")
    return planners.DefaultSavePlanner(), state

"""The plan of a checkpoint at the end of a rehearsal, without a file.

Megatron's own code makes the state of model and optimizer in the checkpoint's format, and torch's planner decides what
this rank would write. Whether all ranks together write every part once is not asked: others hold what this one does.
"""
# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import importlib
from typing import Any

from fp8launch.rehearsal.shrink import ITERATIONS


def install(transformer_engine: str) -> None:
    """Plan a checkpoint when Megatron's training is over, with this release of Transformer Engine ("" for none)."""
    if transformer_engine.startswith("2.16."):
        # As 2.16.0, which images have, and which keeps a state of every recipe; 2.16.1 only that of delayed scaling.
        modules: Any = importlib.import_module("transformer_engine.pytorch.module.base")
        modules.is_stateless_recipe = lambda recipe: False
    training: Any = importlib.import_module("megatron.training.training")
    train = training.train

    def train_and_plan(step: Any, model: Any, optimizer: Any, scheduler: Any, *rest: Any, **named: Any) -> Any:
        result = train(step, model, optimizer, scheduler, *rest, **named)
        plan(training.get_args(), model, optimizer, scheduler)
        return result

    training.train = train_and_plan


def plan(args: Any, model: Any, optimizer: Any, scheduler: Any) -> Any:
    """What this rank would write, as torch's plan; None for the format `torch`, which has none."""
    saving: Any = importlib.import_module("megatron.training.checkpointing")
    model = saving.unwrap_model(model)
    whole = args.ckpt_format == "torch"
    kind = {"metadata": None if whole else saving._build_sharded_state_dict_metadata(args)}
    state = saving.generate_state_dict(
        args, model, optimizer, scheduler, None, iteration=ITERATIONS, optim_sd_kwargs=kind, model_sd_kwargs=kind
    )
    if whole:
        return None
    if args.ckpt_format == "fsdp_dtensor":
        state = saving.preprocess_fsdp_dtensor_state_dict(args, state, model[0])
    planner, state = _megatron(state) if args.ckpt_format == "torch_dist" else _torch(state)
    planner.set_up_planner(state, is_coordinator=True)
    return planner.create_local_plan()


def _megatron(state: Any) -> tuple[Any, Any]:
    """The planner of Megatron's distributed checkpoints, and the state as it gets it."""
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

"""Published figures of models that Megatron-Bridge's indexed releases have no recipe for, through recipes of the pack.

Each is the pack's recipe with the settings in which the published run differs from it.
"""

from __future__ import annotations

from collections.abc import Iterator

from published_runs import Run

from fp8launch.check.resolved_run import resolve_run
from fp8launch.job.prepared import prepare

# Bridge's runs compute the loss with Transformer Engine, which Megatron-LM refuses.
_BRIDGE = {"cross_entropy_fusion_impl": "te"}
_FSDP = {
    "use_megatron_fsdp": True,
    "data_parallel_sharding_strategy": "optim_grads_params",
    "gradient_accumulation_fusion": False,
    "recompute_granularity": None,
}
RECIPES = {
    "llama8b_fp8": ("llama3_8b", _BRIDGE | _FSDP),
    "llama8b_bf16": ("llama3_8b", {}),
    "llama8b_delayed_h100": ("llama3_8b", {}),
    "llama8b_tensorwise_b200": ("llama3_8b", _BRIDGE),
    "llama8b_mxfp8_b200": ("llama3_8b", _BRIDGE),
    "nemotron4_15b_delayed_h100": ("nemotron4", {}),
    "nemotron4_340b_delayed_h100": ("nemotron4", {}),
}


def pack_runs() -> Iterator[Run]:
    """The published figures, as runs of these recipes."""
    for name, (family, changes) in RECIPES.items():
        run = resolve_run(prepare(name))
        reference = run.loaded.recipe.reference
        assert reference is not None and reference.gpus == run.layout.world, name
        args = {**run.arguments, **changes}
        yield Run(
            name, family, run.gpu.name, run.layout.world, run.layout.global_batch, args, reference.tokens_per_s_per_gpu
        )

"""Published figures of models for which Megatron-Bridge's indexed releases have no recipe.

Each is a recipe of the pack with the settings in which the published run differs from it. Kimi K2's figure is from a
later container.
"""

from __future__ import annotations

from collections.abc import Iterator

from published_runs import Run, published_runs

from fp8launch.check.resolved_run import resolve_run
from fp8launch.job.prepared import prepare
from fp8launch.plugins.bridge.published import recipe_of, rows

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
    """Return the published figures as runs of these recipes."""
    like = next(run for run in published_runs() if run.family == "kimi_k2")
    for row in rows():
        # One container has a Bridge without a recipe for it.
        if row.model == "Kimi_K2" and recipe_of(row) is None:
            name = f"kimi_k2 {row.gpu} x{row.gpus} {row.precision} ({row.container})"
            yield Run(name, "kimi_k2", row.gpu, row.gpus, row.global_batch, like.args, row.tokens_per_s_per_gpu)
    for name, (family, changes) in RECIPES.items():
        run = resolve_run(prepare(name))
        reference = run.loaded.recipe.reference
        assert reference is not None and reference.gpus == run.layout.world, name
        args = {**run.arguments, **changes}
        yield Run(
            name, family, run.gpu.name, run.layout.world, run.layout.global_batch, args, reference.tokens_per_s_per_gpu
        )

"""Published figures of models that Megatron-Bridge's indexed releases have no recipe for.

Each is a recipe of the pack with the settings in which the published run differs from it. Kimi K2 is the run of
DeepSeek-V3 on the same GPUs with its own sizes and layout.
"""

from __future__ import annotations

from collections.abc import Iterator

from published_runs import Run, model_sizes, published_runs

from fp8launch.check.resolved_run import resolve_run
from fp8launch.engines.bridge.published import recipe_of, rows
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


# Megatron-Bridge, scripts/performance/configs/kimi: the settings of GB300 with micro batch 2.
KIMI_K2 = {
    "pipeline_model_parallel_size": 4,
    "pipeline_model_parallel_layout": "Et*4|(t*4|)*14,tL",
    "expert_model_parallel_size": 64,
    "micro_batch_size": 2,
    "cuda_graph_impl": "none",
    "recompute_granularity": "selective",
    "recompute_modules": ["mla_up_proj"],
}


def pack_runs() -> Iterator[Run]:
    """The published figures, as runs of these recipes."""
    like = next(
        r for r in published_runs() if (r.family, r.gpu, r.args["micro_batch_size"]) == ("deepseek_v3", "gb300", 2)
    )
    for row in rows():
        if row.model == "Kimi_K2" and recipe_of(row) is None:
            args = {**like.args, **model_sizes("kimi_k2"), **KIMI_K2, "num_moe_experts": None}
            name = f"kimi_k2 {row.gpu} x{row.gpus} {row.precision} ({row.container})"
            yield Run(name, "kimi_k2", row.gpu, row.gpus, row.global_batch, args, row.tokens_per_s_per_gpu)
    for name, (family, changes) in RECIPES.items():
        run = resolve_run(prepare(name))
        reference = run.loaded.recipe.reference
        assert reference is not None and reference.gpus == run.layout.world, name
        args = {**run.arguments, **changes}
        yield Run(
            name, family, run.gpu.name, run.layout.world, run.layout.global_batch, args, reference.tokens_per_s_per_gpu
        )

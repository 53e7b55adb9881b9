"""Ways to save memory, in the order of what they cost."""

from __future__ import annotations

from collections.abc import Iterator

from fp8launch.hardware.quantization import QUANTIZATION, requested
from fp8launch.megatron.model_arithmetic import Arguments, whole
from fp8launch.planning.change import Change
from fp8launch.planning.execution import no_layer_graphs


def savings(args: Arguments) -> Iterator[Change]:
    """Ways to save memory, the cheapest first and nothing as the first. Those that change numerics come last."""
    none = _no_recompute(args)
    yield none
    gather = _param_gather(args)
    if gather is not None:
        yield none.then(gather)
    for recompute in _recomputes(args):
        yield recompute
    deepest = recompute if gather is None else recompute.then(gather)
    yield deepest
    if not args.get("grad_reduce_in_bf16"):
        deepest = deepest.then(Change({"grad_reduce_in_bf16": True}, {"optimizer.grad_reduce": "bf16"}))
        yield deepest
    if args.get("use_distributed_optimizer"):
        moments = ("exp_avg_dtype", "exp_avg_sq_dtype")
        yield deepest.then(
            Change(
                {"use_precision_aware_optimizer": True, **dict.fromkeys(moments, "bf16")},
                {"optimizer.exp_avg": "bf16", "optimizer.exp_avg_sq": "bf16"},
            )
        )


_RECOMPUTE = ("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules")


def _no_recompute(args: Arguments) -> Change:
    stated = [name for name in _RECOMPUTE if args.get(name)]
    return Change(
        dict.fromkeys((*_RECOMPUTE, "recompute_activations")), {f"megatron.{name}": "null" for name in stated}
    )


def _recomputes(args: Arguments) -> Iterator[Change]:
    none = _no_recompute(args)
    modules = ["moe_act", "layernorm"] if whole(args, "num_experts") else ["mlp"]
    if args.get("multi_latent_attention"):
        modules.append("mla_up_proj")
    listed = "[" + ", ".join(modules) + "]"
    selective = {"recompute_granularity": "selective", "recompute_modules": modules}
    words = {"megatron.recompute_granularity": "selective", "megatron.recompute_modules": listed}
    yield none.then(Change(selective, words))
    stages = (whole(args, "pipeline_model_parallel_size") or 1) * (
        whole(args, "num_virtual_stages_per_pipeline_rank") or 1
    )
    full = none.then(no_layer_graphs(args))
    deep = max(-(-(whole(args, "num_layers") or 1) // stages), 1)
    for layers in sorted({max(deep // 4, 1), max(deep // 2, 1), max(3 * deep // 4, 1)} - {deep}):
        block = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": layers}
        yield full.then(Change(block, {f"megatron.{name}": str(value) for name, value in block.items()}))
    whole_stage = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    yield full.then(Change(whole_stage, {f"megatron.{name}": str(value) for name, value in whole_stage.items()}))


def _param_gather(args: Arguments) -> Change | None:
    recipe = QUANTIZATION.get(requested(args))
    if recipe is None or not recipe.gather_is_proven or args.get(recipe.gather_flag):
        return None
    if not args.get("use_distributed_optimizer"):
        return None
    flags = (recipe.gather_flag, *recipe.gather_flags)
    return Change(dict.fromkeys(flags, True), {"precision.param_gather": "true"})

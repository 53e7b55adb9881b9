"""Ways to save memory: recompute of modules or layers, offloading, gathers of quantized parameters, smaller types."""

from __future__ import annotations

from collections.abc import Collection
from itertools import combinations

from fp8launch.hardware.quantization import quantization_recipes, requested
from fp8launch.megatron.architecture import MLP, architecture
from fp8launch.megatron.model_arithmetic import Arguments, hybrid_layers, virtual_stages, whole
from fp8launch.plugins.estimate.activations import offloaded_layers
from fp8launch.plugins.plan.change import Change, Target, cleared, flags
from fp8launch.plugins.plan.execution import LAYER_GRAPHS, no_layer_graphs
from fp8launch.plugins.plan.speeds import FAST_HOST_LINK

_RECOMPUTE = (
    "recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules", "recompute_activations",
)  # fmt: skip
_OFFLOAD = "cpu_offloading_num_layers"


def no_savings(args: Arguments) -> Change:
    """Remove the recipe's own recompute and offloading."""
    change = cleared(args, *_RECOMPUTE).then(Change({_OFFLOAD: None}))
    if offloaded_layers(args):
        change = change.then(Change({}, {f"megatron.{_OFFLOAD}": "null"}))
    return change


# --- recompute -------------------------------------------------------------------------------------------------------

# Recompute of these modules costs a few passes over memory, or the products of latent attention. They are tried in
# every combination. The expensive modules are added to all of them.
_CHEAP = ("layernorm", "moe_act", "mla_up_proj")
_DEAR = ("shared_experts", "mlp")


def module_recomputes(args: Arguments) -> list[Change]:
    """Return combinations of modules for selective recompute. The last one saves the most memory."""
    known = _modules(args)
    cheap = [name for name in _CHEAP if name in known]
    chosen: list[tuple[str, ...]] = []
    for count in range(1, len(cheap) + 1):
        chosen += combinations(cheap, count)
    last = cheap[-1:]
    for name in _DEAR:
        if name in known:
            # NVIDIA's recipe of DeepSeek-V3 on H100 recomputes `mla_up_proj` and `mlp`.
            chosen.append((*last, name))
            cheap.append(name)
            chosen.append(tuple(cheap))
    if "moe" in known:
        # The module contains the activations of experts and the shared experts.
        outside = [name for name in cheap if name not in ("moe_act", "shared_experts")]
        chosen.append((*outside, "moe"))
    return list(map(_selective, dict.fromkeys(chosen)))


def _selective(modules: Collection[str]) -> Change:
    return flags(recompute_granularity="selective", recompute_modules=list(modules))


def _modules(args: Arguments) -> set[str]:
    """Return the modules that Megatron-Core can recompute in this model.

    See megatron/core/transformer/transformer_config.py.
    """
    model = architecture(args)
    assert model is not None
    found: set[str] = set()
    if any(MLP in kind for kind in model.kinds):
        found.add("mlp")
    if model.latent:
        found.add("mla_up_proj")
    if model.experts:
        found |= {"moe_act", "layernorm", "moe"}
        if model.experts.shared and not args.get("moe_shared_expert_overlap"):
            found.add("shared_experts")
    if requested(args) == "delayed":
        found -= {"moe_act", "layernorm"}
    if args.get("use_transformer_engine_op_fuser"):
        # The fused operation includes the activation between the experts' products.
        found.discard("moe_act")
    if args.get("cuda_graph_impl") in LAYER_GRAPHS:
        # Megatron refuses to recompute modules that contain a graph, and does not free a norm's output that leaves one.
        found -= {"moe", "layernorm"}
    if args.get("overlap_moe_expert_parallel_comm"):
        found.discard("moe")
    return found


def layer_recomputes(args: Arguments) -> list[Change]:
    """Return full recompute of one, two and more layers per virtual stage, then of all layers.

    The list is empty if Megatron refuses full recompute.

    Megatron counts `recompute_num_layers` in each virtual stage (megatron/core/transformer/transformer_block.py).
    """
    if args.get("overlap_moe_expert_parallel_comm"):
        return []
    pp = whole(args, "pipeline_model_parallel_size") or 1
    stages = pp * virtual_stages(args, pp)
    deep = max(-(-(whole(args, "num_layers") or 1) // stages), 1)
    without_graphs = no_layer_graphs(args)
    some = [_full("block", layers) for layers in range(1, deep)]
    return [without_graphs.then(change) for change in (*some, _full("uniform", 1))]


def _full(method: str, layers: int) -> Change:
    return flags(recompute_granularity="full", recompute_method=method, recompute_num_layers=layers)


def offloads(args: Arguments, target: Target) -> list[Change]:
    """Return the offloading of activations of one, two and more layers to the host's memory.

    The list is empty over PCIe and where Megatron refuses offloading. Megatron refuses it with pipelines, recompute and
    graphs of layers, and for all layers of a model (transformer_config.py).
    """
    layers = whole(args, "num_layers") or 1
    pp = whole(args, "pipeline_model_parallel_size") or 1
    if (
        pp > 1
        or target.speeds.device.host_link < FAST_HOST_LINK
        or whole(args, "num_experts")
        or hybrid_layers(args)
        or args.get("transformer_impl") == "local"
    ):
        return []
    # Recipes of Megatron-Bridge need this switch in addition to the number of layers.
    switched_on = no_layer_graphs(args).then(Change({"cpu_offloading": True}))
    return [switched_on.then(flags(cpu_offloading_num_layers=number)) for number in range(1, layers)]


# --- types -----------------------------------------------------------------------------------------------------------


def gathers(args: Arguments, fixed: Collection[str]) -> list[Change]:
    """Return the gathers of parameters that the recipe allows: in bf16, and in the quantized type.

    A gather that equals the recipe's has no override.
    """
    recipe = quantization_recipes().get(requested(args))
    if recipe is None or "precision.param_gather" in fixed or not args.get("use_distributed_optimizer"):
        return [Change()]
    arguments = (recipe.gather_flag, *recipe.gather_flags)
    own = bool(args.get(recipe.gather_flag))
    if not own and not recipe.gather_is_proven:
        return [Change()]
    found = []
    for quantized, text in ((False, "false"), (True, "true")):
        change = Change(dict.fromkeys(arguments, quantized))
        if quantized != own:
            change = change.then(Change({}, {"precision.param_gather": text}))
        found.append(change)
    return found


def smaller_types(args: Arguments) -> list[Change]:
    """Return no change, then smaller types of gradients and of Adam's moments, which change numerics."""
    found = [Change()]
    if not args.get("grad_reduce_in_bf16"):
        found.append(Change({"grad_reduce_in_bf16": True}, {"optimizer.grad_reduce": "bf16"}))
    if args.get("use_distributed_optimizer"):
        moments = Change(
            {"use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"},
            {"optimizer.exp_avg": "bf16", "optimizer.exp_avg_sq": "bf16"},
        )
        found.append(found[-1].then(moments))
    return found

"""How a layout runs: the dispatcher of tokens to experts, and CUDA graphs of layers.

Neither changes what is computed. They depend on the GPU and the division only. The rules of the check and Megatron's
validators decide whether they are legal.
"""

from __future__ import annotations

from fp8launch.megatron.model_arithmetic import Arguments, layer_kinds, recomputed_modules, whole
from fp8launch.plugins.estimate.activations import offloaded_layers
from fp8launch.plugins.plan.change import Change, Target, cleared, flags

LAYER_GRAPHS = ("local", "transformer_engine")
_GRAPH_FLAGS = ("cuda_graph_impl", "cuda_graph_modules", "cuda_graph_scope")
# Flex dispatch refuses or ignores these (megatron/core/transformer/transformer_config.py of 0.19).
_ALLTOALL_ONLY = ("moe_expert_capacity_factor", "moe_pad_expert_input_to_capacity", "moe_shared_expert_overlap")


def dispatcher(args: Arguments, target: Target, ep: int) -> Change:
    """Replace an all-to-all by HybridEP if experts are divided over GPUs, on Hopper and later.

    The settings match `moe/hybridep` and the pack's parts for NVLink domains of 8 and 72 GPUs. A recipe that uses
    HybridEP already only gets the number of ranks in an NVLink domain.
    """
    kind, domain = args.get("moe_token_dispatcher_type"), target.speeds.device.links.domain
    flex = kind == "flex"
    if flex and args.get("moe_flex_dispatcher_backend") == "hybridep":
        return Change({}, {"env.NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN": str(min(ep, domain))})
    fixed = "megatron.moe_token_dispatcher_type" in target.fixed or any(map(args.get, _ALLTOALL_ONLY))
    if flex or fixed or ep == 1 or target.gpu.capability < (9, 0):
        return Change()
    settings = {
        "megatron.moe_hybridep_num_sms": "32",
        "env.NVTE_FWD_LAYERNORM_SM_MARGIN": "20",
        "env.NVTE_BWD_LAYERNORM_SM_MARGIN": "20",
        "env.NUM_OF_TOKENS_PER_CHUNK_COMBINE_API": "128",
        "env.NVLINK_DOMAIN_SIZE": str(domain),
        "env.NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN": str(min(ep, domain)),
        "env.USE_MNNVL": str(int(domain > 8)),
    }
    hybridep = flags(moe_token_dispatcher_type="flex", moe_flex_dispatcher_backend="hybridep")
    hybridep = hybridep.then(Change({}, settings))
    if not target.writable(hybridep.overrides):
        return Change()
    return hybridep


def layer_graphs(args: Arguments, target: Target) -> Change | None:
    """Return CUDA graphs of all fixed-size parts of layers; None if there are graphs or none are possible."""
    if args.get("cuda_graph_impl") not in (None, "none") or args.get("enable_cuda_graph"):
        return None
    if "megatron.cuda_graph_impl" in target.fixed or args.get("transformer_impl") == "local":
        return None
    if (
        offloaded_layers(args)
        or args.get("recompute_granularity") == "full"
        or args.get("use_megatron_fsdp")
        or args.get("use_torch_fsdp2")
    ):
        return None
    modules = ["attn", "mlp"]
    if whole(args, "num_experts"):
        if recomputed_modules(args) & {"moe", "layernorm"}:
            return None  # a recomputed module would contain a graph or be its output
        modules = ["attn", "moe_router", "moe_preprocess"]
        if args.get("moe_token_dispatcher_type") != "flex" and args.get("moe_router_padding_for_quantization"):
            modules.pop()  # the number of rows varies
    if "mamba" in layer_kinds(args):
        modules.append("mamba")
    graphs = flags(cuda_graph_impl="transformer_engine", cuda_graph_modules=modules, te_rng_tracker=True)
    graphs = graphs.then(Change({}, {"env.NCCL_GRAPH_REGISTER": "0"}))
    if not target.writable(graphs.overrides):
        return None
    return graphs


def no_layer_graphs(args: Arguments) -> Change:
    """Remove graphs of layers, which Megatron refuses together with full recompute."""
    if args.get("cuda_graph_impl") not in LAYER_GRAPHS:
        return Change()
    return cleared(args, *_GRAPH_FLAGS)

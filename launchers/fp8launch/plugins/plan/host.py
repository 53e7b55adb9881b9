"""Time that the host adds to a layer by launching kernels later than the GPU could run them.

The host launches every kernel that is not part of a CUDA graph. It runs ahead of the GPU if launching the kernels of a
pass takes less time than running them; otherwise the GPU waits for it.

A layer with experts removes that lead in every forward pass. The host must read the number of tokens of each expert
before it can size the next buffers: `MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize`,
`_HybridEPManager.dispatch` without `num_permuted_tokens` (megatron/core/transformer/moe/token_dispatcher.py), and
`tokens_per_expert.tolist()` in `TEGroupedMLP.forward` (experts.py). It waits for the router, and then the GPU's queue
is empty. Dispatch, experts and combination are launched while they run, so the GPU waits for every kernel that takes
longer to launch than to run, even if graphs launch the rest of the layer. The backward pass knows these numbers and
does not wait.
"""

from __future__ import annotations

from fp8launch.megatron.architecture import ATTENTION, DENSE_LAYER, EXPERTS, MAMBA, Architecture, Experts
from fp8launch.megatron.model_arithmetic import Arguments, graph_modules, recomputed_modules
from fp8launch.plugins.plan.layer_terms import HostTime
from fp8launch.plugins.plan.workload import Workload

# Megatron's names of these parts of a layer in the modules of CUDA graphs.
_GRAPHED = {ATTENTION: "attn", MAMBA: "mamba"}
# Precisions whose launch times were measured with and without the gather of quantized parameters. For MXFP8 and NVFP4
# all published runs gather them, so their launch times include it.
_GATHERS = ("tensorwise", "delayed", "blockwise")
# Seconds to launch the quantization of a dense layer in a recipe of the user's own.
QUANTIZED = 0.8e-3

# Kernels of a part of a layer for both passes. A profile of Llama-3.2 3B with tensorwise scaling has 95 in a layer of
# two parts (benchmarks/plan/host_bound.md).
_KERNELS, _KERNELS_QUANTIZED = 28, 20
# Kernels for the routing, dispatch and combination of a layer with experts, and for each local expert in FP8 or FP4.
_KERNELS_EXPERTS, _KERNELS_EXPERT = 60, 3


def kernels_of(run: Workload, kind: str, quantized: bool) -> tuple[float, float]:
    """Return the number of kernels that one layer of the parts `kind` runs forward and backward."""
    experts = run.model.experts_of(kind)
    parts = sum(_parts(run.model, part) for part in kind if part != EXPERTS)
    parts += experts is not None and experts.shared > 0
    number = parts * _KERNELS
    if experts is not None:
        number += _KERNELS_EXPERTS
    if quantized:
        number += parts * _KERNELS_QUANTIZED
        if experts is not None and not run.on("use_transformer_engine_op_fuser"):
            number += _KERNELS_EXPERT * experts.count / run.split.ep
    forward = run.speeds.software.launch_forward * number
    return forward, number - forward


def _parts(model: Architecture, part: str) -> float:
    """Return how many times the launches of an MLP one part of a layer takes.

    Launches go with linear layers. An MLP has two, as has attention, but latent attention has four or five
    (multi_latent_attention.py of Megatron-Core).
    """
    if part != ATTENTION or model.latent is None:
        return 1.0
    return 2.5 if model.latent.query_rank else 2.0


def host_time(run: Workload, kind: str, quantized: bool, routed: float) -> HostTime:
    """Return the host's time for one layer of the parts `kind`.

    `routed` is the time in seconds that the GPU needs for everything after the routing.
    """
    software, host = run.speeds.software, run.speeds.device.host
    dense = software.launch
    if quantized:
        dense += software.launch_quantized.get(run.recipe(quantized), QUANTIZED)
        if run.precision.param_gather and run.recipe(quantized) in _GATHERS:
            dense += software.launch_gathered
    # The measured layers have two parts, attention and MLP.
    dense /= len(DENSE_LAYER)
    before = after = after_back = 0.0
    for part in kind:
        if part != EXPERTS:
            before += dense * _parts(run.model, part) * (1 - graphed(run.args, _GRAPHED.get(part, "mlp")))
    experts = run.model.experts_of(kind)
    if experts:
        # The projections to and from a latent width are half of an MLP's launches.
        linear = (experts.shared > 0) + 0.5 * (experts.latent is not None)
        before += dense * linear * (1 - graphed(run.args, "moe"))
        before += software.launch_routing * (1 - graphed(run.args, "moe_router", "moe_preprocess"))
        after, after_back = _experts(run, kind, quantized)
    before *= host.python
    if run.on("overlap_moe_expert_parallel_comm"):
        before *= software.launch_overlapped
        after *= software.launch_overlapped
        after_back *= software.launch_overlapped
    forward = software.launch_forward * before + after
    backward = (1 - software.launch_forward) * before + after_back
    waiting = 0.0
    if _waits_for_routing(run):
        waiting = max(after - routed, 0.0)
    if "moe" in recomputed_modules(run.args):
        # The backward pass begins by running these forward again.
        return HostTime(forward, backward + after, 2 * waiting)
    return HostTime(forward, backward, waiting)


def _experts(run: Workload, kind: str, quantized: bool) -> tuple[float, float]:
    """Return the seconds to launch dispatch, experts and combination, forward and backward."""
    software, host, experts = run.speeds.software, run.speeds.device.host, run.model.experts_of(kind)
    assert experts is not None
    each = software.launch_expert.get(run.recipe(quantized), software.launch_expert["bf16"])
    if run.on("use_transformer_engine_op_fuser"):
        each = 0.0  # one kernel for all experts
    if run.split.ep == 1:
        each *= software.launch_alone
    dispatch = software.launch_dispatch * host.python
    products = each * experts.count / run.split.ep * host.experts
    forward = software.launch_forward * (dispatch + products)
    backward = dispatch + products - forward
    if _multiplied_at_once(run, experts, quantized):
        forward -= software.launch_forward * products
        # The other half are weight gradients.
        backward -= (1 - software.launch_forward) * products / 2
    alone = 1 - graphed(run.args, "moe")
    return forward * alone, backward * alone


def _multiplied_at_once(run: Workload, experts: Experts, quantized: bool) -> bool:
    """Whether one CUTLASS kernel computes a linear layer of all experts, except for its weight gradients.

    `nvte_multi_tensor_gemm` (common/gemm/cublaslt_gemm.cu of Transformer Engine 2.20) uses it on Hopper for 16-bit
    inputs and outputs whose inner dimension is the same multiple of 128 for all experts. Weight gradients miss both
    conditions: their inner dimension is the number of tokens of an expert, and they are accumulated in fp32.
    """
    if not run.on("cutlass_grouped_gemm") or run.recipe(quantized) != "bf16":
        return False
    inner = experts.latent or run.model.hidden, experts.ffn // run.split.etp
    return run.speeds.gpu.capability == (9, 0) and not any(size % 128 for size in inner)


def _waits_for_routing(run: Workload) -> bool:
    """Whether the host has to read the number of tokens of each expert."""
    fixed = run.on("moe_pad_expert_input_to_capacity") or run.on("moe_expert_rank_capacity_factor")
    # With the overlap, passes of two micro batches alternate: one runs while the other waits.
    return not fixed and not run.on("overlap_moe_expert_parallel_comm")


def graphed(args: Arguments, *parts: str) -> float:
    """Return the share of these parts of a layer that CUDA graphs cover."""
    kind = args.get("cuda_graph_impl")
    scopes = graph_modules(args)
    if kind == "full_iteration" or "full_iteration" in scopes:
        return 1.0
    if kind not in ("local", "transformer_engine") and not args.get("enable_cuda_graph"):
        return 0.0
    if not scopes:
        # Whole layers, but experts only with rows of a fixed number (megatron/core/transformer/transformer_config.py).
        padded = args.get("moe_expert_capacity_factor") and args.get("moe_pad_expert_input_to_capacity")
        return float("moe" not in parts or bool(padded))
    return len(scopes.intersection(parts)) / len(parts)

"""Time that the host adds to a layer: kernels that it launches later than the GPU could run them.

The host launches every kernel that no CUDA graph replays. Over a pass it runs ahead of the GPU where launching takes
less time than running, and otherwise the GPU waits for it.

A layer with experts takes that lead away in every forward pass. The host reads how many tokens go where before it can
size the buffers behind: `MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize`, `_HybridEPManager.dispatch` without
`num_permuted_tokens` (megatron/core/transformer/moe/token_dispatcher.py), and `tokens_per_expert.tolist()` in
`TEGroupedMLP.forward` (experts.py). Until then it waits for the router, and the GPU has nothing else to do. Dispatch,
experts and combination are launched while they run: the GPU waits for what takes longer to launch than to run, however
fast graphs launch the rest of the layer. The backward pass has these numbers and does not wait.
"""

from __future__ import annotations

from fp8launch.megatron.architecture import ATTENTION, DENSE_LAYER, EXPERTS, MAMBA
from fp8launch.megatron.dtype_sizes import recomputed_modules
from fp8launch.megatron.graph_modules import graph_modules
from fp8launch.megatron.model_arithmetic import Arguments
from fp8launch.planning.layer_terms import HostTime
from fp8launch.planning.workload import Workload

# Megatron's name for the parts of a layer in the scope of CUDA graphs.
_GRAPHED = {ATTENTION: "attn", MAMBA: "mamba"}
# Precisions whose launches were measured with and without the gather of quantized parameters. Runs in MXFP8 and NVFP4
# were published with it, so their launch times contain its part.
_GATHERS = ("tensorwise", "delayed", "blockwise")


def host_time(run: Workload, kind: str, quantized: bool, routed: float) -> HostTime:
    """The host's time for one layer of the parts `kind`; on the GPU what follows the routing takes `routed` seconds."""
    software, host = run.speeds.software, run.speeds.device.host
    dense = software.launch
    if quantized:
        dense += software.launch_quantized
        if run.precision.param_gather and run.recipe(quantized) in _GATHERS:
            dense += software.launch_gathered
    # Launches were measured for layers of two parts.
    dense /= len(DENSE_LAYER)
    before = 0.0
    for part in kind:
        if part != EXPERTS:
            before += dense * (1 - graphed(run.args, _GRAPHED.get(part, "mlp")))
    after = 0.0
    if run.model.experts_of(kind):
        before += software.launch_routing * (1 - graphed(run.args, "moe_router", "moe_preprocess"))
        after = _experts(run, kind, quantized)
    before *= host.python
    forward = software.launch_forward * (before + after)
    backward = before + after - forward
    launched = software.launch_forward * after
    waiting = 0.0
    if _waits_for_routing(run):
        waiting = max(launched - routed, 0.0)
    if "moe" in recomputed_modules(run.args):
        # The backward pass begins with another forward pass of these.
        return HostTime(forward, backward + launched, 2 * waiting)
    return HostTime(forward, backward, waiting)


def _experts(run: Workload, kind: str, quantized: bool) -> float:
    """Seconds to launch dispatch, experts and combination for both passes."""
    software, host, experts = run.speeds.software, run.speeds.device.host, run.model.experts_of(kind)
    assert experts is not None
    each = software.launch_expert.get(run.recipe(quantized), software.launch_expert["bf16"])
    if run.on("use_transformer_engine_op_fuser"):
        each = 0.0  # one kernel for all experts
    if run.split.ep == 1:
        each *= software.launch_alone
    launched = software.launch_dispatch * host.python + each * experts.count / run.split.ep * host.experts
    return launched * (1 - graphed(run.args, "moe"))


def _waits_for_routing(run: Workload) -> bool:
    """Whether the host reads how many tokens each expert gets."""
    fixed = run.on("moe_pad_expert_input_to_capacity") or run.on("moe_expert_rank_capacity_factor")
    # Passes of two micro batches alternate then: one runs while the other waits.
    return not fixed and not run.on("overlap_moe_expert_parallel_comm")


def graphed(args: Arguments, *parts: str) -> float:
    """The share of these parts of a layer that CUDA graphs cover."""
    kind = args.get("cuda_graph_impl")
    scopes = graph_modules(args)
    if kind == "full_iteration" or "full_iteration" in scopes:
        return 1.0
    if kind not in ("local", "transformer_engine") and not args.get("enable_cuda_graph"):
        return 0.0
    if not scopes:
        return float("moe" not in parts)
    return len(scopes.intersection(parts)) / len(parts)

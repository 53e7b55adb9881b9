"""Time of one layer and micro batch on one rank, forward and backward, by term.

A matrix product takes the time of its FLOPs at the achieved rate plus the time of its operands and results at the
memory's bandwidth. Everything else but attention takes the time of its memory traffic. The number of passes over memory
was counted in a kernel profile of Llama-3 8B on H200 with Transformer Engine 2.20 and Megatron-Core 0.19
(benchmarks/h200, `2026-11-20-profile` and `2026-11-21-tune`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import NormalDist

from fp8launch.hardware.gpus import Gpu
from fp8launch.megatron.architecture import ATTENTION, EXPERTS, MAMBA, MLP, Architecture, Experts
from fp8launch.megatron.model_arithmetic import recomputed_modules
from fp8launch.plugins.plan.host import host_time, kernels_of
from fp8launch.plugins.plan.layer_communication import add_communication, attention_by_heads, permutation_passes
from fp8launch.plugins.plan.layer_terms import LayerTime
from fp8launch.plugins.plan.mamba_scan import add_scan
from fp8launch.plugins.plan.workload import BF16, Linear, Workload, linears, product_times

# Bytes read and written per element of an input or gradient that is quantized row-wise and column-wise. Tensorwise
# scaling reads each element twice, first to find the largest value; NVFP4 also transforms the columns.
QUANTIZING = {"tensorwise": 6.0, "delayed": 4.0, "blockwise": 7.0, "mxfp8": 4.1, "nvfp4": 7.0, "custom": 7.0}
# Time of Megatron's fused SwiGLU in FP8 relative to Transformer Engine's: 53 ms more in an 8B step on H200
# (benchmarks/h200/tuning.md).
SLOWER_ACTIVATION = 1.15
# Passes of Megatron's fused rotary embedding for latent attention over queries, keys and values: it turns a third of
# the queries in place, and writes keys and values once (megatron/core/fusions/fused_mla_yarn_rope_apply.py).
_FUSED_LATENT = 1.4
FP32 = 4
# Ratio of backward to forward FLOPs in attention: five matrix products for two.
ATTENTION_BACKWARD = 2.5
# Mean width of keys and values relative to 128 above which attention gets no faster. None wider than DeepSeek-V3's was
# compared with a run.
WIDEST_HEAD = (192 + 128) / (2 * 128)
# The widest head that Transformer Engine before 2.5 fuses on Blackwell in training (fused_attn.cpp of 2.2 to 2.4).
FUSED_HEAD = 128
# Passes over the scores of unfused attention. Forward: the first product writes them, the softmax reads and writes, the
# second product reads. Backward: four products read or write them, the softmax reads two tensors and writes one.
UNFUSED_PASSES = (4, 7)


def layer_time(run: Workload, kind: str, quantized: bool) -> LayerTime:
    """Return the time of one layer of the parts `kind`."""
    time = _passes(run, kind, quantized)
    time.recompute = _recompute(run, time, kind, quantized)
    time.host = host_time(run, kind, quantized, time.routed)
    return time


def _passes(run: Workload, kind: str, quantized: bool) -> LayerTime:
    """Return the time of both passes of the parts `kind`, without recompute."""
    time = LayerTime()
    recipe = run.recipe(quantized)
    for linear in linears(run, kind):
        _add_product(run, time, linear, run.recipe(quantized and linear.quantized))
    if ATTENTION in kind:
        _add_attention(run, time, quantized)
    if MAMBA in kind and run.model.mamba:
        add_scan(run, time.forward, time.backward, run.model.mamba)
    _add_elementwise(run, time, kind, recipe)
    for passed, kernels in zip((time.forward, time.backward), kernels_of(run, kind, quantized), strict=True):
        passed["short kernels"] += kernels * run.speeds.software.kernel
    _add_imbalance(run, time, run.model.experts_of(kind))
    add_communication(run, time, kind, recipe)
    return time


def _add_product(run: Workload, time: LayerTime, linear: Linear, recipe: str) -> None:
    output, data_gradient, weight_gradient = product_times(run, linear, recipe)
    of_experts = linear.name.startswith("experts")
    if of_experts:
        time.routed += output
    time.forward[f"GEMM {linear.name}"] += output
    time.backward[f"GEMM {linear.name}"] += data_gradient + weight_gradient
    if recipe == "bf16":
        return
    traffic = QUANTIZING.get(recipe, 6.0) / run.speeds.memory
    fused = run.on("use_transformer_engine_op_fuser")
    if not (fused and linear.name == "experts fc2"):
        time.forward["quantization"] += linear.rows * linear.k * traffic
        if of_experts:
            time.routed += linear.rows * linear.k * traffic
    if not (fused and linear.name == "experts fc1"):
        time.backward["quantization"] += linear.rows * linear.n * traffic


# --- attention -------------------------------------------------------------------------------------------------------


def _add_attention(run: Workload, time: LayerTime, quantized: bool) -> None:
    model = run.model
    heads = model.heads / run.split.tp
    widths = 2 * model.channels
    if model.latent:
        widths = model.latent.head + model.latent.rope + model.latent.value
    if needs_new_kernels(run.model, run.speeds.gpu) and not run.speeds.software.fuses_latent:
        _add_unfused_attention(run, time, heads, widths)
        return
    # A kernel handles the whole sequence, or one round of ring attention.
    rounds = 1 if attention_by_heads(run.args) else run.split.cp
    keys = _keys(run) + run.speeds.fractions.attention_half / 2 * rounds
    rate = run.speeds.attention
    if quantized and run.on("fp8_dot_product_attention"):
        rate = run.speeds.attention_fp8
    # The softmax takes as long for narrow heads as for wide ones, but there are fewer FLOPs. On Blackwell, whose
    # exponential units are as fast as Hopper's, it also limits wider heads (https://www.together.ai/blog/flashattention-4).
    widest = WIDEST_HEAD if run.speeds.gpu.capability >= (10, 0) else 1.0
    rate *= min(max(widths / (2 * 128), 0.25), widest) ** 0.5
    forward = 2 * run.tokens * heads * widths * keys / rate
    time.forward["attention"] += forward
    time.backward["attention"] += ATTENTION_BACKWARD * forward


def needs_new_kernels(model: Architecture, gpu: Gpu) -> bool:
    """Whether only recent software fuses attention: the latent one with wide heads, on Blackwell."""
    latent = model.latent
    return latent is not None and latent.head + latent.rope > FUSED_HEAD and gpu.capability >= (10, 0)


def _add_unfused_attention(run: Workload, time: LayerTime, heads: float, widths: int) -> None:
    """Add attention of separate kernels, which compute, write and read all scores, also masked ones.

    See UnfusedDotProductAttention of Transformer Engine.
    """
    scores = run.tokens * run.model.seq_length * heads
    product = 2 * scores * widths / run.speeds.gemm("bf16")
    passes = scores * BF16 / run.speeds.memory
    time.forward["attention"] += product + UNFUSED_PASSES[0] * passes
    time.backward["attention"] += 2 * product + UNFUSED_PASSES[1] * passes


def _keys(run: Workload) -> float:
    """Return the mean number of keys that a query attends to, over a causal mask and all layers."""
    length = run.model.seq_length
    window = run.args.get("window_size")
    # Megatron writes -1 for a window without an end.
    if not isinstance(window, (list, tuple)) or not window or not isinstance(window[0], int) or window[0] < 0:
        return length / 2
    near = min(window[0] + 1, length / 2)
    skip = run.args.get("window_attn_skip_freq")
    if not isinstance(skip, int) or skip <= 0:
        return near
    full = 1 / skip
    return full * length / 2 + (1 - full) * near


# --- everything else -------------------------------------------------------------------------------------------------


def _add_elementwise(run: Workload, time: LayerTime, kind: str, recipe: str) -> None:
    """Add the traffic of norms, residuals, rotary embeddings and the activation of a dense layer."""
    model, split, memory = run.model, run.split, run.speeds.memory
    hidden = run.own_tokens * model.hidden * BF16 / memory
    # Each part has a norm and a residual addition: 2 + 3 passes forward, 3 + 3 backward.
    forward, backward = len(kind) * 5 * hidden, len(kind) * 6 * hidden
    if ATTENTION in kind:
        turned = _turned(run) * (BF16 / memory)
        # Split, rotate and join, with fewer passes if one kernel does all of it.
        passes = 5.0
        if run.on("fused_single_qkv_rope"):
            passes = 2.0
        elif model.latent and run.args.get("apply_rope_fusion", True):
            passes = _FUSED_LATENT
        forward += passes * turned
        backward += passes * turned
        if model.qk_norm:
            forward += 2 * turned
            backward += 3 * turned
    if MLP in kind:
        wide = run.tokens * model.ffn / split.tp * BF16 / memory
        if recipe != "bf16" and not run.on("use_te_activation_func"):
            wide *= SLOWER_ACTIVATION
        activation = _activation_passes(run)
        forward += activation[0] * wide
        backward += activation[1] * wide
    if experts := model.experts_of(kind):
        _add_expert_traffic(run, time, experts)
    time.forward["elementwise"] += forward
    time.backward["elementwise"] += backward


def _turned(run: Workload) -> float:
    """Return the elements of queries, keys and values that the kernels of the rotary embedding read."""
    model, split = run.model, run.split
    if model.latent is None:
        return run.tokens * (model.heads + 2 * max(model.groups, split.tp)) / split.tp * model.channels
    of_head = 2 * (model.latent.head + model.latent.rope) + model.latent.value
    return run.tokens * (model.heads // split.tp) * of_head


def _activation_passes(run: Workload) -> tuple[int, int]:
    """Return the passes over an MLP's inner width, forward and backward.

    A gated activation reads two tensors and writes one.
    """
    if run.model.gated:
        return 3, 5
    return 2, 3


def _add_expert_traffic(run: Workload, time: LayerTime, experts: Experts) -> None:
    """Add the traffic of routing, of the permutation of tokens and of the experts' activations."""
    model, split, memory = run.model, run.split, run.speeds.memory
    software = run.speeds.software
    forward_passes, backward_passes = _activation_passes(run)
    rows = run.routed_rows(experts)
    wide = run.tokens * experts.shared / split.tp * BF16 / memory
    fused = run.on("use_transformer_engine_op_fuser")
    if not fused:
        wide += rows * experts.ffn / split.etp * BF16 / memory
    # In addition to the activation, passes over the router's probabilities in fp32.
    routed = 6 * run.own_tokens * experts.count * FP32 / memory
    time.forward["elementwise"] += forward_passes * wide + routed
    time.backward["elementwise"] += backward_passes * wide + routed
    if run.args.get("activation_func_clamp_value"):
        first = rows * model.first_outputs * experts.ffn / split.etp * BF16 / memory
        biased = software.biased_activation * first
        if fused:
            biased *= 0.5  # Transformer Engine's operation fuser computes the rest with the products
        time.forward["expert activation"] += biased / 3
        time.routed += biased / 3
        time.backward["expert activation"] += biased * 2 / 3
    width = experts.latent or model.hidden
    permuted = software.permutation * permutation_passes(run, experts) * rows * width * BF16 / memory
    time.forward["expert permutation"] += permuted
    time.routed += permuted
    if not fused:
        time.routed += forward_passes * rows * experts.ffn / split.etp * BF16 / memory
    time.backward["expert permutation"] += permuted


def imbalance(run: Workload, experts: Experts) -> float:
    """Return the load of the busiest expert parallel rank relative to the mean."""
    ranks = run.split.ep
    if ranks == 1 or run.on("moe_router_force_load_balancing") or run.pads_to_capacity:
        return 1.0
    # The expected maximum of `ranks` normal values, by Blom's approximation.
    largest = NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))
    local = max(experts.count / ranks, 1)
    # Tokens that choose alike act as one: loads are as uneven as if this many tokens chose independently.
    spread = math.sqrt(max(experts.count / experts.top_k - 1, 0) / run.speeds.software.independent_tokens / local)
    busiest = min(1 + largest * spread, ranks, experts.count / experts.top_k)
    # Tokens above an expert's capacity are dropped.
    return min(busiest, max(run.capacity or busiest, 1.0))


def _add_imbalance(run: Workload, time: LayerTime, experts: Experts | None) -> None:
    """Add the wait for the rank whose experts have the most tokens."""
    excess = 0.0
    if experts:
        excess = imbalance(run, experts) - 1
    for passed in (time.forward, time.backward):
        routed = sum(part for name, part in passed.items() if "expert" in name)
        passed["expert imbalance"] += excess * routed


# --- recompute --------------------------------------------------------------------------------------------------------

# Modules that are a whole part of a layer, with the passes over the hidden state that their recompute does not repeat:
# norm and residual addition. A dense MLP's norm is part of its first linear layer, so it is repeated.
_PARTS: Mapping[str, tuple[str, int]] = {"mlp": (MLP, 3), "moe": (EXPERTS, 5)}
# The recomputable modules that contain linear layers, by the names of the products.
_MODULE_OF = {
    "shared fc1": "shared_experts",
    "shared fc2": "shared_experts",
    "query up": "mla_up_proj",
    "key-value up": "mla_up_proj",
}


def _recompute(run: Workload, time: LayerTime, kind: str, quantized: bool) -> float:
    """Return the seconds of forward work that selective recompute repeats, communication included."""
    experts, modules = run.model.experts_of(kind), recomputed_modules(run.args)
    hidden = run.own_tokens * run.model.hidden * BF16 / run.speeds.memory
    again = 0.0
    if "core_attn" in modules:
        again += time.forward["attention"]
    if "layernorm" in modules:
        again += 2 * len(kind) * hidden
    for module, (part, outside) in _PARTS.items():
        if module in modules and part in kind:
            again += sum(_passes(run, part, quantized).forward.values()) - outside * hidden
    if "moe" in modules:
        modules -= {"moe_act", "shared_experts"}  # parts of it
    for linear in linears(run, kind):
        if _MODULE_OF.get(linear.name) in modules:
            alone = LayerTime()
            _add_product(run, alone, linear, run.recipe(quantized))
            again += sum(alone.forward.values())
    if experts and experts.shared and "shared_experts" in modules:
        again += 3 * run.tokens * experts.shared / run.split.tp * BF16 / run.speeds.memory
        # Its TP communication is the same as around attention, so half of the layer's.
        again += sum(part for term, part in time.forward.items() if term.startswith("TP ")) / 2
    if experts and "moe_act" in modules:
        rows = run.routed_rows(experts)
        again += 3 * rows * experts.ffn / run.split.etp * BF16 / run.speeds.memory
        # The bias of the output is added after the module: 11 of 18 passes are repeated (benchmarks/plan/passes.py).
        again += 11 / 18 * time.forward["expert activation"]
    return again

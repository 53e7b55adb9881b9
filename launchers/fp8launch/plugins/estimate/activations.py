"""Memory that a layer keeps between its forward and backward pass, and that it needs in addition while it runs.

Kept tensors are the tensors that Megatron-Core 0.19 saves with Transformer Engine 2.20 and flash or fused attention,
which keep the log-sum-exp instead of scores. Against measurements on H200 (`benchmarks/activation_memory.py`) the kept
bytes agree to 1 % for dense and latent-attention layers, and to 7 % for experts, whose tokens are assumed to be spread
evenly. Working memory is a few tensors, calibrated with the same measurements to about 30 %. Mamba layers were not
measured: their memory is what `mamba_split_conv1d_scan_combined` of mamba-ssm 2.3 saves and allocates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from fp8launch.megatron.architecture import ATTENTION, EXPERTS, MAMBA, Architecture, Division, Experts
from fp8launch.megatron.model_arithmetic import Arguments, recomputed_modules, whole
from fp8launch.plugins.estimate.dtype_sizes import BF16, FP32, PrecisionSizes

# Calibrated: copies of the permuted tokens that dispatch, experts and combine hold together, in bf16 and with quantized
# inputs, and the additional copies that expert tensor parallelism gathers.
EXPERT_WORK = 4.0
EXPERT_WORK_QUANTIZED = 6.3
EXPERT_WORK_GATHERED = 4.0


@dataclass(frozen=True)
class Saving:
    """How layers save tensors. `element` and `linear_input` are the bytes per element of an unquantized tensor and of a
    linear layer's saved input."""

    element: float = BF16
    linear_input: float = BF16
    quantized: bool = False
    # The output projection shares the attention output, which is kept anyway, instead of keeping a quantized copy.
    shares_attention_output: bool = True
    # A sequence-parallel rank keeps the gathered input, because a blockwise one cannot be gathered again.
    keeps_gathered_input: bool = False
    fused_attention: bool = True
    fused_activation: bool = True
    hidden_dropout: bool = False
    attention_dropout: bool = False
    recompute: frozenset[str] = frozenset()
    # Modules whose kept tensors are offloaded to host memory (--offload-modules).
    offload: frozenset[str] = frozenset()


@dataclass(frozen=True)
class LayerMemory:
    """Bytes of one layer and micro batch on one rank. `kept` bytes stay from forward to backward pass, `rebuilt` bytes
    are recomputed for the backward pass, and `work` is the most that a pass needs on top of these."""

    kept: float
    rebuilt: float
    work: float


def layer_memory(model: Architecture, split: Division, micro_batch: int, kind: str, saving: Saving) -> LayerMemory:
    """Return the memory of one layer, of which only the parts in `saving.recompute` are recomputed."""
    tokens = micro_batch * model.seq_length / split.cp
    own = split.own_tokens(tokens)
    kept = rebuilt = work = 0.0
    for part in kind:
        if part == ATTENTION:
            attend = _latent_attention if model.latent else _attention
            own_kept, own_rebuilt, own_work = attend(model, split, tokens, own, micro_batch, saving)
        else:
            feed = {EXPERTS: _moe, MAMBA: _mamba}.get(part, _mlp)
            own_kept, own_rebuilt, own_work = feed(model, split, tokens, own, saving)
        kept, rebuilt, work = kept + own_kept, max(rebuilt, own_rebuilt), max(work, own_work)
    # Each part adds its result to the residual, which is kept.
    kept += len(kind) * own * model.hidden * saving.element
    if saving.hidden_dropout:
        kept += len(kind) * own * model.hidden
    return LayerMemory(kept, rebuilt, own * model.hidden * saving.element + work)


def _attention(
    model: Architecture, split: Division, tokens: float, own: float, micro_batch: int, saving: Saving
) -> tuple[float, float, float]:
    """Return kept, rebuilt and working bytes of grouped-query attention, including the output of the norm."""
    query = tokens * model.heads * model.channels / split.tp * saving.element
    key = tokens * model.groups * model.channels / split.tp * saving.element
    qkv = query * (1 + model.output_gate) + 2 * key
    kept = _linear_input(tokens, own, model.hidden, split, saving) + qkv + query
    if model.qk_norm:
        kept += query + key + tokens * (model.heads + model.groups) / split.tp * FP32
    if not saving.shares_attention_output:
        kept += query / saving.element * saving.linear_input
    core = _core(model, split, tokens, micro_batch, saving)
    if "core_attn" in saving.recompute:
        # The recomputation checkpoint holds the rotated query and key in addition to the projection they are slices of.
        return kept + query + key, core, qkv
    return kept + core, 0.0, qkv


def _core(model: Architecture, split: Division, tokens: float, micro_batch: int, saving: Saving) -> float:
    """Return the bytes that the attention core keeps.

    Unfused attention keeps the output of the softmax, which is also an input of the product with the values. Dropout
    adds its mask and its result.
    """
    if saving.fused_attention:
        return tokens * model.heads / split.tp * FP32
    scores = micro_batch * model.heads / split.tp * (model.seq_length / split.cp) * model.seq_length
    if saving.attention_dropout:
        return scores * (2 * saving.element + 1)
    return scores * saving.element


def _latent_attention(
    model: Architecture, split: Division, tokens: float, own: float, micro_batch: int, saving: Saving
) -> tuple[float, float, float]:
    latent = model.latent
    assert latent is not None
    heads = model.heads / split.tp
    query_key = 2 * tokens * heads * (latent.head + latent.rope) * saving.element
    value = tokens * heads * latent.value * saving.element
    compressed = own * ((latent.query_rank or 0) + latent.kv_rank)
    # Each down projection keeps its own quantized copy of the norm's output; in bf16 they share it.
    norm_out = own * model.hidden * saving.element
    if saving.quantized:
        norm_out = own * model.hidden * 2 * saving.linear_input
    up_inputs = compressed * saving.linear_input
    kept = norm_out + compressed * saving.element + up_inputs + query_key + value + value
    if not saving.shares_attention_output:
        kept += value / saving.element * saving.linear_input
    core = _core(model, split, tokens, micro_batch, saving)
    rebuilt = 0.0
    if "core_attn" in saving.recompute:
        rebuilt = core
    else:
        kept += core
    if "mla_up_proj" in saving.recompute:
        kept -= query_key + value + up_inputs
        rebuilt += query_key + value + up_inputs
    if "layernorm" in saving.recompute:
        kept -= norm_out
        rebuilt += norm_out
    return kept, rebuilt, query_key + value


def _mlp(model: Architecture, split: Division, tokens: float, own: float, saving: Saving) -> tuple[float, float, float]:
    first = tokens * model.ffn * model.first_outputs / split.tp * saving.element
    kept = (
        _linear_input(tokens, own, model.hidden, split, saving)
        + first
        + tokens * model.ffn / split.tp * saving.linear_input
    )
    if model.gated and not saving.fused_activation:
        kept += first
    # The gradient of the first product, and its quantized copy.
    work = first * 1.5 if saving.quantized else first
    if "mlp" in saving.recompute:
        return 0.0, kept, work
    return kept, 0.0, work


def _moe(model: Architecture, split: Division, tokens: float, own: float, saving: Saving) -> tuple[float, float, float]:
    experts = model.experts
    assert experts is not None
    permuted = own * split.etp * experts.top_k
    width = experts.latent or model.hidden
    own_ffn = experts.ffn / split.etp
    norm_out = own * model.hidden * saving.element
    router = own * experts.count * saving.element
    activation = permuted * own_ffn * saving.linear_input
    routed = permuted * width * saving.linear_input + permuted * own_ffn * model.first_outputs * saving.element
    shared = _shared(model, experts, split, tokens, saving)
    times = EXPERT_WORK_QUANTIZED if saving.quantized else EXPERT_WORK
    if split.etp > 1:
        times += EXPERT_WORK_GATHERED
    work = permuted * width * saving.element * times
    if "moe" in saving.recompute:
        return norm_out + router, routed + activation + shared, work
    if "fused_group_mlp" in saving.offload:
        routed = activation = 0.0
    elif "moe_act" in saving.offload:
        activation = 0.0
    kept, rebuilt = norm_out + router + routed + activation + shared, 0.0
    for module, size in (("moe_act", activation), ("shared_experts", shared), ("layernorm", norm_out)):
        if module in saving.recompute:
            kept -= size
            rebuilt += size
    return kept, rebuilt, work


def _shared(model: Architecture, experts: Experts, split: Division, tokens: float, saving: Saving) -> float:
    first = tokens * experts.shared * model.first_outputs / split.tp * saving.element
    return first + tokens * experts.shared / split.tp * saving.linear_input


def _mamba(
    model: Architecture, split: Division, tokens: float, own: float, saving: Saving
) -> tuple[float, float, float]:
    """Return kept, rebuilt and working bytes of a Mamba layer.

    It keeps the inputs of both projections, the packed input of the scan, and the scan's result before norm and gate.
    The backward pass repeats the convolution. It holds the convolved channels and the states of every chunk, their
    gradients, and the gradients of the packed input, the gate and the result.
    """
    mamba = model.mamba
    assert mamba is not None
    element = saving.element * tokens / split.tp
    inputs = _linear_input(tokens, own, model.hidden, split, saving)
    kept = inputs + tokens * mamba.inner / split.tp * saving.linear_input + (mamba.projected + mamba.inner) * element
    kept += tokens * mamba.groups / split.tp * FP32
    states = tokens / split.tp * mamba.inner * mamba.state / mamba.chunk * FP32
    work = (mamba.projected + 2 * mamba.convolved + 2 * mamba.inner) * element + 2 * states
    return kept, 0.0, work


def _linear_input(tokens: float, own: float, hidden: int, split: Division, saving: Saving) -> float:
    """Return the bytes of a norm's output as the next linear layer keeps it."""
    if saving.keeps_gathered_input and split.sequence_parallel:
        return tokens * hidden * saving.linear_input
    return own * hidden * saving.linear_input


def in_flight(
    weights: Collection[float], pp: int, rank: int, microbatches: int, group: int | None = None, extra: int = 0
) -> tuple[int, ...]:
    """Return the number of micro batches that each virtual stage of a pipeline rank holds at the activations' peak.

    `weights` are bytes per micro batch of each chunk. Simulates Megatron's schedules: 1F1B for one chunk, else the
    interleaved schedule with groups of `group` micro batches (default: PP) and `extra` warm-up steps.
    """
    sizes = list(weights)
    chunks = len(sizes)
    if chunks == 1:
        return (min(microbatches, pp - rank),)
    group = group or pp
    # The schedule is periodic: after the first rounds the number in flight does not grow.
    microbatches = min(microbatches, 4 * max(group, pp))
    order: list[int] = []
    for start in range(0, microbatches, group):
        for chunk in range(chunks):
            order += [chunk] * min(group, microbatches - start)
    backward = [chunks - 1 - chunk for chunk in order]
    warmup = min((pp - rank - 1) * 2 + (chunks - 1) * group + extra, len(order))
    now = most = 0.0
    at = -1
    for step, chunk in enumerate(order):
        now += sizes[chunk]
        if now > most:
            most, at = now, step
        if step >= warmup:
            now -= sizes[backward[step - warmup]]
    held = Counter(order[: at + 1])
    held.subtract(backward[: max(at - warmup, 0)])
    return tuple(held[chunk] for chunk in range(chunks))


def recomputed_layers(args: Arguments, layers: int) -> int:
    """Return how many of the `layers` of a virtual stage are fully recomputed."""
    if args.get("recompute_granularity") != "full":
        return 0
    if args.get("recompute_method") == "block":
        return min(whole(args, "recompute_num_layers") or 1, layers)
    return layers


def offloaded_layers(args: Arguments) -> int:
    """Return how many of the first layers keep their activations in host memory."""
    if args.get("cpu_offloading") is False:
        return 0  # Bridge has a switch, Megatron-LM only the number
    return whole(args, "cpu_offloading_num_layers") or 0


def _offloaded_modules(args: Arguments) -> frozenset[str]:
    modules = args.get("offload_modules")
    if not args.get("fine_grained_activation_offloading") or not isinstance(modules, (list, tuple)):
        return frozenset()
    return frozenset(map(str, modules))


def saving(args: Arguments, formats: PrecisionSizes, quantized: bool) -> Saving:
    """Return how a layer saves its tensors; `quantized` is false for a layer that stays in bf16."""
    recipe = formats.recipe if quantized else None
    linear_input = formats.weight
    # FlashAttention puts the batch first. With several sequences the bf16 projection saves a transposed copy of its
    # input: 96 MiB per layer of Llama-3.2 3B (benchmarks/h200/memory.md).
    micro_batch = args.get("micro_batch_size")
    copies_output = args.get("attention_backend") == "flash" and isinstance(micro_batch, int) and micro_batch > 1
    if recipe:
        linear_input = recipe.saved_bytes
        copies_output = recipe.copies_attention_output
    return Saving(
        element=formats.weight,
        linear_input=linear_input,
        quantized=quantized,
        shares_attention_output=not copies_output,
        keeps_gathered_input=bool(recipe and recipe.keeps_gathered_input),
        # Transformer Engine's fused attention takes 16-bit types only (attention/dot_product_attention/utils.py).
        fused_attention=formats.weight != FP32
        and args.get("attention_backend", "auto") not in ("unfused", "local")
        and args.get("transformer_impl", "transformer_engine") != "local",
        # Transformer Engine's activation keeps the same tensors as Megatron's fused one, as measured on an H200.
        fused_activation=bool(args.get("bias_swiglu_fusion", True) or args.get("use_te_activation_func")),
        hidden_dropout=_positive(args.get("hidden_dropout", 0.1)),
        attention_dropout=_positive(args.get("attention_dropout", 0.1)),
        recompute=recomputed_modules(args),
        offload=_offloaded_modules(args),
    )


def _positive(value: object) -> bool:
    return isinstance(value, (int, float)) and value > 0

"""Memory that a layer keeps between its forward and its backward pass, and that it needs beside that while it runs.

Kept tensors are listed as Megatron-Core 0.19 with Transformer Engine 2.20 saves them; with flash or fused attention,
which keep the log-sum-exp instead of scores. Against measurements on H200 (`benchmarks/activation_memory.py`) the kept
bytes agree to 1 % for dense and latent-attention layers, and to 7 % for experts, whose tokens are assumed to be spread
evenly. Working memory is calibrated on the same measurements: a few tensors' worth, to about 30 %. Mamba layers were
not measured: theirs is what `mamba_split_conv1d_scan_combined` of mamba-ssm 2.3 saves and allocates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from fp8launch.megatron.architecture import ATTENTION, EXPERTS, MAMBA, Architecture, Division, Experts

BF16 = 2
FP32 = 4
# Calibrated: permuted tokens that dispatch, experts and combine hold at once, in bf16 and where inputs are quantized,
# and what expert tensor parallelism gathers on top.
EXPERT_WORK = 4.0
EXPERT_WORK_QUANTIZED = 6.3
EXPERT_WORK_GATHERED = 4.0


@dataclass(frozen=True)
class Saving:
    """How layers save, in bytes per element: `element` of a tensor that is not quantized, `linear_input` of a linear
    layer's saved input."""

    element: float = BF16
    linear_input: float = BF16
    quantized: bool = False
    # The output projection shares the attention output that is kept anyway, instead of its own quantized copy.
    shares_attention_output: bool = True
    # Blockwise inputs cannot be gathered again from what a sequence-parallel rank keeps: it keeps the gathered one.
    keeps_gathered_input: bool = False
    fused_attention: bool = True
    fused_activation: bool = True
    hidden_dropout: bool = False
    attention_dropout: bool = False
    recompute: frozenset[str] = frozenset()
    # Modules whose kept tensors wait in the host's memory (--offload-modules).
    offload: frozenset[str] = frozenset()


@dataclass(frozen=True)
class LayerMemory:
    """Bytes of one layer and micro batch on one rank. `kept` from forward to backward; `rebuilt` what selective
    recompute brings back for the backward pass; `work` the most that passes hold beside these."""

    kept: float
    rebuilt: float
    work: float


def layer_memory(model: Architecture, split: Division, micro_batch: int, kind: str, saving: Saving) -> LayerMemory:
    """One layer, recomputed only where `saving.recompute` names its parts."""
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
    # The residual: each part adds its result to a hidden state that is kept.
    kept += len(kind) * own * model.hidden * saving.element
    if saving.hidden_dropout:
        kept += len(kind) * own * model.hidden
    return LayerMemory(kept, rebuilt, own * model.hidden * saving.element + work)


def _attention(
    model: Architecture, split: Division, tokens: float, own: float, micro_batch: int, saving: Saving
) -> tuple[float, float, float]:
    """Kept, rebuilt and working bytes of grouped-query attention, the norm's output included."""
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
        # The checkpoint holds the rotated query and key beside the projection that they are cut from.
        return kept + query + key, core, qkv
    return kept + core, 0.0, qkv


def _core(model: Architecture, split: Division, tokens: float, micro_batch: int, saving: Saving) -> float:
    """The attention core's own kept bytes.

    Unfused attention keeps the softmax's output, which the product with the values keeps as well: one tensor. With
    dropout between them it keeps the mask and the result of the dropout beside it.
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
    # Both down projections quantize the norm's output for themselves; in bf16 they share it.
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
    """Kept: inputs of both projections, and of the scan its packed input and its result before norm and gate.

    The backward pass convolves again. It holds the gradient of the packed input, the convolved channels with theirs,
    the gradients of gate and result, and states of every chunk with theirs.
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
    """A norm's output as the linear layer behind it keeps it."""
    if saving.keeps_gathered_input and split.sequence_parallel:
        return tokens * hidden * saving.linear_input
    return own * hidden * saving.linear_input


def in_flight(
    weights: Collection[float], pp: int, rank: int, microbatches: int, group: int | None = None, extra: int = 0
) -> tuple[int, ...]:
    """Micro batches that each virtual stage of a pipeline rank holds when their activations are largest.

    `weights` are bytes per micro batch of each chunk. Plays Megatron's schedules: 1F1B for one chunk, else the
    interleaved one with `group` (default: PP) micro batches of a chunk in a row and `extra` warm-up steps.
    """
    sizes = list(weights)
    chunks = len(sizes)
    if chunks == 1:
        return (min(microbatches, pp - rank),)
    group = group or pp
    # The schedule repeats itself: what is in flight does not grow after the first rounds.
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

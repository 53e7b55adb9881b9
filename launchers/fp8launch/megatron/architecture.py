"""A GPT model and its division over GPUs, read from Megatron's arguments.

Arguments are keyed by Megatron's attribute name (dest), as in its dump; a missing argument has Megatron's default.
Supported are dense, MoE, multi-latent-attention, multi-token-prediction and hybrid (Mamba-2) models.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fp8launch.megatron.model_arithmetic import (
    LONGEST_LAYOUT,
    MOST_LAYERS,
    Arguments,
    Latent,
    Mamba,
    accounted_layers,
    expert_layers,
    expert_tensor_size,
    expert_width,
    ffn_width,
    head_width,
    hybrid_layers,
    latent_attention,
    layer_count,
    mamba_mixer,
    padded_vocab_size,
    parse_layout,
    query_groups,
    virtual_stages,
    whole,
    why_not_counted,
)

# A layer is written with the symbols of Megatron's hybrid patterns: a layer of a transformer has two parts, attention
# and an MLP, and a layer of a hybrid one.
MAMBA, ATTENTION, MLP, EXPERTS = "M", "*", "-", "E"
DENSE_LAYER, EXPERT_LAYER = ATTENTION + MLP, ATTENTION + EXPERTS


@dataclass(frozen=True)
class Experts:
    """The MoE layers: number and width of routed experts, experts per token, and the width of the shared expert."""

    count: int
    ffn: int
    top_k: int
    shared: int
    shared_gate: bool
    latent: int | None


@dataclass(frozen=True)
class Architecture:
    """Sizes of a model. `kinds[i]` are the parts of layer i, `mtp_kinds` the parts of each layer of one MTP depth;
    `mtp_repeated` says whether all depths share their weights. `norm` is a norm's number of weights per channel;
    `positions` is the length of a learned position embedding, 0 for rotary ones."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    groups: int
    channels: int
    vocab: int
    seq_length: int
    gated: bool
    norm: int
    linear_bias: bool
    qkv_bias: bool
    qk_norm: bool
    output_gate: bool
    softmax_offset: bool
    tied: bool
    positions: int
    mtp: int
    kinds: tuple[str, ...]
    mtp_kinds: tuple[str, ...]
    mtp_repeated: bool = False
    latent: Latent | None = None
    experts: Experts | None = None
    mamba: Mamba | None = None

    def experts_of(self, kind: str) -> Experts | None:
        """Return the experts of a layer of this kind; None if it has none."""
        return self.experts if EXPERTS in kind else None

    def mtp_blocks(self, depths: int) -> int:
        """Return how many MTP blocks with separate weights `depths` MTP depths have."""
        return min(depths, 1) if self.mtp_repeated else depths

    @property
    def first_outputs(self) -> int:
        """Return the outputs of an MLP's first matrix per channel of its width: two with a gated activation."""
        return 2 if self.gated else 1


@dataclass(frozen=True)
class Division:
    """How a model is divided. `data` is data x context parallelism for dense weights, `expert_data` for experts."""

    tp: int = 1
    pp: int = 1
    vp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    data: int = 1
    expert_data: int = 1
    sequence_parallel: bool = False

    @property
    def replicas(self) -> int:
        """The number of copies of the model, each of which processes different sequences."""
        return max(self.data // self.cp, 1)

    def own_tokens(self, tokens: float) -> float:
        """Return how many of `tokens` a rank holds between layers, where sequence parallelism divides them."""
        if self.sequence_parallel:
            return tokens / self.tp
        return tokens


@dataclass(frozen=True)
class Chunk:
    """The content of one virtual stage of a pipeline rank: decoder layers by number, MTP layers, embedding, output."""

    layers: tuple[int, ...]
    mtp: int = 0
    embedding: bool = False
    output: bool = False
    final_norm: bool = False

    @property
    def around(self) -> Chunk:
        """Return the chunk without its decoder layers."""
        return Chunk((), self.mtp, self.embedding, self.output, self.final_norm)


class DividedModel(NamedTuple):
    """A model, its division, and the chunks of every pipeline rank in order."""

    model: Architecture
    split: Division
    pipeline: tuple[tuple[Chunk, ...], ...]


def divided_model(args: Arguments, world: int) -> DividedModel | None:
    """Return the model of `args` on `world` GPUs; None if it is not counted or cannot be divided as stated."""
    model = architecture(args)
    if model is None:
        return None
    split = division(args, world)
    pipeline = stages(args, model, split)
    if pipeline is None:
        return None
    return DividedModel(model, split, pipeline)


def architecture(args: Arguments) -> Architecture | None:
    """Return the model that `args` describe; None if a size is missing or this kind of model is not counted."""
    hidden, layers, heads = whole(args, "hidden_size"), layer_count(args), whole(args, "num_attention_heads")
    vocab, seq_length = padded_vocab_size(args), whole(args, "seq_length")
    hybrid = hybrid_layers(args)
    mtp = whole(args, "mtp_num_layers") or 0
    if hybrid:
        mtp = hybrid.depths
    if not (hidden and layers and heads and vocab and seq_length) or layers + mtp > MOST_LAYERS:
        return None
    if why_not_counted(args) is not None:
        return None
    if hybrid:
        kinds: tuple[str, ...] | None = tuple(hybrid.decoder)
        mtp_kinds = tuple(hybrid.mtp)
    else:
        moe = expert_layers(args, layers)
        kinds = None if moe is None else _transformer_kinds(moe)
        mtp_kinds = (kinds or ())[-1:]
    parts = "".join((*(kinds or ()), *mtp_kinds))
    experts = _experts(args)
    if kinds is None or (EXPERTS in parts and experts is None) or (hidden % heads and not whole(args, "kv_channels")):
        return None
    swiglu = bool(args.get("swiglu"))
    linear_bias = bool(args.get("add_bias_linear", True))
    learned = args.get("position_embedding_type", "learned_absolute") == "learned_absolute"
    positions = 0
    if learned and not args.get("use_rotary_position_embeddings"):
        positions = whole(args, "max_position_embeddings") or 0
    return Architecture(
        layers=layers,
        hidden=hidden,
        ffn=ffn_width(args),
        heads=heads,
        groups=query_groups(args),
        channels=head_width(args),
        vocab=vocab,
        seq_length=seq_length,
        gated=swiglu or bool(args.get("quick_geglu")),
        norm=1 if args.get("normalization") == "RMSNorm" else 2,
        linear_bias=linear_bias,
        qkv_bias=linear_bias or bool(args.get("add_qkv_bias")),
        qk_norm=bool(args.get("qk_layernorm")),
        output_gate=bool(args.get("attention_output_gate")),
        softmax_offset=args.get("softmax_type") == "learnable",
        tied=not args.get("untie_embeddings_and_output_weights"),
        positions=positions,
        mtp=mtp,
        kinds=kinds,
        mtp_kinds=mtp_kinds,
        mtp_repeated=bool(args.get("mtp_use_repeated_layer")),
        latent=latent_attention(args),
        experts=experts,
        mamba=mamba_mixer(args) if MAMBA in parts else None,
    )


@functools.lru_cache(maxsize=64)
def _transformer_kinds(moe: tuple[bool, ...]) -> tuple[str, ...]:
    return tuple(EXPERT_LAYER if one else DENSE_LAYER for one in moe)


def _experts(args: Arguments) -> Experts | None:
    count = whole(args, "num_experts")
    if not count:
        return None
    return Experts(
        count=count,
        ffn=expert_width(args),
        top_k=whole(args, "moe_router_topk") or 2,
        shared=whole(args, "moe_shared_expert_intermediate_size") or 0,
        shared_gate=bool(args.get("moe_shared_expert_gate")),
        latent=whole(args, "moe_latent_size"),
    )


def division(args: Arguments, world: int) -> Division:
    """Return how `args` divide `world` GPUs. Sizes that do not divide are rounded down to whole groups."""
    tp, pp, ep = (whole(args, f"{kind}_model_parallel_size") or 1 for kind in ("tensor", "pipeline", "expert"))
    etp = expert_tensor_size(args)
    return Division(
        tp=tp,
        pp=pp,
        vp=virtual_stages(args, pp),
        cp=whole(args, "context_parallel_size") or 1,
        ep=ep,
        etp=etp,
        data=max(world // (tp * pp), 1),
        expert_data=max(world // (etp * ep * pp), 1),
        # Megatron switches it off without tensor parallelism.
        sequence_parallel=bool(args.get("sequence_parallel")) and tp > 1,
    )


def stages(args: Arguments, model: Architecture, split: Division) -> tuple[tuple[Chunk, ...], ...] | None:
    """Return the chunks of every pipeline rank, in order; None if the layers cannot be divided as the arguments say."""
    layout = args.get("pipeline_model_parallel_layout")
    counts: Sequence[tuple[int, int]] | None
    hybrid = hybrid_layers(args)
    if hybrid and len(hybrid.segments) > 1:
        if len(hybrid.segments) % split.pp:
            return None
        counts = [(len(segment), 0) for segment in hybrid.segments]
        counts[-1] = (counts[-1][0], model.mtp)
    elif isinstance(layout, str) and layout:
        pieces = parse_layout(layout)
        if not pieces or len(pieces) % split.pp:
            return None
        counts = [(piece.count("t"), piece.count("m")) for piece in pieces]
    else:
        counts = _even_counts(args, model, split)
    if counts is None or sum(t for t, _ in counts) != model.layers:
        return None
    return _pipeline(tuple(counts), model.layers, bool(model.mtp), split.pp)


# A search for layouts needs the same few pipelines thousands of times.
@functools.lru_cache(maxsize=256)
def _pipeline(counts: Sequence[tuple[int, int]], depth: int, has_mtp: bool, pp: int) -> tuple[tuple[Chunk, ...], ...]:
    """Return the chunks of every pipeline rank from the layers and MTP layers of each chunk."""
    chunks, at = [], 0
    last = len(counts) - 1
    for i, (layers, mtp) in enumerate(counts):
        numbers = tuple(range(at, at + layers))
        at += layers
        # The final norm of the decoder comes before the MTP layers, or else before the output.
        norm = i == last
        if has_mtp:
            norm = at == depth and layers > 0
        chunks.append(Chunk(numbers, mtp, i == 0, i == last, norm))
    return tuple(tuple(chunks[rank::pp]) for rank in range(pp))


def _even_counts(args: Arguments, model: Architecture, split: Division) -> list[tuple[int, int]] | None:
    """Return layers and MTP layers of each chunk, in pipeline order, for a model without a stated layout."""
    first = whole(args, "decoder_first_pipeline_num_layers")
    last = whole(args, "decoder_last_pipeline_num_layers")
    if split.pp * split.vp > LONGEST_LAYOUT:
        return None
    per_rank = [accounted_layers(args) // split.pp] * split.pp
    if first is not None or last is not None:
        ends = (first is not None) + (last is not None)
        middle = model.layers - (first or 0) - (last or 0)
        per_rank = [middle // max(split.pp - ends, 1)] * split.pp
        if first is not None:
            per_rank[0] = first
        if last is not None:
            per_rank[-1] = last
    if any(layers % split.vp for layers in per_rank):
        return None
    layers = [count // split.vp for count in per_rank] * split.vp
    layers[0] -= bool(args.get("account_for_embedding_in_pipeline_split"))
    layers[-1] -= bool(args.get("account_for_loss_in_pipeline_split"))
    if min(layers) < 0:
        return None
    mtp = [0] * (len(layers) - 1) + [model.mtp]
    return list(zip(layers, mtp, strict=True))

"""A GPT model and its division over GPUs, read from Megatron's arguments.

Arguments are keyed by Megatron's attribute name (dest), as in its dump; what is missing has Megatron's default.
Supported are dense, MoE, multi-latent-attention and multi-token-prediction models; not hybrid (Mamba) ones.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from fp8launch.megatron.flops import _int, padded_vocab_size
from fp8launch.megatron.flops import _not_counted as hybrid
from fp8launch.megatron.flops import pattern_value as pattern_value

Arguments = Mapping[str, object]

# A longer layout, or a deeper model, is a slip and would take the memory of the login node.
LONGEST_LAYOUT = 100_000
MOST_LAYERS = 2_000


@dataclass(frozen=True)
class Latent:
    """Multi-latent attention: ranks of the compressed query (None: not compressed) and key-value, widths per head."""

    query_rank: int | None
    kv_rank: int
    head: int
    rope: int
    value: int


@dataclass(frozen=True)
class Experts:
    """The MoE layers: routed experts with their width, how many a token visits, and the shared expert's width."""

    count: int
    ffn: int
    top_k: int
    shared: int
    shared_gate: bool
    latent: int | None


@dataclass(frozen=True)
class Architecture:
    """Sizes of a model. `moe[i]` says whether layer i is one of experts; `norm` is the number of weights per channel
    of a norm; `positions` is the length of a learned position embedding, 0 for rotary ones."""

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
    moe: tuple[bool, ...]
    latent: Latent | None = None
    experts: Experts | None = None


@dataclass(frozen=True)
class Division:
    """How a model is divided. `data` is data x context parallel for dense weights, `expert_data` that of experts."""

    tp: int = 1
    pp: int = 1
    vp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    data: int = 1
    expert_data: int = 1
    sequence_parallel: bool = False


@dataclass(frozen=True)
class Chunk:
    """What one virtual stage of a pipeline rank holds: decoder layers by number, MTP layers, embedding, output."""

    layers: tuple[int, ...]
    mtp: int = 0
    embedding: bool = False
    output: bool = False
    final_norm: bool = False


def whole(args: Arguments, name: str) -> int | None:
    """An argument that is a whole number, from 0 to 10^15; None for anything else."""
    return _int(args, name)


def architecture(args: Arguments) -> Architecture | None:
    """The model that `args` describe; None if a needed size is missing or the model is of a kind not counted here."""
    hidden, layers, heads = (whole(args, name) for name in ("hidden_size", "num_layers", "num_attention_heads"))
    vocab, seq_length = padded_vocab_size(args), whole(args, "seq_length")
    mtp = whole(args, "mtp_num_layers") or 0
    if not (hidden and layers and heads and vocab and seq_length) or layers + mtp > MOST_LAYERS or hybrid(args):
        return None
    pattern = _moe_pattern(args, layers)
    if pattern is None or (hidden % heads and not whole(args, "kv_channels")):
        return None
    swiglu = bool(args.get("swiglu"))
    # Megatron's default width with SwiGLU is two thirds of 4 h, in steps of 64.
    ffn = whole(args, "ffn_hidden_size") or (int(4 * hidden * 2 / 3) // 64 * 64 if swiglu else 4 * hidden)
    linear_bias = bool(args.get("add_bias_linear", True))
    learned = args.get("position_embedding_type", "learned_absolute") == "learned_absolute"
    learned = learned and not args.get("use_rotary_position_embeddings")
    return Architecture(
        layers=layers,
        hidden=hidden,
        ffn=ffn,
        heads=heads,
        groups=(whole(args, "num_query_groups") or 1) if args.get("group_query_attention") else heads,
        channels=whole(args, "kv_channels") or hidden // heads,
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
        positions=(whole(args, "max_position_embeddings") or 0) if learned else 0,
        mtp=mtp,
        moe=pattern,
        latent=_latent(args),
        experts=_experts(args, ffn),
    )


def _moe_pattern(args: Arguments, layers: int) -> tuple[bool, ...] | None:
    """Which layers are of experts: every n-th for a number, else as the list says; None for what is neither."""
    if not whole(args, "num_experts"):
        return (False,) * layers
    frequency = args.get("moe_layer_freq", 1)
    if isinstance(frequency, str):
        frequency = pattern_value(frequency)
    if isinstance(frequency, int) and frequency > 0:
        return tuple(i % frequency == 0 for i in range(layers))
    if isinstance(frequency, list) and len(frequency) == layers:
        return tuple(map(bool, frequency))
    return None


def _latent(args: Arguments) -> Latent | None:
    if not args.get("multi_latent_attention"):
        return None
    return Latent(
        query_rank=whole(args, "q_lora_rank"),
        kv_rank=whole(args, "kv_lora_rank") or 32,
        head=whole(args, "qk_head_dim") or 128,
        rope=whole(args, "qk_pos_emb_head_dim") or 64,
        value=whole(args, "v_head_dim") or 128,
    )


def _experts(args: Arguments, ffn: int) -> Experts | None:
    count = whole(args, "num_experts")
    if not count:
        return None
    return Experts(
        count=count,
        ffn=whole(args, "moe_ffn_hidden_size") or ffn,
        top_k=whole(args, "moe_router_topk") or 2,
        shared=whole(args, "moe_shared_expert_intermediate_size") or 0,
        shared_gate=bool(args.get("moe_shared_expert_gate")),
        latent=whole(args, "moe_latent_size"),
    )


def division(args: Arguments, world: int) -> Division:
    """How `args` divide `world` GPUs; sizes that do not divide give the nearest smaller whole group."""
    tp, pp, ep = (whole(args, f"{kind}_model_parallel_size") or 1 for kind in ("tensor", "pipeline", "expert"))
    etp = whole(args, "expert_tensor_parallel_size") or tp
    return Division(
        tp=tp,
        pp=pp,
        vp=_virtual(args, pp),
        cp=whole(args, "context_parallel_size") or 1,
        ep=ep,
        etp=etp,
        data=max(world // (tp * pp), 1),
        expert_data=max(world // (etp * ep * pp), 1),
        # Megatron switches it off where there is nothing to divide.
        sequence_parallel=bool(args.get("sequence_parallel")) and tp > 1,
    )


def _virtual(args: Arguments, pp: int) -> int:
    """Virtual stages of each pipeline rank."""
    layout = args.get("pipeline_model_parallel_layout")
    if isinstance(layout, str) and (pieces := parse_layout(layout)):
        return max(len(pieces) // pp, 1)
    if stated := whole(args, "num_virtual_stages_per_pipeline_rank"):
        return stated
    if per_chunk := whole(args, "num_layers_per_virtual_pipeline_stage"):
        return max(_accounted(args) // pp // per_chunk, 1)
    return 1


def _accounted(args: Arguments) -> int:
    """Layers as the even split counts them: embedding and loss may take the place of one each."""
    extra = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
    return (whole(args, "num_layers") or 0) + sum(bool(args.get(name)) for name in extra)


def stages(args: Arguments, model: Architecture, split: Division) -> tuple[tuple[Chunk, ...], ...] | None:
    """The chunks of every pipeline rank, in order; None where the layers do not divide as asked."""
    layout = args.get("pipeline_model_parallel_layout")
    counts: list[tuple[int, int]] | None
    if isinstance(layout, str) and layout:
        pieces = parse_layout(layout)
        if not pieces or len(pieces) % split.pp:
            return None
        counts = [(piece.count("t"), piece.count("m")) for piece in pieces]
    else:
        counts = _even_counts(args, model, split)
    if counts is None or sum(t for t, _ in counts) != model.layers:
        return None
    chunks, at = [], 0
    last = len(counts) - 1
    for i, (layers, mtp) in enumerate(counts):
        numbers = tuple(range(at, at + layers))
        at += layers
        # With MTP layers the decoder's norm comes before them, else before the output.
        norm = (at == model.layers and layers > 0) if model.mtp else i == last
        chunks.append(Chunk(numbers, mtp, i == 0, i == last, norm))
    return tuple(tuple(chunks[rank :: split.pp]) for rank in range(split.pp))


def _even_counts(args: Arguments, model: Architecture, split: Division) -> list[tuple[int, int]] | None:
    """Layers and MTP layers of each chunk, in the order of the pipeline, without a stated layout."""
    first, last = (whole(args, f"decoder_{end}_pipeline_num_layers") for end in ("first", "last"))
    embedding, loss = (bool(args.get(f"account_for_{end}_in_pipeline_split")) for end in ("embedding", "loss"))
    if split.pp * split.vp > LONGEST_LAYOUT:
        return None
    per_rank = [_accounted(args) // split.pp] * split.pp
    if first is not None or last is not None:
        ends = (first is not None) + (last is not None)
        middle = model.layers - (first or 0) - (last or 0)
        per_rank = [middle // max(split.pp - ends, 1)] * split.pp
        per_rank[0] = first if first is not None else per_rank[0]
        per_rank[-1] = last if last is not None else per_rank[-1]
    if any(n % split.vp for n in per_rank):
        return None
    counts = [[n // split.vp, 0] for _ in range(split.vp) for n in per_rank]
    counts[0][0] -= embedding
    counts[-1][0] -= loss
    counts[-1][1] = model.mtp
    return None if any(n < 0 for n, _ in counts) else [(n, mtp) for n, mtp in counts]


def parse_layout(text: str) -> list[str] | None:
    """The pieces of a pipeline layout such as `Et*2|(t*2|)*3,tL`, one letter a layer: E, t, m, L.

    `|` ends a piece, commas are for the eye, `*n` repeats the letter or the parentheses before it. None for other text.
    """
    text = re.sub(r"[\s,'\"]", "", text)
    for repeated in (r"\(([^()]*)\)\*(\d{1,4})", r"([EtmL|])\*(\d{1,4})"):
        if sum(len(body) * int(times) for body, times in re.findall(repeated, text)) > LONGEST_LAYOUT:
            return None
        text = re.sub(repeated, lambda found: found[1] * int(found[2]), text)
    return text.split("|") if text and re.fullmatch(r"[EtmL|]*", text) else None

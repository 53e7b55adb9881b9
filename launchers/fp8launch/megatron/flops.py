"""Floating-point operations of training, from Megatron's argument values: dense, MoE, MLA, MTP and hybrid models.

Counts model FLOPs as Megatron's own throughput field does (verified against megatron-core 0.17 to 0.19), so numbers
compare: multiplications and additions of all matrix products, forward and twice backward; causal attention as the
half that is not masked; top-k experts only; no recompute, embedding look-up, norms, softmax, optimizer or FP8
padding. With t tokens, hidden size h, L layers and sequence length s:

    6 t [ L (2 h q + 2 h kv + q s) + L_dense n f h + L_moe n (k f_e + f_s) h + h V ]

where q and kv are the widths of the query and of one of key and value, n is 3 with SwiGLU else 2, V the padded
vocabulary. A Mamba layer of width d, state n, g groups and H heads has h (3 d + 2 g n + H) + 3.5 d n in the place of
attention's terms. Three things are counted as Megatron counts them although the GPU does otherwise: an MLP gated by
quick GEGLU as if it had two matrices, sliding-window attention as full, and d as 2 h whatever the heads (`miscounted`
tells). Models of linear attention are not counted: None.
"""

from __future__ import annotations

from fp8launch.megatron.model_arithmetic import (
    HYBRID_COUNTED,
    Arguments,
    HybridLayers,
    Latent,
    expert_layers,
    expert_width,
    ffn_width,
    head_width,
    hybrid_layers,
    hybrid_pattern,
    latent_attention,
    layer_count,
    layer_kinds,
    mamba_mixer,
    padded_vocab_size,
    query_groups,
    whole,
)

FORWARD_AND_BACKWARD = 3
MULTIPLY_ADD = 2


def flops_per_token(args: Arguments) -> float | None:
    """FLOPs per token at the arguments' sequence length.

    `args` has Megatron's names, as in its dump or as flags with underscores; what is missing has Megatron's
    default. None if a needed size is missing, or for models that are not counted here.
    """
    hidden, layers, seq_length = whole(args, "hidden_size"), layer_count(args), whole(args, "seq_length")
    vocabulary = padded_vocab_size(args)
    if not (hidden and layers and seq_length and vocabulary) or not is_counted(args):
        return None
    attention = _attention(args)
    if hybrid := hybrid_layers(args):
        products = _hybrid(args, hybrid, hidden, seq_length, attention) + hidden * vocabulary * (1 + hybrid.depths)
        return FORWARD_AND_BACKWARD * MULTIPLY_ADD * products
    mlp = _mlp(args)
    if attention is None or mlp is None:
        return None
    mtp = whole(args, "mtp_num_layers") or 0
    linear, core = attention
    multiplications = (
        (layers + mtp) * (linear + core * seq_length)
        + mlp
        + mtp * (3 * hidden + 2 * hidden * hidden)
        + (1 + mtp) * hidden * vocabulary
    )
    return FORWARD_AND_BACKWARD * MULTIPLY_ADD * multiplications


def miscounted(args: Arguments) -> tuple[str, ...]:
    """Differences between Megatron's count, which this model follows, and what the GPUs compute."""
    found = []
    if args.get("quick_geglu") and not args.get("swiglu"):
        found.append(
            "Megatron leaves the gate of a quick GEGLU MLP out of its FLOPs: TFLOP/s and MFU are too low by it"
        )
    if args.get("window_size"):
        found.append("Megatron counts sliding-window attention as full: TFLOP/s and MFU are too high by the difference")
    if "mamba" in layer_kinds(args) and mamba_mixer(args).inner != 2 * (whole(args, "hidden_size") or 0):
        found.append(
            "Megatron counts Mamba layers as twice as wide as the hidden size, which these are not: TFLOP/s and MFU "
            "are off by the difference"
        )
    return tuple(found)


def is_counted(args: Arguments) -> bool:
    """Whether the model is of a kind that is counted here: not one of linear attention."""
    return why_not_counted(args) is None


def why_not_counted(args: Arguments) -> str | None:
    """Why a kind of model is not counted, as a clause; None for one that is."""
    if args.get("is_hybrid_model") or hybrid_pattern(args) is not None:
        hybrid = hybrid_layers(args)
        if hybrid is None or not hybrid.decoder:
            return "the hybrid model has no layer pattern that Megatron accepts"
        if others := sorted(set(hybrid.decoder + hybrid.mtp) - set(HYBRID_COUNTED)):
            return f"hybrid models with layers of kind {', '.join(others)} are not modelled, only {HYBRID_COUNTED}"
    if args.get("experimental_attention_variant") in ("gated_delta_net", "kimi_delta_attention"):
        return "models with linear attention are not modelled"
    return None


def _hybrid(
    args: Arguments, hybrid: HybridLayers, hidden: int, seq_length: int, attention: tuple[float, float] | None
) -> float:
    """Multiply-adds per token of all layers of a hybrid model, those of every MTP depth included.

    Unlike that of transformers, this count of Megatron's has no projection of MTP.
    """
    linear, core = attention or (0, 0)
    mamba, inner = mamba_mixer(args), 2 * hidden
    dense, routed = _mlp_layer(args, hidden), _expert_layer(args, hidden)
    each = {
        "*": linear + core * seq_length,
        "-": dense,
        "E": routed,
        "M": hidden * (3 * inner + 2 * mamba.groups * mamba.state + mamba.heads) + 3.5 * inner * mamba.state,
    }
    return sum(each[symbol] for symbol in hybrid.decoder + hybrid.mtp * hybrid.depths)


def _attention(args: Arguments) -> tuple[float, float] | None:
    """Multiply-adds of one layer per token: those of the projections, and those per key, for a causal mask."""
    hidden, heads = whole(args, "hidden_size"), whole(args, "num_attention_heads")
    if not hidden or not heads:
        return None
    latent = latent_attention(args)
    if latent is not None:
        return _latent_attention(latent, hidden, heads)
    channels = head_width(args)
    query, key = heads * channels, query_groups(args) * channels
    outputs = 2 * query + 2 * key
    if args.get("attention_output_gate"):
        outputs += query
    # Scores and weighted values each take `query` per key, over half of the keys.
    return hidden * outputs, query


def _latent_attention(latent: Latent, hidden: int, heads: int) -> tuple[float, float]:
    """Multi-latent attention. The +1 are the norms of the latents."""
    query = heads * (latent.head + latent.rope)
    rank = latent.query_rank
    q_projection = hidden * query
    if rank is not None:
        q_projection = rank * (hidden + query + 1)
    kv_projection = latent.kv_rank * (hidden + heads * (latent.head + latent.value) + 1) + hidden * latent.rope
    return q_projection + kv_projection + heads * latent.value * hidden, (query + heads * latent.value) / 2


def _mlp(args: Arguments) -> float | None:
    """Multiply-adds per token of all MLPs, those of MTP layers included: these are of the last layer's kind."""
    hidden, layers = whole(args, "hidden_size"), whole(args, "num_layers")
    if not hidden or not layers:
        return None
    mtp = whole(args, "mtp_num_layers") or 0
    dense = _mlp_layer(args, hidden)
    if not whole(args, "num_experts"):
        return (layers + mtp) * dense
    moe = expert_layers(args, layers)
    if moe is None:
        return None
    moe_layers = sum(moe) + mtp * moe[-1]
    return (layers + mtp - moe_layers) * dense + moe_layers * _expert_layer(args, hidden)


def _matrices(args: Arguments) -> int:
    return 3 if args.get("swiglu") else 2


def _mlp_layer(args: Arguments, hidden: int) -> int:
    return hidden * ffn_width(args) * _matrices(args)


def _expert_layer(args: Arguments, hidden: int) -> int:
    """Multiply-adds per token of the routed experts that it visits, of their latent projections, and of the shared."""
    matrices = _matrices(args)
    experts = (whole(args, "moe_router_topk") or 2) * expert_width(args) * matrices
    latent = whole(args, "moe_latent_size")
    routed = hidden * experts
    if latent is not None:
        routed = latent * experts + 2 * latent * hidden
    shared = hidden * (whole(args, "moe_shared_expert_intermediate_size") or 0) * matrices
    return routed + shared

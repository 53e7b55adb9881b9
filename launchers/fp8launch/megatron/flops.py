"""Floating-point operations of training, from Megatron's argument values: dense, MoE, MLA and MTP models.

Counts model FLOPs as Megatron's own throughput field does (verified against megatron-core 0.17 to 0.19), so numbers
compare: multiplications and additions of all matrix products, forward and twice backward; causal attention as the
half that is not masked; top-k experts only; no recompute, embedding look-up, norms, softmax, optimizer or FP8
padding. With t tokens, hidden size h, L layers and sequence length s:

    6 t [ L (2 h q + 2 h kv + q s) + L_dense n f h + L_moe n (k f_e + f_s) h + h V ]

where q and kv are the widths of the query and of one of key and value, n is 3 with SwiGLU else 2, V the padded
vocabulary. Two things are counted as Megatron counts them although the GPU does otherwise: an MLP gated by quick
GEGLU as if it had two matrices, and sliding-window attention as full (`miscounted` tells). Hybrid (Mamba) and
linear-attention models are not counted: None.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping

FORWARD_AND_BACKWARD = 3
MULTIPLY_ADD = 2
# No model has more; a pattern may not fill memory.
MOST_LAYERS = 100_000

Arguments = Mapping[str, object]


def flops_per_batch(args: Arguments, global_batch_size: float) -> float | None:
    """FLOPs of one optimizer step over `global_batch_size` full sequences; None where `flops_per_token` is."""
    per_token = flops_per_token(args)
    seq_length = _int(args, "seq_length")
    return None if per_token is None or seq_length is None else per_token * seq_length * global_batch_size


def flops_per_token(args: Arguments) -> float | None:
    """FLOPs per token at the arguments' sequence length.

    `args` has Megatron's names, as in its dump or as flags with underscores; what is missing has Megatron's
    default. None if a needed size is missing, or for models that are not counted here.
    """
    hidden, layers, seq_length = (_int(args, n) for n in ("hidden_size", "num_layers", "seq_length"))
    vocabulary = padded_vocab_size(args)
    attention = _attention(args)
    mlp = _mlp(args)
    if not (hidden and layers and seq_length and vocabulary) or attention is None or mlp is None or _not_counted(args):
        return None
    mtp = _int(args, "mtp_num_layers") or 0
    linear, core = attention
    multiplications = (
        (layers + mtp) * (linear + core * seq_length)
        + mlp
        + mtp * (3 * hidden + 2 * hidden * hidden)
        + (1 + mtp) * hidden * vocabulary
    )
    return FORWARD_AND_BACKWARD * MULTIPLY_ADD * multiplications


def miscounted(args: Arguments) -> tuple[str, ...]:
    """Where Megatron's count, which this model follows, is not what the GPUs do."""
    found = []
    if args.get("quick_geglu") and not args.get("swiglu"):
        found.append(
            "Megatron leaves the gate of a quick GEGLU MLP out of its FLOPs: TFLOP/s and MFU are too low by it"
        )
    if args.get("window_size"):
        found.append("Megatron counts sliding-window attention as full: TFLOP/s and MFU are too high by the difference")
    return tuple(found)


def padded_vocab_size(args: Arguments) -> int | None:
    """The vocabulary that the output layer computes: rounded up to a multiple of make_vocab_size_divisible_by x TP."""
    padded, size = _int(args, "padded_vocab_size"), _int(args, "vocab_size")
    if padded or not size:
        return padded
    multiple = (_int(args, "make_vocab_size_divisible_by") or 128) * (_int(args, "tensor_model_parallel_size") or 1)
    return -(-size // multiple) * multiple


def _not_counted(args: Arguments) -> bool:
    return bool(
        args.get("is_hybrid_model")
        or args.get("hybrid_layer_pattern")
        or args.get("hybrid_override_pattern")
        or args.get("experimental_attention_variant") in ("gated_delta_net", "kimi_delta_attention")
    )


def _attention(args: Arguments) -> tuple[float, float] | None:
    """Multiply-adds of one layer per token: those of the projections, and those per key, for a causal mask."""
    hidden, heads = _int(args, "hidden_size"), _int(args, "num_attention_heads")
    if not hidden or not heads:
        return None
    if args.get("multi_latent_attention"):
        return _latent_attention(args, hidden, heads)
    channels = _int(args, "kv_channels") or hidden // heads
    grouped = args.get("group_query_attention", "num_query_groups" in args)
    groups = (_int(args, "num_query_groups") or 1) if grouped else heads
    query, key = heads * channels, groups * channels
    gate = query if args.get("attention_output_gate") else 0
    # Scores and weighted values each take `query` per key, over half of the keys.
    return hidden * (2 * query + 2 * key + gate), query


def _latent_attention(args: Arguments, hidden: int, heads: int) -> tuple[float, float]:
    """Multi-latent attention; defaults are Megatron's. The +1 are the norms of the latents."""
    kv_rank = _int(args, "kv_lora_rank") or 32
    head, value = _int(args, "qk_head_dim") or 128, _int(args, "v_head_dim") or 128
    rope = _int(args, "qk_pos_emb_head_dim") or 64
    q_rank = _int(args, "q_lora_rank")
    query = heads * (head + rope)
    q_projection = hidden * query if q_rank is None else q_rank * (hidden + query + 1)
    kv_projection = kv_rank * (hidden + heads * (head + value) + 1) + hidden * rope
    return q_projection + kv_projection + heads * value * hidden, (query + heads * value) / 2


def _mlp(args: Arguments) -> float | None:
    """Multiply-adds per token of all MLPs, those of MTP layers included: these are of the last layer's kind."""
    hidden, layers = _int(args, "hidden_size"), _int(args, "num_layers")
    if not hidden or not layers:
        return None
    matrices = 3 if args.get("swiglu") else 2
    # Megatron's default width with SwiGLU is two thirds of 4 h, in steps of 64.
    ffn = _int(args, "ffn_hidden_size") or (int(4 * hidden * 2 / 3) // 64 * 64 if args.get("swiglu") else 4 * hidden)
    moe = _moe_layers(args, layers)
    if moe is None:
        return None
    mtp = _int(args, "mtp_num_layers") or 0
    moe_layers = moe[0] + mtp * moe[1]
    dense_layers = layers + mtp - moe_layers
    experts = (_int(args, "moe_router_topk") or 2) * (_int(args, "moe_ffn_hidden_size") or ffn) * matrices
    latent = _int(args, "moe_latent_size")
    routed = hidden * experts if latent is None else latent * experts + 2 * latent * hidden
    shared = hidden * (_int(args, "moe_shared_expert_intermediate_size") or 0) * matrices
    return dense_layers * hidden * ffn * matrices + moe_layers * (routed + shared)


def _moe_layers(args: Arguments, layers: int) -> tuple[int, bool] | None:
    """How many layers are MoE, and if the last one is. The frequency: a number, a list or text like `[0]*3+[1]*58`."""
    if not _int(args, "num_experts"):
        return 0, False
    frequency = args.get("moe_layer_freq", 1)
    if isinstance(frequency, str):
        frequency = pattern_value(frequency)
    if isinstance(frequency, int) and frequency > 0:
        return -(-layers // frequency), (layers - 1) % frequency == 0
    if isinstance(frequency, list) and len(frequency) == layers:
        return sum(map(bool, frequency)), bool(frequency[-1])
    return None


def pattern_value(text: str) -> object:
    """Integers, lists, + and * of them, as Megatron evaluates them; anything else gives None."""

    def value(node: ast.expr) -> object:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        if isinstance(node, ast.List):
            return [value(x) for x in node.elts]
        if isinstance(node, ast.BinOp):
            left, right = value(node.left), value(node.right)
            if isinstance(node.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
                return left + right
            if isinstance(node.op, ast.Mult) and isinstance(left, list) and isinstance(right, int):
                return left * right if len(left) * right <= MOST_LAYERS else None
        return None

    try:
        return value(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _int(args: Arguments, name: str) -> int | None:
    value = args.get(name)
    if isinstance(value, str) and value.strip().isdecimal() and len(value) < 16:
        value = int(value)
    # A log may say anything; a size beyond this would overflow floating point and is none.
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 10**15 else None

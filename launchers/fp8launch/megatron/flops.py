"""Floating-point operations of training, from Megatron's argument values: dense, MoE, MLA, MTP and hybrid models.

Counts model FLOPs like Megatron's throughput field (verified against megatron-core 0.17 to 0.19), so that numbers can
be compared: multiplications and additions of all matrix products, forward and twice backward; causal attention as the
unmasked half; top-k experts only; no recompute, embedding look-up, norms, softmax, optimizer or FP8 padding. With t
tokens, hidden size h, L layers and sequence length s:

    6 t [ L (2 h q + 2 h kv + q s) + L_dense n f h + L_moe n (k f_e + f_s) h + h V ]

where q and kv are the widths of the query and of one of key and value, n is 3 with SwiGLU else 2, V the padded
vocabulary. A Mamba layer of width d, state n, g groups and H heads has h (3 d + 2 g n + H) + 3.5 d n in place of
attention's terms. Three things follow Megatron's count although the GPU computes something else: an MLP gated by quick
GEGLU counts as two matrices, sliding-window attention as full, and d as 2 h whatever the heads (see `miscounted`).
Models with linear attention are not counted.
"""

from __future__ import annotations

from fp8launch.megatron.architecture import ATTENTION, EXPERTS, MAMBA, MLP, Architecture, architecture
from fp8launch.megatron.model_arithmetic import Arguments, Latent, hybrid_pattern, layer_kinds, mamba_mixer, whole

FORWARD_AND_BACKWARD = 3
MULTIPLY_ADD = 2


def flops_per_token(args: Arguments) -> float | None:
    """Return FLOPs per token at the arguments' sequence length.

    `args` has Megatron's names, as in its dump or as flags with underscores; a missing argument has Megatron's default.
    Return None if a size is missing, or for models that are not counted.
    """
    model = architecture(args)
    if model is None:
        return None
    return flops_of(model, args)


def flops_of(model: Architecture, args: Arguments) -> float:
    """Return FLOPs per token of a model that was built from the arguments."""
    # Megatron counts two matrices for an MLP gated by quick GEGLU.
    parts = _multiply_adds(model, matrices=3 if args.get("swiglu") else 2)
    decoder = sum(parts[part] for kind in model.kinds for part in kind)
    mtp = sum(parts[part] for kind in model.mtp_kinds for part in kind)
    if hybrid_pattern(args) is None:
        # The projection of MTP, which Megatron does not count in a hybrid model.
        mtp += 3 * model.hidden + 2 * model.hidden * model.hidden
    logits = (1 + model.mtp) * model.hidden * model.vocab
    return FORWARD_AND_BACKWARD * MULTIPLY_ADD * (decoder + model.mtp * mtp + logits)


def miscounted(args: Arguments) -> tuple[str, ...]:
    """Describe the differences between Megatron's count, which this one follows, and what the GPUs compute."""
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


def _multiply_adds(model: Architecture, matrices: int) -> dict[str, float]:
    """Return multiply-adds per token of each part of a layer, at the model's sequence length."""
    hidden, experts, mamba = model.hidden, model.experts, model.mamba
    found: dict[str, float] = {MLP: hidden * model.ffn * matrices}
    if model.latent is not None:
        found[ATTENTION] = _latent_attention(model.latent, hidden, model.heads, model.seq_length)
    else:
        query, key = model.heads * model.channels, model.groups * model.channels
        outputs = (2 + model.output_gate) * query + 2 * key
        # Scores and weighted values each need `query` multiply-adds per key, over half of the keys.
        found[ATTENTION] = hidden * outputs + query * model.seq_length
    if experts is not None:
        routed = experts.top_k * experts.ffn * matrices
        if experts.latent is None:
            found[EXPERTS] = hidden * routed
        else:
            found[EXPERTS] = experts.latent * routed + 2 * experts.latent * hidden
        found[EXPERTS] += hidden * experts.shared * matrices
    if mamba is not None:
        inner = 2 * hidden
        found[MAMBA] = hidden * (3 * inner + 2 * mamba.groups * mamba.state + mamba.heads) + 3.5 * inner * mamba.state
    return found


def _latent_attention(latent: Latent, hidden: int, heads: int, seq_length: int) -> float:
    """Return multiply-adds per token of multi-latent attention. The +1 are the norms of the latents."""
    query = heads * (latent.head + latent.rope)
    rank = latent.query_rank
    q_projection = hidden * query
    if rank is not None:
        q_projection = rank * (hidden + query + 1)
    kv_projection = latent.kv_rank * (hidden + heads * (latent.head + latent.value) + 1) + hidden * latent.rope
    core = (query + heads * latent.value) / 2
    return q_projection + kv_projection + heads * latent.value * hidden + core * seq_length

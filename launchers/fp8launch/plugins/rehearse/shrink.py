"""Shrink sizes until a login node can compute with them, and keep the structure.

The world and every parallel size stay, and so do layer patterns, heads and head sizes. Widths, vocabulary and sequence
length shrink to the smallest size that has the same remainder for every number by which Megatron or Transformer Engine
divides them. A size that divides evenly still does, and a size that does not still does not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fp8launch.engines.base import Layout
from fp8launch.megatron.arguments import FlagValue
from fp8launch.megatron.model_arithmetic import hybrid_layers, layer_count, layer_kinds, mamba_mixer

Put = Callable[[str, int], None]

# The largest number of values that share a scale, or that an FP8 GEMM requires its sizes to be a multiple of.
BLOCK = 128
# Megatron does not use some of its state before the second iteration.
ITERATIONS = 2
# Flags that make every n-th layer a different kind, or list the kind of each layer.
FREQUENCIES = ("moe_layer_freq", "linear_attention_freq", "window_attn_skip_freq", "no_rope_freq")
# Flags that depend on the number of layers. If one is set, the number stays.
PATTERNED = (
    "pipeline_model_parallel_layout", "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers",
    "heterogeneous_layers_config_path", "fine_grained_activation_offloading",
)  # fmt: skip
PATTERNS = ("hybrid_layer_pattern", "hybrid_override_pattern")
# The numbers of layers per chunk that are recomputed or offloaded.
PARTS = ("recompute_num_layers", "cpu_offloading_num_layers")
# The smallest tensor that Megatron offloads by default, in elements.
OFFLOADED = 1024 * 1024
# The numbers of layers at either end that stay in bf16.
ENDS = ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")
# Widths of latent attention.
LATENT = ("q_lora_rank", "kv_lora_rank")
# Latent and linear attention have many heads: this many remain on a rank.
HEADS = 16
WIDTHS = (
    "hidden_size", "ffn_hidden_size", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size", "moe_latent_size",
    *LATENT, "vocab_size", "padded_vocab_size",
)  # fmt: skip
# Without these flags, nothing is read or written outside the process, and nothing outlives the step.
DROPPED = (
    "data_path", "data_args_path", "per_split_data_args_path", "train_data_path", "valid_data_path", "test_data_path",
    "data_cache_path", "save", "load", "save_interval", "pretrained_checkpoint", "finetune", "ckpt_step",
    "no_load_optim", "no_load_rng", "tensorboard_dir", "wandb_project", "wandb_exp_name", "wandb_save_dir",
    "tokenizer_model", "vocab_file", "merge_file", "exit_signal_handler", "exit_interval", "exit_duration_in_mins",
    "profile", "log_energy", "train_samples", "lr_decay_samples", "lr_warmup_samples", "rampup_batch_size",
    "lr_warmup_fraction", "lr_decay_iters", "lr_wsd_decay_iters", "async_save", "non_persistent_save_interval",
    "split", "check_weight_hash_across_dp_replicas_interval", "check_for_large_grads", "check_for_spiky_loss",
)  # fmt: skip


@dataclass(frozen=True)
class Shrunk:
    """The flag values of a rehearsal, and each changed size: flag to (real, rehearsed)."""

    values: dict[str, FlagValue]
    sizes: dict[str, tuple[int, int]]


def shrink(values: Mapping[str, FlagValue], layout: Layout, scale: int = 1) -> Shrunk:
    """Return the flags of a short, small run with the same structure. Sizes grow with `scale`; remainders stay."""
    small = {name: value for name, value in values.items() if name not in DROPPED}
    sizes: dict[str, tuple[int, int]] = {}

    def put(flag: str, size: int) -> None:
        real = values.get(flag)
        if isinstance(real, int) and not isinstance(real, bool) and real != size:
            sizes[flag] = (real, size)
        small[flag] = size

    block = BLOCK * scale
    tensor = block * layout.tp
    hidden = _whole(values, "hidden_size")
    heads = _number(values, "num_attention_heads")
    if hidden is not None:
        if "kv_channels" not in values and heads:
            small["kv_channels"] = hidden // heads
        if "ffn_hidden_size" not in values:
            small["ffn_hidden_size"] = residue(4 * hidden, tensor)
    for flag in WIDTHS:
        width = _whole(values, flag)
        if width is not None:
            put(flag, residue(width, tensor))
    dense, expert = _whole(values, "ffn_hidden_size"), _whole(values, "moe_ffn_hidden_size")
    if dense and expert and dense != expert and small["ffn_hidden_size"] == small["moe_ffn_hidden_size"]:
        # Keep the widths different: Megatron then builds the experts from a copied configuration.
        put("ffn_hidden_size", residue(dense, tensor) + tensor)
    small.setdefault("vocab_size", 8 * BLOCK)
    kept = HEADS * scale * layout.tp * layout.cp
    if values.get("multi_latent_attention") and heads and heads % kept == 0:
        put("num_attention_heads", kept)
        if _whole(values, "num_query_groups") == heads:
            put("num_query_groups", kept)
    if values.get("experimental_attention_variant") == "gated_delta_net":
        _linear_heads(values, kept, put)
    _sequence(values, layout, block, put)
    _layers(values, layout, put)
    small |= _hybrid(values, layout, put)
    _experts(values, layout, put)
    microbatches = layout.pp
    if layout.pp == 1:
        microbatches = min(layout.microbatches, 2)
    put("global_batch_size", layout.dp * layout.micro_batch * microbatches)
    put("train_iters", ITERATIONS)
    if values.get("cuda_graph_impl") not in (None, "none"):
        # The second iteration captures, and the third replays.
        put("train_iters", ITERATIONS + 1)
        small["cuda_graph_warmup_steps"] = 1
    if values.get("fine_grained_activation_offloading"):
        _offloads(values, layout, put)
    if values.get("lr_decay_style") == "WSD":
        small["lr_wsd_decay_iters"] = 1
    if _whole(values, "num_experts"):
        # An untrained model may route its few tokens to the same experts and leave none for a rank.
        small["moe_router_force_load_balancing"] = True
    small |= {
        "mock_data": True, "tokenizer_type": "NullTokenizer", "num_workers": 0, "eval_iters": 0, "log_interval": 1,
        "lr_warmup_iters": 0, "eval_interval": 1000,
        # Stand-ins for kernels return noise, so a NaN means nothing.
        "no_check_for_nan_in_loss_and_grad": True,
    }  # fmt: skip
    return Shrunk(small, sizes)


def residue(real: int, unit: int) -> int:
    """Return the smallest size of at least `unit` with the same remainder by `unit`, but at most `real`."""
    return min(real, unit + real % unit)


def _offloads(values: Mapping[str, FlagValue], layout: Layout, put: Put) -> None:
    """Offload all tensors if the real run offloads tensors of the hidden state's size, which most tensors have."""
    least = _number(values, "min_offloaded_tensor_size") or OFFLOADED
    hidden = _number(values, "seq_length") * layout.micro_batch * _number(values, "hidden_size") // layout.cp
    if values.get("sequence_parallel"):
        hidden //= layout.tp
    if hidden >= least:
        put("min_offloaded_tensor_size", 1)


def _sequence(values: Mapping[str, FlagValue], layout: Layout, block: int, put: Put) -> None:
    sequence = _whole(values, "seq_length")
    if sequence is None:
        return
    # Context parallelism gives each rank two chunks. The sequence stays that short, because a stage keeps all its micro
    # batches.
    chunks = 1
    if layout.cp > 1:
        chunks = 2 * layout.cp
    small = residue(sequence, block * layout.tp * chunks)
    put("seq_length", small)
    positions = _whole(values, "max_position_embeddings")
    if positions is not None:
        put("max_position_embeddings", max(small, min(positions, small)))


def _layers(values: Mapping[str, FlagValue], layout: Layout, put: Put) -> None:
    layers = _whole(values, "num_layers")
    if layers is None or any(map(values.get, (*PATTERNED, *PATTERNS))):
        return
    frequencies = list(filter(values.get, FREQUENCIES))
    if any(_whole(values, flag) is None for flag in frequencies):
        return
    some = [flag for flag in PARTS if _number(values, flag) > 1]
    chunks = layout.pp * max(layout.vp, 1)
    usual = layers // chunks
    # Keep one ordinary layer in addition to the layers that differ.
    differ = max(sum(_number(values, flag) for flag in ENDS), bool(some))
    fewest = [differ + 1, *(_number(values, flag) for flag in frequencies)]
    if layout.vp <= 1:
        fewest.append(2)
    chunk = min(usual, max(fewest)) or 1
    kept = chunks * chunk
    # An embedding or a loss that counts as a layer takes the place of one.
    for flag in ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"):
        kept -= bool(values.get(flag))
    # Megatron requires more layers than it offloads.
    if kept <= min(_number(values, "cpu_offloading_num_layers"), max(chunk - 1, 1)):
        kept += chunks * chunk
    if (layers - min(layers, kept)) % (_whole(values, "no_rope_freq") or 1):
        return  # Megatron requires whole periods.
    if _whole(values, "num_layers_per_virtual_pipeline_stage"):
        put("num_layers_per_virtual_pipeline_stage", chunk)
    put("num_layers", min(layers, kept))
    for flag in some:
        if _number(values, flag) >= usual:
            put(flag, chunk)
        else:
            put(flag, min(_number(values, flag), chunk - 1))


def _hybrid_chunks(values: Mapping[str, FlagValue], layout: Layout) -> list[str] | None:
    """Return the layers of each pipeline chunk of a hybrid, or None for other models and hybrids that stay whole."""
    layers = hybrid_layers(values)
    # In a hybrid, offloading of activations works with any number of layers.
    stated = set(filter(values.get, PATTERNED)) - {"fine_grained_activation_offloading"}
    if layers is None or stated or any(_number(values, flag) > 1 for flag in PARTS):
        return None
    if len(layers.segments) > 1:
        return list(layers.segments)
    # Without separators, Megatron divides the layers evenly.
    size, rest = divmod(len(layers.decoder), layout.pp)
    if rest:
        return None
    return [layers.decoder[size * stage : size * (stage + 1)] for stage in range(layout.pp)]


def _fewer_layers(values: Mapping[str, FlagValue], chunks: Sequence[str]) -> dict[str, FlagValue]:
    """Return a hybrid's pattern in which each chunk keeps its ends, and one layer of each kind between them."""
    first, last = (max(_number(values, flag), 1) for flag in ENDS)
    kept = []
    for chunk in chunks:
        inner = chunk[first : max(len(chunk) - last, 0)]
        kept.append(chunk[:first] + "".join(dict.fromkeys(inner)) + chunk[first + len(inner) :])
    patterns = ["|".join(kept)]
    layers = hybrid_layers(values)
    if layers:
        patterns += [layers.mtp] * layers.depths
    older = dict.fromkeys({"hybrid_override_pattern", "mtp_hybrid_override_pattern"} & values.keys())
    return {**older, "hybrid_layer_pattern": "/".join(patterns)}


def _hybrid(values: Mapping[str, FlagValue], layout: Layout, put: Put) -> dict[str, FlagValue]:
    """Keep one layer of each kind between the ends of each chunk, and as many Mamba heads as the real run has."""
    found: dict[str, FlagValue] = {}
    hidden = _whole(values, "hidden_size")
    if "mamba" in layer_kinds(values) and not _whole(values, "mamba_num_heads") and hidden is not None:
        found["mamba_num_heads"] = mamba_mixer(values).heads
    chunks = _hybrid_chunks(values, layout)
    if chunks is None:
        return found
    found |= _fewer_layers(values, chunks)
    put("num_layers", layer_count(found) or 0)
    return found


def _linear_heads(values: Mapping[str, FlagValue], unit: int, put: Put) -> None:
    """Reduce linear attention's heads at the same ratio of values to keys. Unset flags have Megatron's defaults."""
    value_heads = _whole(values, "linear_num_value_heads") or 32
    key_heads = _whole(values, "linear_num_key_heads") or 16
    kept = residue(value_heads, unit)
    if value_heads % kept == 0 and key_heads * kept % value_heads == 0:
        put("linear_num_value_heads", kept)
        put("linear_num_key_heads", key_heads * kept // value_heads)


def _experts(values: Mapping[str, FlagValue], layout: Layout, put: Put) -> None:
    experts = _whole(values, "num_experts")
    if not experts or values.get("moe_router_num_groups") or experts % layout.ep:
        return
    chosen = _whole(values, "moe_router_topk") or 2
    local = experts // layout.ep
    # Keep enough experts that the capacity of each is no more than all tokens, as in the real run.
    factor = values.get("moe_expert_capacity_factor")
    if not isinstance(factor, (int, float)):
        factor = 1
    if values.get("moe_router_load_balancing_type") == "quantile_balancing":
        factor = max(factor, 2)  # It compares a token's last chosen expert with the next one.
    needed = math.ceil(chosen * max(factor, 1) / layout.ep)
    put("num_experts", layout.ep * min(local, max(needed, 2)))


def _whole(values: Mapping[str, FlagValue], flag: str) -> int | None:
    value = values.get(flag)
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    return None


def _number(values: Mapping[str, FlagValue], flag: str) -> int:
    """Return the whole number of a flag, or 0 if it is not set."""
    return _whole(values, flag) or 0

"""Sizes of a model that follow from Megatron's arguments, each computed in one place.

Parameter counts, FLOPs, the memory estimate and the rules of `check` all use them. Arguments are keyed by Megatron's
attribute name (dest), as in its dump; a missing argument has Megatron's default.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass

Arguments = Mapping[str, object]

# A deeper model or a longer pipeline layout is a typing mistake, and would exhaust the memory of the login node.
MOST_LAYERS = 4096
LONGEST_LAYOUT = 100_000

# Symbols of a hybrid layer pattern: megatron/core/models/hybrid/hybrid_layer_allocation.py (0.19), core/ssm before.
_HYBRID_LAYERS = {
    "M": "mamba",
    "G": "gated delta net",
    "*": "attention",
    "D": "attention",
    "+": "latent attention",
    "-": "mlp",
    "E": "experts",
}


# The symbols for which parameters, FLOPs, memory and time can be computed.
HYBRID_COUNTED = "M*-E"
# Taps of a Mamba layer's convolution (mamba_mixer.py, d_conv).
CONVOLUTION = 4
# Separators in a pattern: between pipeline segments, and before the layers of each MTP depth.
_SEGMENT, _DEPTH = "|", "/"


@dataclass(frozen=True)
class HybridLayers:
    """A hybrid layer pattern: layers of each pipeline segment, layers of one MTP depth, and the number of depths."""

    segments: tuple[str, ...]
    mtp: str
    depths: int

    @property
    def decoder(self) -> str:
        return "".join(self.segments)


@dataclass(frozen=True)
class Mamba:
    """Sizes of a Mamba-2 mixer: heads and their width, groups that share B and C, the state per channel, and the
    tokens that one step of the scan takes together."""

    heads: int
    head: int
    groups: int
    state: int
    chunk: int

    @property
    def inner(self) -> int:
        """Channels of x, and of the gate z."""
        return self.heads * self.head

    @property
    def convolved(self) -> int:
        """Channels of x, B and C."""
        return self.inner + 2 * self.groups * self.state

    @property
    def projected(self) -> int:
        """Outputs of the input projection: z, x, B, C and dt."""
        return self.inner + self.convolved + self.heads


@dataclass(frozen=True)
class Latent:
    """Multi-latent attention: ranks of the compressed query (None: not compressed) and key-value, widths per head."""

    query_rank: int | None
    kv_rank: int
    head: int
    rope: int
    value: int


def whole(args: Arguments, name: str) -> int | None:
    """Return an argument that is a whole number from 0 to 10^15; None for anything else."""
    value = args.get(name)
    # A search for layouts calls this millions of times, mostly for a number or None.
    if value is None or (type(value) is int and 0 <= value < 10**15):
        return value
    if isinstance(value, str) and value.strip().isdecimal() and len(value) < 16:
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    # A log may contain any number, and larger sizes would overflow floating point.
    if 0 <= value < 10**15:
        return value
    return None


# --- widths ----------------------------------------------------------------------------------------------------------


def ffn_width(args: Arguments) -> int:
    """Return the width of dense MLPs. Default (validate_args): 4 h; with SwiGLU two thirds of that, in steps of 64."""
    stated = whole(args, "ffn_hidden_size")
    if stated:
        return stated
    hidden = whole(args, "hidden_size") or 0
    if args.get("swiglu"):
        return int(4 * hidden * 2 / 3) // 64 * 64
    return 4 * hidden


def expert_width(args: Arguments) -> int:
    """Return the width of a routed expert; by default the width of dense MLPs."""
    return whole(args, "moe_ffn_hidden_size") or ffn_width(args)


def query_groups(args: Arguments) -> int:
    """Return the number of key and value heads. Megatron ignores `num_query_groups` without grouped-query attention."""
    if args.get("group_query_attention", "num_query_groups" in args):
        return whole(args, "num_query_groups") or 1
    return whole(args, "num_attention_heads") or 0


def head_width(args: Arguments) -> int:
    """Return the channels of one attention head; 0 if they cannot be determined."""
    stated, heads = whole(args, "kv_channels"), whole(args, "num_attention_heads")
    if stated or not heads:
        return stated or 0
    return (whole(args, "hidden_size") or 0) // heads


def latent_attention(args: Arguments) -> Latent | None:
    """Return the sizes of multi-latent attention; None for a model without it."""
    if not args.get("multi_latent_attention"):
        return None
    return Latent(
        query_rank=whole(args, "q_lora_rank"),
        kv_rank=whole(args, "kv_lora_rank") or 32,
        head=whole(args, "qk_head_dim") or 128,
        rope=whole(args, "qk_pos_emb_head_dim") or 64,
        value=whole(args, "v_head_dim") or 128,
    )


def padded_vocab_size(args: Arguments) -> int | None:
    """Return the padded vocabulary: rounded up to a multiple of make_vocab_size_divisible_by x TP."""
    padded, size = whole(args, "padded_vocab_size"), whole(args, "vocab_size")
    if padded or not size:
        return padded
    multiple = (whole(args, "make_vocab_size_divisible_by") or 128) * (whole(args, "tensor_model_parallel_size") or 1)
    return -(-size // multiple) * multiple


# --- kinds of layers -------------------------------------------------------------------------------------------------


def hybrid_pattern(args: Arguments) -> str | None:
    """Return the layer pattern of a hybrid model; None for a transformer."""
    for name in ("hybrid_layer_pattern", "hybrid_override_pattern"):
        pattern = args.get(name)
        if isinstance(pattern, str) and pattern:
            return pattern
    return None


def hybrid_layers(args: Arguments) -> HybridLayers | None:
    """Return the layers of a hybrid model; None for a transformer, and for a pattern that Megatron refuses.

    The layers of MTP are part of the pattern, or are stated in `mtp_hybrid_override_pattern`.
    """
    pattern = hybrid_pattern(args)
    if pattern is None or len(pattern) > MOST_LAYERS:
        return None
    decoder, *depths = pattern.split(_DEPTH)
    mtp_pattern = args.get("mtp_hybrid_override_pattern")
    if not any(depths):
        depths = []
        if isinstance(mtp_pattern, str) and mtp_pattern:
            depths = [mtp_pattern] * (whole(args, "mtp_num_layers") or 0)
    symbols = decoder.replace(_SEGMENT, "") + "".join(depths)
    if len(set(depths)) > 1 or not set(symbols) <= set(_HYBRID_LAYERS):
        return None
    return HybridLayers(tuple(decoder.split(_SEGMENT)), next(iter(depths), ""), len(depths))


def layer_count(args: Arguments) -> int | None:
    """Return the number of decoder layers. In a hybrid model the pattern replaces `num_layers`."""
    hybrid = hybrid_layers(args)
    if hybrid is None:
        return whole(args, "num_layers")
    return len(hybrid.decoder)


def mamba_mixer(args: Arguments) -> Mamba:
    """Return the sizes of Mamba layers (mamba_mixer.py). By default they are twice as wide as the hidden size."""
    head = whole(args, "mamba_head_dim") or 64
    heads = whole(args, "mamba_num_heads") or 2 * (whole(args, "hidden_size") or 0) // head
    groups, state = whole(args, "mamba_num_groups") or 8, whole(args, "mamba_state_dim") or 128
    return Mamba(heads, head, groups, state, whole(args, "mamba_chunk_size") or 128)


def layer_kinds(args: Arguments) -> frozenset[str]:
    """Return the kinds of layers in a model: attention, latent attention, mlp, experts, mamba, gated delta net."""
    pattern = hybrid_pattern(args)
    if pattern is not None:
        return frozenset(_HYBRID_LAYERS[symbol] for symbol in pattern if symbol in _HYBRID_LAYERS)
    kinds = {"latent attention" if args.get("multi_latent_attention") else "attention"}
    moe = expert_layers(args, whole(args, "num_layers") or 0)
    if whole(args, "num_experts"):
        kinds.add("experts")
    if moe is None or not all(moe) or "experts" not in kinds:
        kinds.add("mlp")
    return frozenset(kinds)


def why_not_counted(args: Arguments) -> str | None:
    """Return a clause that says why a model is not counted; None if it is counted."""
    if args.get("is_hybrid_model") or hybrid_pattern(args) is not None:
        hybrid = hybrid_layers(args)
        if hybrid is None or not hybrid.decoder:
            return "the hybrid model has no layer pattern that Megatron accepts"
        if others := sorted(set(hybrid.decoder + hybrid.mtp) - set(HYBRID_COUNTED)):
            return f"hybrid models with layers of kind {', '.join(others)} are not modelled, only {HYBRID_COUNTED}"
    if args.get("experimental_attention_variant") in ("gated_delta_net", "kimi_delta_attention", "dsa"):
        return "models with linear or sparse attention are not modelled"
    return None


def expert_layers(args: Arguments, layers: int) -> tuple[bool, ...] | None:
    """Return which layers have experts: every n-th layer if the frequency is a number n, else as its list says.

    None for any other frequency, a list of another length, and more than MOST_LAYERS layers.
    """
    if layers > MOST_LAYERS:
        return None
    if not whole(args, "num_experts"):
        return (False,) * layers
    stated = args.get("moe_layer_freq", 1)
    if isinstance(stated, str):
        return _stated_pattern(stated, layers)
    return _pattern(stated, layers)


@functools.lru_cache(maxsize=64)
def _stated_pattern(text: str, layers: int) -> tuple[bool, ...] | None:
    return _pattern(pattern_value(text), layers)


def _pattern(frequency: object, layers: int) -> tuple[bool, ...] | None:
    if frequency == 1 and isinstance(frequency, int):
        return (True,) * layers  # the usual case, which a search meets thousands of times
    if isinstance(frequency, int) and frequency > 0:
        return tuple(i % frequency == 0 for i in range(layers))
    if isinstance(frequency, list) and len(frequency) == layers:
        return tuple(map(bool, frequency))
    return None


def expert_frequency(args: Arguments) -> object:
    """Return the value of `moe_layer_freq`, with a list expression evaluated."""
    frequency = args.get("moe_layer_freq", 1)
    if isinstance(frequency, str):
        return pattern_value(frequency)
    return frequency


def pattern_value(text: str) -> object:
    """Evaluate integers, lists, + and * like Megatron. Return None for anything else, and for too long a list."""

    def value(node: ast.expr) -> object:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        if isinstance(node, ast.List):
            return list(map(value, node.elts))
        if not isinstance(node, ast.BinOp):
            return None
        left, right = value(node.left), value(node.right)
        if isinstance(node.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
            return left + right
        if isinstance(node.op, ast.Mult) and isinstance(left, list) and isinstance(right, int):
            if len(left) * right > MOST_LAYERS:
                return None
            return left * right
        return None

    try:
        return value(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


# One setting, renamed twice: 0.17 has the second name; from 0.18 on that flag sets the third.
_GRAPH_FLAGS = ("cuda_graph_modules", "cuda_graph_scope", "cuda_graph_scope_deprecated")


def graph_modules(args: Arguments) -> frozenset[str]:
    """Return the modules that CUDA graphs capture, such as "attn" and "moe_router"; empty means whole layers."""
    stated = next((args[name] for name in _GRAPH_FLAGS if args.get(name)), ())
    if isinstance(stated, str):
        stated = [stated]
    elif not isinstance(stated, (list, tuple)):
        stated = []
    return frozenset(str(getattr(module, "name", module)) for module in stated) - {"full"}


def recomputed_modules(args: Arguments) -> frozenset[str]:
    """Return the modules that selective recompute covers; core attention by default."""
    if not args.get("recompute_activations") and args.get("recompute_granularity") != "selective":
        return frozenset()
    modules = args.get("recompute_modules")
    if isinstance(modules, (list, tuple)):
        return frozenset(map(str, modules))
    return frozenset(("core_attn",))


# --- division over pipeline stages -----------------------------------------------------------------------------------


def expert_tensor_size(args: Arguments) -> int:
    """Return the expert tensor parallel size; by default the tensor parallel size."""
    return whole(args, "expert_tensor_parallel_size") or whole(args, "tensor_model_parallel_size") or 1


def virtual_stages(args: Arguments, pp: int) -> int:
    """Return the number of model chunks on each of `pp` pipeline ranks, whichever flag states it."""
    layout = args.get("pipeline_model_parallel_layout")
    if hybrid := hybrid_layers(args):
        return max(len(hybrid.segments) // pp, 1)
    if isinstance(layout, str) and (pieces := parse_layout(layout)):
        return max(len(pieces) // pp, 1)
    if stated := whole(args, "num_virtual_stages_per_pipeline_rank"):
        return stated
    if per_chunk := whole(args, "num_layers_per_virtual_pipeline_stage"):
        return max(accounted_layers(args) // pp // per_chunk, 1)
    return 1


def accounted_layers(args: Arguments) -> int:
    """Return the number of layers that are divided evenly. Embedding and loss may count as one layer each."""
    extra = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
    return (layer_count(args) or 0) + sum(bool(args.get(name)) for name in extra)


@functools.lru_cache(maxsize=1024)
def parse_layout(text: str) -> tuple[str, ...] | None:
    """Return the stages of a pipeline layout such as `Et*2|(t*2|)*3,tL`, with one letter per layer: E, t, m, L.

    `|` ends a stage, commas are ignored, and `*n` repeats the letter or the parentheses before it. None for other text,
    and for a layout with more than LONGEST_LAYOUT letters.
    """
    text = re.sub(r"[\s,'\"]", "", text)
    for repeated in (r"\(([^()]*)\)\*(\d{1,4})", r"([EtmL|])\*(\d{1,4})"):
        if sum(len(body) * int(times) for body, times in re.findall(repeated, text)) > LONGEST_LAYOUT:
            return None
        text = re.sub(repeated, lambda found: found[1] * int(found[2]), text)
    if not re.fullmatch(r"[EtmL|]+", text):
        return None
    return tuple(text.split("|"))


# --- length of a run -------------------------------------------------------------------------------------------------


def steps_of_run(args: Arguments, global_batch: int) -> int | None:
    """Return the number of iterations that a run trains, or None if its length is unknown."""
    steps = whole(args, "train_iters")
    if steps is None and (samples := whole(args, "train_samples")):
        steps = samples // global_batch  # Megatron drops a partial last batch
    if steps is not None and (leaves := whole(args, "exit_interval")):
        steps = min(steps, leaves)  # Megatron exits at the first iteration that it divides
    return steps

"""The sizes of a model's matrix products on one GPU, after tensor, sequence, context and expert parallelism."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fp8launch.check.facts import Facts
from fp8launch.megatron.flops import pattern_value

MOST_LAYERS = 4096


@dataclass(frozen=True)
class Width:
    """A feature dimension of a linear layer: `total` over `parts` ranks. `dests` are the arguments that make it."""

    name: str
    total: int
    parts: int
    dests: tuple[str, ...]

    @property
    def size(self) -> int | None:
        """Features on each rank; None when they do not divide, which Megatron refuses."""
        return self.total // self.parts if self.total % self.parts == 0 else None


def heads(run: Facts) -> int:
    return run.integer("num_attention_heads")


def query_groups(run: Facts) -> int:
    """Heads of keys and values: Megatron reads `num_query_groups` only with grouped-query attention."""
    return run.integer("num_query_groups", 1) if run.on("group_query_attention") else heads(run)


def head_width(run: Facts) -> int:
    given = run.integer("kv_channels")
    return given or (run.integer("hidden_size") // heads(run) if heads(run) else 0)


def ffn_width(run: Facts) -> int:
    """Width of dense feed-forward layers, Megatron's default where none is stated (arguments.py:1262)."""
    hidden = run.integer("hidden_size")
    default = int(4 * hidden * 2 / 3) // 64 * 64 if run.on("swiglu") else 4 * hidden
    return run.integer("ffn_hidden_size") or default


def expert_ways(run: Facts) -> int:
    """Expert tensor parallel size, that of the rest when none is stated."""
    return run.integer("expert_tensor_parallel_size") or run.layout.tp


def moe_pattern(run: Facts) -> list[int] | None:
    """One entry a layer, 1 for experts, as `moe_layer_freq` says; None when it is no number or list."""
    layers, frequency = run.integer("num_layers"), run.value("moe_layer_freq")
    if isinstance(frequency, str):
        frequency = pattern_value(frequency)
    if isinstance(frequency, int) and frequency > 0:
        return [int(i % frequency == 0) for i in range(min(layers, MOST_LAYERS))]
    return frequency if isinstance(frequency, list) else None


def widths(run: Facts) -> Iterator[Width]:
    """Every feature dimension of the linear layers that are quantized, each once."""
    tp, hidden = run.layout.tp, run.integer("hidden_size")
    if not hidden or not heads(run):
        return
    yield Width("hidden_size", hidden, 1, ("hidden_size",))
    if run.on("multi_latent_attention"):
        yield from _latent_attention(run)
    elif run.value("hybrid_layer_pattern") is None:
        qkv = (heads(run) + 2 * max(query_groups(run), tp)) * head_width(run)
        sizes = ("num_attention_heads", "num_query_groups", "kv_channels", "hidden_size")
        yield Width("the query, key and value projection", qkv, tp, sizes)
        yield Width("the attention output", heads(run) * head_width(run), tp, sizes)
    experts = run.on("num_experts")
    pattern = moe_pattern(run) if experts else [0]
    if pattern is None or not all(pattern):
        yield Width("ffn_hidden_size", ffn_width(run), tp, ("ffn_hidden_size", "hidden_size"))
    if experts:
        width = run.integer("moe_ffn_hidden_size") or ffn_width(run)
        yield Width("moe_ffn_hidden_size", width, expert_ways(run), ("moe_ffn_hidden_size", "ffn_hidden_size"))
        for dest, parts in (("moe_shared_expert_intermediate_size", tp), ("moe_latent_size", 1)):
            if run.on(dest):
                yield Width(dest, run.integer(dest), parts, (dest,))


def _latent_attention(run: Facts) -> Iterator[Width]:
    """Multi-latent attention (multi_latent_attention.py): down projections are whole on each rank, up ones split."""
    tp, n = run.layout.tp, heads(run)
    head, position = run.integer("qk_head_dim"), run.integer("qk_pos_emb_head_dim")
    value, latent, query = run.integer("v_head_dim"), run.integer("kv_lora_rank"), run.integer("q_lora_rank")
    if query:
        yield Width("q_lora_rank", query, 1, ("q_lora_rank",))
    yield Width("kv_lora_rank", latent, 1, ("kv_lora_rank",))
    yield Width("kv_lora_rank + qk_pos_emb_head_dim", latent + position, 1, ("qk_pos_emb_head_dim", "kv_lora_rank"))
    yield Width("the query up projection", n * (head + position), tp, ("qk_head_dim", "num_attention_heads"))
    yield Width("the key and value up projection", n * (head + value), tp, ("v_head_dim", "num_attention_heads"))
    yield Width("the attention output", n * value, tp, ("v_head_dim", "num_attention_heads"))


def tokens(run: Facts) -> tuple[int, int] | None:
    """Tokens of a micro batch on a rank: in a column-parallel layer after the gather, and between layers, where
    sequence parallelism splits them. None when they do not divide."""
    layout = run.layout
    sequence = run.integer("seq_length")
    parts = layout.tp if sequence_parallel(run) else 1
    chunks = 2 * layout.cp if layout.cp > 1 else 1
    if not sequence or sequence % chunks or sequence % (layout.cp * parts):
        return None
    gathered = sequence // layout.cp * layout.micro_batch
    return gathered, gathered // parts


def sequence_parallel(run: Facts) -> bool:
    """Megatron switches it off where tensors are not split (arguments.py:1395)."""
    return run.on("sequence_parallel") and run.layout.tp > 1


def virtual_stages(run: Facts) -> int:
    """Model chunks on each pipeline rank, however they are stated."""
    layout = run.value("pipeline_model_parallel_layout")
    if isinstance(layout, str):
        return max(1, len(_unrolled(layout).split("|")) // run.layout.pp)
    if run.integer("num_virtual_stages_per_pipeline_rank"):
        return run.integer("num_virtual_stages_per_pipeline_rank")
    chunk = run.integer("num_layers_per_virtual_pipeline_stage")
    if not chunk:
        return 1
    extra = run.on("account_for_embedding_in_pipeline_split") + run.on("account_for_loss_in_pipeline_split")
    return max(1, (run.integer("num_layers") + extra) // run.layout.pp // chunk)


def _unrolled(layout: str) -> str:
    """A pipeline layout without its repetitions: `(t|)*2` is `t|t|`. Bounded, for it is a user's text."""
    import re

    text = layout.replace(",", "")
    for pattern in (r"\(([^)]+)\)\*(\d{1,4})", r"(.)\*(\d{1,4})"):
        text = re.sub(pattern, lambda m: m.group(1) * min(int(m.group(2)), MOST_LAYERS), text)[: 64 * MOST_LAYERS]
    return text

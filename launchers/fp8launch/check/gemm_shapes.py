"""Compute the GEMM shapes of a model on one GPU, after tensor, sequence, context and expert parallelism."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fp8launch.check.resolved_run import ResolvedRun
from fp8launch.megatron.model_arithmetic import (
    Latent,
    expert_tensor_size,
    expert_width,
    ffn_width,
    head_width,
    hybrid_pattern,
    latent_attention,
    layer_kinds,
    query_groups,
)


@dataclass(frozen=True)
class Width:
    """A feature dimension of a linear layer, `total` over `parts` ranks. `dests` are the arguments that set it."""

    name: str
    total: int
    parts: int
    dests: tuple[str, ...]

    @property
    def size(self) -> int | None:
        """The number of features per rank, or None if they do not divide evenly, which Megatron rejects."""
        if self.total % self.parts:
            return None
        return self.total // self.parts


def heads(run: ResolvedRun) -> int:
    return run.integer("num_attention_heads")


def heads_fit(run: ResolvedRun) -> bool:
    """Return whether the hidden size divides evenly into heads, and the heads over tensor-parallel ranks."""
    count, stated = heads(run), run.integer("kv_channels") or run.on("multi_latent_attention")
    if not count or count % run.layout.tp:
        return False
    return bool(stated) or run.integer("hidden_size") % count == 0


def widths(run: ResolvedRun) -> Iterator[Width]:
    """Yield every feature dimension of the quantized linear layers, once each."""
    tp, args, kinds = run.layout.tp, run.arguments, layer_kinds(run.arguments)
    hidden = run.integer("hidden_size")
    if not hidden or not heads(run):
        return
    yield Width("hidden_size", hidden, 1, ("hidden_size",))
    if not heads_fit(run):
        kinds -= {"attention", "latent attention"}
    latent = latent_attention(args)
    if "latent attention" in kinds and latent is not None:
        yield from _latent_attention(run, latent)
    # Layers of hybrid models may have different kinds of attention, so their widths are not checked.
    elif "attention" in kinds and hybrid_pattern(args) is None:
        qkv = (heads(run) + 2 * max(query_groups(args), tp)) * head_width(args)
        sizes = ("num_attention_heads", "num_query_groups", "kv_channels", "hidden_size")
        yield Width("the query, key and value projection", qkv, tp, sizes)
        yield Width("the attention output", heads(run) * head_width(args), tp, sizes)
    if "mlp" in kinds:
        yield Width("ffn_hidden_size", ffn_width(args), tp, ("ffn_hidden_size", "hidden_size"))
    if "experts" in kinds and run.on("num_experts"):
        parts = expert_tensor_size(args)
        yield Width("moe_ffn_hidden_size", expert_width(args), parts, ("moe_ffn_hidden_size", "ffn_hidden_size"))
        for dest, parts in (("moe_shared_expert_intermediate_size", tp), ("moe_latent_size", 1)):
            if run.on(dest):
                yield Width(dest, run.integer(dest), parts, (dest,))


def _latent_attention(run: ResolvedRun, latent: Latent) -> Iterator[Width]:
    """Yield the widths of multi-latent attention. Down projections are replicated; up projections are sharded."""
    tp, n = run.layout.tp, heads(run)
    if latent.query_rank:
        yield Width("q_lora_rank", latent.query_rank, 1, ("q_lora_rank",))
    compressed = latent.kv_rank + latent.rope
    query, key_value = n * (latent.head + latent.rope), n * (latent.head + latent.value)
    yield Width("kv_lora_rank", latent.kv_rank, 1, ("kv_lora_rank",))
    yield Width("kv_lora_rank + qk_pos_emb_head_dim", compressed, 1, ("qk_pos_emb_head_dim", "kv_lora_rank"))
    yield Width("the query up projection", query, tp, ("qk_head_dim", "num_attention_heads"))
    yield Width("the key and value up projection", key_value, tp, ("v_head_dim", "num_attention_heads"))
    yield Width("the attention output", n * latent.value, tp, ("v_head_dim", "num_attention_heads"))


def tokens(run: ResolvedRun) -> tuple[int, int] | None:
    """Return the tokens of a micro batch on a rank, or None if they do not divide evenly.

    The first number applies inside a column-parallel layer, after the gather. The second applies between layers, where
    sequence parallelism splits the tokens.
    """
    layout = run.layout
    sequence = run.integer("seq_length")
    parts = layout.tp if sequence_parallel(run) else 1
    chunks = 2 * layout.cp if layout.cp > 1 else 1
    if not sequence or sequence % chunks or sequence % (layout.cp * parts):
        return None
    gathered = sequence // layout.cp * layout.micro_batch
    return gathered, gathered // parts


def sequence_parallel(run: ResolvedRun) -> bool:
    """Return whether sequence parallelism is on. Without tensor parallelism, Megatron disables it
    (arguments:validate_args)."""
    return run.on("sequence_parallel") and run.layout.tp > 1

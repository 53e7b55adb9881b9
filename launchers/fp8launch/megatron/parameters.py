"""The parameters that Megatron builds, per weight, pipeline stage and rank.

Tests compare the counts with real models on the meta device. The `kind` of a weight says how it is treated:

    linear      a matrix of a Transformer Engine layer, of which quantized recipes keep FP8 or FP4 copies
    expert      a linear matrix of a routed expert; its optimizer states are divided over expert data parallel ranks
    embedding   word and position embeddings
    output      the language-model head, which stays in bf16 (except with `--fp8-output-proj`)
    other       norms, biases, router; convolution, norm and decay of Mamba layers
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from fp8launch.megatron.architecture import (
    ATTENTION,
    EXPERTS,
    MLP,
    Architecture,
    Chunk,
    Division,
    Experts,
    divided_model,
)
from fp8launch.megatron.model_arithmetic import CONVOLUTION, Arguments, Latent, Mamba

Kind = Literal["linear", "expert", "embedding", "output", "other"]


@dataclass(frozen=True)
class Weight:
    """`copies` weights of one shape on one rank; `layer` is the decoder layer's number, None outside the decoder."""

    shape: tuple[int, ...]
    kind: Kind
    copies: int = 1
    layer: int | None = None

    @property
    def count(self) -> int:
        return math.prod(self.shape) * self.copies


def parameter_count(weights: Iterable[Weight]) -> int:
    """Return the number of parameters in all weights."""
    return sum(weight.count for weight in weights)


@dataclass(frozen=True)
class Parameters:
    """Parameters of a run.

    `active` leaves out the experts that a token does not visit. `multiplied` also leaves out the embedding table, of
    which a token reads one row, unless the output layer shares the table. `per_stage` has the parameters of one tensor
    and expert rank of each pipeline stage, in order, and `padded_vocab` is the number of rows of the embedding.
    """

    total: int
    active: int
    multiplied: int
    per_stage: tuple[int, ...]
    padded_vocab: int


def parameters(args: Arguments, world: int) -> Parameters | None:
    """Count the parameters of `args` (by Megatron's attribute name) on `world` GPUs; None for models not counted."""
    divided = divided_model(args, world)
    if divided is None:
        return None
    model, split, pipeline = divided
    total, active = whole_model(model)
    per_stage = tuple(parameter_count(stage_weights(model, split, stage)) for stage in pipeline)
    multiplied = active
    if not model.tied:
        multiplied -= model.vocab * model.hidden
    return Parameters(total, active, multiplied, per_stage, model.vocab)


def whole_model(model: Architecture) -> tuple[int, int]:
    """Return total and active parameters of the undivided model."""
    undivided = Chunk(tuple(range(model.layers)), model.mtp, embedding=True, output=True, final_norm=True)
    weights = list(chunk_weights(model, Division(), undivided))
    total = parameter_count(weights)
    if model.experts is None:
        return total, total
    routed = parameter_count(weight for weight in weights if weight.kind == "expert")
    idle = routed * (model.experts.count - model.experts.top_k) // model.experts.count
    return total, total - idle


def stage_weights(model: Architecture, split: Division, stage: Sequence[Chunk]) -> list[Weight]:
    """Return the weights on one rank of a pipeline stage."""
    weights: list[Weight] = []
    for chunk in stage:
        weights += chunk_weights(model, split, chunk)
    return weights


def chunk_weights(model: Architecture, split: Division, chunk: Chunk) -> Iterator[Weight]:
    """Return the weights on one rank of a chunk. With MTP layers or a tied output a chunk has its own embedding."""
    hidden = model.hidden
    vocab = -(-model.vocab // split.tp)
    if chunk.embedding or chunk.mtp:
        yield Weight((vocab, hidden), "embedding")
        if model.positions:
            yield Weight((model.positions, hidden), "embedding")
    for layer in chunk.layers:
        yield from layer_weights(model, split, model.kinds[layer], layer)
    for _ in range(model.mtp_blocks(chunk.mtp)):
        for kind in model.mtp_kinds:
            yield from layer_weights(model, split, kind, None)
        yield Weight((2 * hidden // split.tp, hidden), "linear")
        # The norms of the embedding, the hidden state and the result.
        yield Weight((3 * model.norm * hidden,), "other")
    if chunk.final_norm:
        yield Weight((model.norm * hidden,), "other")
    if chunk.output and not (model.tied and chunk.embedding):
        yield Weight((vocab, hidden), "output")


def layer_weights(model: Architecture, split: Division, kind: str, layer: int | None) -> Iterator[Weight]:
    """Return the weights of one layer on one rank."""
    # A norm before each part.
    yield Weight((len(kind) * model.norm * model.hidden,), "other", layer=layer)
    for part in kind:
        if part == ATTENTION and model.latent:
            yield from _latent_attention(model, model.latent, split, layer)
        elif part == ATTENTION:
            yield from _attention(model, split, layer)
        elif part == EXPERTS and model.experts:
            yield from _moe(model, model.experts, split, layer)
        elif part == MLP:
            yield from _mlp(model, model.ffn, split.tp, "linear", 1, layer, model.hidden)
        elif model.mamba:
            yield from _mamba(model.hidden, model.mamba, split.tp, layer)


def _mamba(hidden: int, mamba: Mamba, tp: int, layer: int | None) -> Iterator[Weight]:
    """Return the weights of a Mamba-2 mixer (megatron/core/ssm/mamba_mixer.py)."""
    yield Weight((mamba.projected // tp, hidden), "linear", layer=layer)
    yield Weight((hidden, mamba.inner // tp), "linear", layer=layer)
    # Four taps and a bias of the convolution per channel; the bias of dt, A and D per head; the gated norm.
    small = mamba.convolved * (CONVOLUTION + 1) + 3 * mamba.heads + mamba.inner
    yield Weight((small // tp,), "other", layer=layer)


def _attention(model: Architecture, split: Division, layer: int | None) -> Iterator[Weight]:
    query = model.heads * model.channels // split.tp
    key = max(model.groups // split.tp, 1) * model.channels
    qkv = query * (1 + model.output_gate) + 2 * key
    yield Weight((qkv, model.hidden), "linear", layer=layer)
    yield Weight((model.hidden, query), "linear", layer=layer)
    biases = qkv * model.qkv_bias + model.hidden * model.linear_bias
    norms = 2 * model.norm * model.channels * model.qk_norm
    offsets = model.heads // split.tp * model.softmax_offset
    if small := biases + norms + offsets:
        yield Weight((small,), "other", layer=layer)


def _latent_attention(model: Architecture, latent: Latent, split: Division, layer: int | None) -> Iterator[Weight]:
    """Return the weights of multi-latent attention. Every tensor rank has both down projections."""
    heads = model.heads // split.tp
    query = heads * (latent.head + latent.rope)
    norms = latent.kv_rank
    if latent.query_rank is None:
        yield Weight((query, model.hidden), "linear", layer=layer)
    else:
        yield Weight((latent.query_rank, model.hidden), "linear", layer=layer)
        yield Weight((query, latent.query_rank), "linear", layer=layer)
        norms += latent.query_rank
    yield Weight((latent.kv_rank + latent.rope, model.hidden), "linear", layer=layer)
    yield Weight((heads * (latent.head + latent.value), latent.kv_rank), "linear", layer=layer)
    yield Weight((model.hidden, heads * latent.value), "linear", layer=layer)
    if model.qk_norm:
        yield Weight((model.norm * norms,), "other", layer=layer)
    if model.linear_bias:
        yield Weight((model.hidden,), "other", layer=layer)


def _mlp(
    model: Architecture, ffn: int, tp: int, kind: Kind, copies: int, layer: int | None, width: int
) -> Iterator[Weight]:
    own = ffn // tp
    first = own * model.first_outputs
    yield Weight((first, width), kind, copies, layer)
    yield Weight((width, own), kind, copies, layer)
    if model.linear_bias:
        # The biases of an expert are divided like its matrices.
        yield Weight((first + width,), "expert" if kind == "expert" else "other", copies, layer)


def _moe(model: Architecture, experts: Experts, split: Division, layer: int | None) -> Iterator[Weight]:
    yield Weight((experts.count, model.hidden), "other", layer=layer)
    if model.linear_bias:
        yield Weight((experts.count,), "other", layer=layer)
    local = experts.count // split.ep
    yield from _mlp(model, experts.ffn, split.etp, "expert", local, layer, experts.latent or model.hidden)
    if experts.latent:
        yield Weight((experts.latent, model.hidden), "linear", 2, layer)
    if experts.shared:
        yield from _mlp(model, experts.shared, split.tp, "linear", 1, layer, model.hidden)
        if experts.shared_gate:
            yield Weight((model.hidden,), "other", layer=layer)

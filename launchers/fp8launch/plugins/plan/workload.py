"""Sizes, speeds and matrix products of a run, from which its step time is predicted."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from fp8launch.hardware.quantization import UNQUANTIZED_BYTES, quantization_recipes
from fp8launch.megatron.architecture import ATTENTION, EXPERTS, MAMBA, MLP, Experts
from fp8launch.plugins.estimate.divided_run import DividedRun
from fp8launch.plugins.plan.speeds import Speeds

BF16 = 2
# Kernels pad each expert's rows to tiles of 128, which adds half a tile on average.
PADDING = 64


# Passes over the bf16 logits in the loss and its gradient. Measured on H200: 101 ms of kernels for 8 micro batches with
# Megatron's fused loss, 81 ms less with Transformer Engine's (benchmarks/h200/tuning.md).
LOSS_PASSES = {"native": 21.0, "te": 4.5, "unfused": 24.0}
# Beyond this many GPUs, a step slows down with scale.
ONE_NODE = 8


@dataclass(frozen=True)
class Linear:
    """A matrix product of `rows` tokens with `count` weights of n x k. Each weight gets its share of the rows."""

    name: str
    rows: float
    n: int
    k: int
    count: int = 1
    quantized: bool = True


@dataclass(frozen=True)
class Workload(DividedRun):
    """A run with the speeds of its GPU."""

    speeds: Speeds

    def recipe(self, quantized: bool) -> str:
        """Return the name of the run's quantization recipe, or bf16 for tensors that are not quantized."""
        if not quantized or self.precision.recipe is None:
            return "bf16"
        return self.precision.recipe.name

    @property
    def capacity(self) -> float | None:
        """The maximum number of tokens of an expert, relative to the mean; None if there is no limit."""
        factor = self.args.get("moe_expert_capacity_factor")
        if isinstance(factor, int | float) and factor > 0:
            return float(factor)
        return None

    @property
    def pads_to_capacity(self) -> bool:
        """Whether every expert computes exactly its capacity, padding missing tokens."""
        return self.capacity is not None and self.on("moe_pad_expert_input_to_capacity")

    def routed_rows(self, experts: Experts) -> float:
        """Return the mean number of rows that a rank's experts compute per micro batch."""
        rows = self.own_tokens * self.split.etp * experts.top_k
        if self.pads_to_capacity and self.capacity is not None:
            rows *= self.capacity
        return rows

    @property
    def packs_tokens(self) -> bool:
        """Whether tokens are dispatched to experts by DeepEP or HybridEP instead of an all-to-all."""
        return self.args.get("moe_token_dispatcher_type") == "flex"


def linears(run: Workload, kind: str) -> Iterator[Linear]:
    """Yield the matrix products of a layer."""
    for part in kind:
        yield from _PRODUCTS[part](run)


def _attention(run: Workload) -> Iterator[Linear]:
    model, split, tokens = run.model, run.split, run.tokens
    if not model.latent:
        query = model.heads * model.channels // split.tp
        key = max(model.groups // split.tp, 1) * model.channels
        yield Linear("qkv", tokens, query * (1 + model.output_gate) + 2 * key, model.hidden)
        yield Linear("projection", tokens, model.hidden, query)
        return
    latent = model.latent
    heads = model.heads // split.tp
    query = heads * (latent.head + latent.rope)
    own = run.own_tokens
    if latent.query_rank is None:
        yield Linear("query", tokens, query, model.hidden)
    else:
        yield Linear("query down", own, latent.query_rank, model.hidden)
        yield Linear("query up", tokens, query, latent.query_rank)
    yield Linear("key-value down", own, latent.kv_rank + latent.rope, model.hidden)
    yield Linear("key-value up", tokens, heads * (latent.head + latent.value), latent.kv_rank)
    yield Linear("projection", tokens, model.hidden, heads * latent.value)


def _mamba(run: Workload) -> Iterator[Linear]:
    mamba = run.model.mamba
    assert mamba is not None
    yield Linear("Mamba in", run.tokens, mamba.projected // run.split.tp, run.model.hidden)
    yield Linear("Mamba out", run.tokens, run.model.hidden, mamba.inner // run.split.tp)


def _mlp(run: Workload) -> Iterator[Linear]:
    ffn = run.model.ffn // run.split.tp
    yield Linear("fc1", run.tokens, run.model.first_outputs * ffn, run.model.hidden)
    yield Linear("fc2", run.tokens, run.model.hidden, ffn)


def _experts(run: Workload) -> Iterator[Linear]:
    model, split, tokens = run.model, run.split, run.tokens
    experts = model.experts
    assert experts is not None
    gate = model.first_outputs
    width, local, ffn = experts.latent or model.hidden, max(experts.count // split.ep, 1), experts.ffn // split.etp
    rows = run.routed_rows(experts)
    yield Linear("router", run.own_tokens, experts.count, model.hidden, quantized=False)
    if experts.latent:
        yield Linear("to latent", run.own_tokens, width, model.hidden)
        yield Linear("from latent", run.own_tokens, model.hidden, width)
    yield Linear("experts fc1", rows, gate * ffn, width, local)
    yield Linear("experts fc2", rows, width, ffn, local)
    if experts.shared:
        shared = experts.shared // split.tp
        yield Linear("shared fc1", tokens, gate * shared, model.hidden)
        yield Linear("shared fc2", tokens, model.hidden, shared)


_PRODUCTS = {ATTENTION: _attention, MAMBA: _mamba, MLP: _mlp, EXPERTS: _experts}


def product_times(run: Workload, linear: Linear, recipe: str) -> tuple[float, float, float]:
    """Return the seconds that the products for output, input gradient and weight gradient take."""
    rows = linear.rows
    if linear.count > 1:
        rows += PADDING * linear.count
    compute = 2 * rows * linear.n * linear.k / run.speeds.gemm(recipe)
    size = operand_bytes(recipe)
    inputs, outputs = rows * linear.k, rows * linear.n
    weights = linear.count * linear.n * linear.k
    # The weight gradient is accumulated into a buffer, which is read and written.
    accumulated = weights * 2 * run.precision.gradient
    if not run.args.get("gradient_accumulation_fusion", True):
        accumulated += weights * 2 * BF16
    memory = run.speeds.memory
    return (
        compute + ((inputs + weights) * size + outputs * BF16) / memory,
        compute + ((outputs + weights) * size + inputs * BF16) / memory,
        compute + ((outputs + inputs) * size + accumulated) / memory,
    )


def output_layer(run: Workload) -> Linear:
    """Return the matrix product of the language-model head."""
    vocab = run.model.vocab // run.split.tp
    return Linear("output layer", run.tokens, vocab, run.model.hidden, quantized=run.precision.output_quantized)


def loss_kernel(run: Workload) -> str:
    """Return the implementation of the loss, a key of `LOSS_PASSES`."""
    if not run.on("cross_entropy_loss_fusion"):
        return "unfused"
    if run.args.get("cross_entropy_fusion_impl") == "te":
        return "te"
    return "native"


def scale(run: Workload, world: int) -> tuple[float, float]:
    """Return the fraction by which a step slows down per doubling of the GPUs, and the number of doublings."""
    share = run.speeds.software.scale
    if run.precision.recipe is not None and run.precision.recipe.name == "delayed":
        share += run.speeds.software.scale_delayed
    return share, max(math.log2(world / ONE_NODE), 0.0)


@functools.cache
def operand_bytes(precision: str) -> float:
    """Return the bytes per element of an operand of matrix products, including its scales."""
    if precision in quantization_recipes():
        return quantization_recipes()[precision].weight_bytes
    return UNQUANTIZED_BYTES[precision]

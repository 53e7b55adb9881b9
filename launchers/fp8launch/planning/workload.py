"""A run as the prediction of its time needs it: sizes, speeds, and its matrix products."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fp8launch.hardware.quantization import operand_bytes
from fp8launch.megatron.architecture import ATTENTION, EXPERTS, MAMBA, MLP, Architecture, Division
from fp8launch.megatron.dtype_sizes import PrecisionSizes
from fp8launch.megatron.model_arithmetic import Arguments, whole
from fp8launch.planning.speeds import Speeds

BF16 = 2
# The products of an expert's tokens are padded to tiles of 128 rows: half a tile each on average.
PADDING = 64


@dataclass(frozen=True)
class Linear:
    """A matrix product of `rows` tokens with `count` weights of n x k each, every one with its share of the rows."""

    name: str
    rows: float
    n: int
    k: int
    count: int = 1
    quantized: bool = True


@dataclass(frozen=True)
class Workload:
    """A run as the prediction of its time needs it."""

    args: Arguments
    model: Architecture
    split: Division
    precision: PrecisionSizes
    speeds: Speeds

    def on(self, name: str) -> bool:
        return bool(self.args.get(name))

    @property
    def micro_batch(self) -> int:
        return whole(self.args, "micro_batch_size") or 1

    @property
    def tokens(self) -> float:
        """Tokens of a micro batch on a context parallel rank."""
        return self.micro_batch * self.model.seq_length / self.split.cp

    @property
    def own_tokens(self) -> float:
        """Those between the linear layers of a tensor parallel rank."""
        if self.split.sequence_parallel:
            return self.tokens / self.split.tp
        return self.tokens

    def recipe(self, quantized: bool) -> str:
        """The precision of what the run quantizes, or of what it leaves in bf16."""
        if not quantized or self.precision.recipe is None:
            return "bf16"
        return self.precision.recipe.name

    @property
    def packs_tokens(self) -> bool:
        """Whether the dispatcher of experts moves tokens by kernels of its own."""
        return self.args.get("moe_token_dispatcher_type") == "flex"


def linears(run: Workload, kind: str) -> Iterator[Linear]:
    """The matrix products of a layer."""
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
    rows = run.own_tokens * split.etp * experts.top_k
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
    """Seconds of the products for output, input gradient and weight gradient."""
    rows = linear.rows
    if linear.count > 1:
        rows += PADDING * linear.count
    compute = 2 * rows * linear.n * linear.k / run.speeds.gemm(recipe)
    size = operand_bytes(recipe)
    inputs, outputs = rows * linear.k, rows * linear.n
    weights = linear.count * linear.n * linear.k
    # The weight's gradient is added to a buffer.
    accumulated = weights * 2 * run.precision.gradient
    if not run.args.get("gradient_accumulation_fusion", True):
        accumulated += weights * 2 * BF16
    memory = run.speeds.memory
    return (
        compute + ((inputs + weights) * size + outputs * BF16) / memory,
        compute + ((outputs + weights) * size + inputs * BF16) / memory,
        compute + ((outputs + inputs) * size + accumulated) / memory,
    )

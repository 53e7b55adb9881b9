"""Predicted time of a training step on a GPU, as a table of terms.

    step = micro batches x slowest pipeline stage + bubble + exposed gradient and weight traffic + optimizer

`docs/speed_model.md` says how well it agrees with published and measured runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from fp8launch.hardware.gpus import Gpu
from fp8launch.hardware.quantization import FP32
from fp8launch.megatron.architecture import Chunk, divided_model, microbatches
from fp8launch.megatron.dtype_sizes import offloaded_layers, precision, recomputed_layers
from fp8launch.megatron.flops import flops_per_token
from fp8launch.megatron.layer_kinds import LayerKind, decoder_kinds, mtp_kinds
from fp8launch.megatron.memory import offloaded_bytes
from fp8launch.megatron.model_arithmetic import Arguments
from fp8launch.planning.collectives import Group, send
from fp8launch.planning.layer_terms import HostTime, LayerTime, Seconds, seconds
from fp8launch.planning.layers import layer_time
from fp8launch.planning.speeds import FAST_HOST_LINK, Links, Speeds, speeds
from fp8launch.planning.step_end import add_step_end
from fp8launch.planning.workload import BF16, Linear, Workload, linears, product_times

# Passes over the bf16 logits in loss and its gradient: measured on H200, 101 ms of kernels for 8 micro batches with
# Megatron's fused loss, 81 ms less with Transformer Engine's (benchmarks/h200/tuning.md).
LOSS_PASSES = {"native": 21.0, "te": 4.5, "unfused": 24.0}
# By how much nine in ten published and measured runs are off at most (benchmarks/plan/errors.md).
UNCERTAINTY_DENSE = 0.12
UNCERTAINTY_EXPERTS = 0.20
UNCERTAINTY_HYBRID = 0.25
# Activations over PCIe: no such run was published.
UNCERTAINTY_OFFLOADED = 0.20
# Steps that wait for a slow host vary as much from one to the next (benchmarks/plan/host_bound.md).
UNCERTAINTY_SLOW_HOST = 0.20
# A step that a slow host lengthens by a smaller fraction does not depend on the host.
NOTICEABLE = 0.01


@dataclass(frozen=True)
class TimeTerm:
    """One part of a step: its milliseconds, and what it consists of."""

    name: str
    ms: float
    note: str = field(default="", compare=False)


@dataclass(frozen=True)
class StepTime:
    """A predicted step on a host as fast as in the published runs.

    `terms` add up to `ms`; nine in ten runs are off by at most the fraction `uncertainty`. `slow_host_ms` is the same
    step on the slowest host measured; None in a search, which ranks by `ms` alone.
    """

    terms: tuple[TimeTerm, ...]
    tokens: int
    gpus: int
    flops_per_token: float | None
    uncertainty: float
    slow_host_ms: float | None = None

    @property
    def ms(self) -> float:
        return sum(term.ms for term in self.terms)

    @property
    def depends_on_host(self) -> bool:
        """Whether the step is noticeably longer on the slowest host measured."""
        return self.slow_host_ms is not None and self.slow_host_ms > (1 + NOTICEABLE) * self.ms

    @property
    def range_ms(self) -> tuple[float, float]:
        """The least and the most milliseconds, over the uncertainty and the hosts measured."""
        most = (1 + self.uncertainty) * self.ms
        if self.slow_host_ms is not None and self.depends_on_host:
            most = max(most, (1 + UNCERTAINTY_SLOW_HOST) * self.slow_host_ms)
        return (1 - self.uncertainty) * self.ms, most

    @property
    def tokens_per_s_per_gpu(self) -> float:
        return self.tokens / self.gpus / self.ms * 1000

    @property
    def tflops_per_gpu(self) -> float | None:
        """Model TFLOP/s/GPU as Megatron counts them."""
        if self.flops_per_token is None:
            return None
        return self.tokens_per_s_per_gpu * self.flops_per_token / 1e12


def step_time(args: Arguments, world: int, global_batch: int, gpu: Gpu, links: Links | None = None) -> StepTime | None:
    """Predict the step of a run on `world` GPUs.

    `args` are Megatron's arguments by attribute name. None for a model that is not counted, whose layers do not divide
    as asked, or for a GPU whose speeds are not known.
    """
    known = speeds(gpu, links)
    if known is None:
        return None
    return step_time_at(args, world, global_batch, known)


def step_time_at(
    args: Arguments, world: int, global_batch: int, known: Speeds, shared: LayerTimes | None = None
) -> StepTime | None:
    """The same, at given speeds. `shared` keeps the layers of predictions at these speeds for others.

    With `shared`, as in a search, the step has neither notes nor a time on a slow host.
    """
    staged = _staged(args, world, known, shared)
    if staged is None:
        return None
    run, pipeline, of_stages = staged
    args, model, split = run.args, run.model, run.split
    number = microbatches(args, split, global_batch)
    slowest = max(range(split.pp), key=lambda rank: sum(of_stages[rank].values()))
    terms = seconds()
    for name, part in of_stages[slowest].items():
        terms[name] = part * number
    if split.pp > 1:
        _add_pipeline(run, terms, of_stages, slowest, number)
    add_step_end(run, terms, pipeline[slowest], of_stages[slowest], number)
    notes: dict[str, str] = {}
    slow_host_ms = None
    if shared is None:
        notes = _notes(run)
        on_slow_host = replace(known, device=replace(known.device, host=known.device.slow_host))
        slow = step_time_at(args, world, global_batch, on_slow_host, LayerTimes())
        assert slow is not None  # only the host differs
        slow_host_ms = slow.ms
    ordered = tuple(TimeTerm(name, 1000 * part, notes.get(name, "")) for name, part in terms.items() if part > 0)
    tokens = global_batch * model.seq_length
    return StepTime(ordered, tokens, world, flops_per_token(args), _uncertainty(run), slow_host_ms)


def _uncertainty(run: Workload) -> float:
    if run.model.mamba:
        return UNCERTAINTY_HYBRID
    if run.model.experts:
        return UNCERTAINTY_EXPERTS
    if offloaded_layers(run.args) and run.speeds.device.host_link < FAST_HOST_LINK:
        return UNCERTAINTY_OFFLOADED
    return UNCERTAINTY_DENSE


def stage_times(
    args: Arguments, world: int, known: Speeds, shared: LayerTimes
) -> tuple[Sequence[Sequence[Chunk]], list[float]] | None:
    """What each pipeline stage holds, and its seconds for a micro batch."""
    staged = _staged(args, world, known, shared)
    if staged is None:
        return None
    _, pipeline, of_stages = staged
    return pipeline, [sum(stage.values()) for stage in of_stages]


def _staged(
    args: Arguments, world: int, known: Speeds, shared: LayerTimes | None
) -> tuple[Workload, Sequence[Sequence[Chunk]], list[Seconds]] | None:
    """A run, what each of its pipeline stages holds, and their seconds for a micro batch."""
    args = dict(args)
    divided = divided_model(args, world)
    if divided is None:
        return None
    model, split, pipeline = divided
    formats = precision(args, known.gpu)
    # No run in fp32 was ever compared; fp16 has the speed of bf16.
    if formats.dtype == FP32:
        return None
    run = Workload(args, model, split, formats, known)
    if shared is None:
        shared = LayerTimes()
    return run, pipeline, _stages(run, pipeline, shared.of(run))


def _notes(run: Workload) -> dict[str, str]:
    """What the matrix products of a micro batch multiply, in which precision."""
    found = {}
    for linear in chain(*(linears(run, kind) for kind in set(run.model.kinds)), [_head(run)]):
        several = ""
        if linear.count > 1:
            several = f"{linear.count} x "
        rows = linear.rows / linear.count
        found[f"GEMM {linear.name}"] = f"{run.recipe(linear.quantized)}, {several}{rows:.0f} x {linear.n} x {linear.k}"
    return found


def _head(run: Workload) -> Linear:
    """The language-model head."""
    vocab = run.model.vocab // run.split.tp
    return Linear("output layer", run.tokens, vocab, run.model.hidden, quantized=run.precision.output_quantized)


class LayerTimes:
    """Times of layers of earlier predictions, which layouts that differ in their pipeline alone have in common."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], tuple[Arguments, dict[LayerKind, LayerTime]]] = {}

    def of(self, run: Workload) -> dict[LayerKind, LayerTime]:
        """The times of the layers of `run`."""
        args = dict(run.args)
        for name in _OF_PIPELINE:
            args.pop(name, None)
        savings = [str(args.pop(name, None)) for name in _OF_SAVINGS]
        alike = replace(run.split, pp=1, vp=1, data=1, expert_data=1), run.micro_batch, *savings
        known = self._known.get(alike)
        if known is None or known[0] != args:
            known = self._known[alike] = args, _layer_times(run)
        return known[1]


# Those that ways to save memory and CUDA graphs change.
_OF_SAVINGS = (
    "recompute_granularity",
    "recompute_activations",
    "recompute_modules",
    "grad_reduce_in_bf16",
    "fp8_param_gather",
    "fp4_param_gather",
    "cuda_graph_impl",
    "cuda_graph_modules",
    "cuda_graph_scope",
)
# Arguments that say nothing of a layer.
_OF_PIPELINE = {
    "recompute_method",
    "recompute_num_layers",
    "cpu_offloading_num_layers",
    "reuse_grad_buf_for_mxfp8_param_ag",
    "use_precision_aware_optimizer",
    "exp_avg_dtype",
    "exp_avg_sq_dtype",
    "te_rng_tracker",
    "pipeline_model_parallel_size",
    "pipeline_model_parallel_layout",
    "num_virtual_stages_per_pipeline_rank",
    "num_layers_per_virtual_pipeline_stage",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
}


def _layer_times(run: Workload) -> dict[LayerKind, LayerTime]:
    decoder, mtp = decoder_kinds(run.model, run.precision), mtp_kinds(run.model, run.precision)
    return {kind: layer_time(run, *kind) for kind in {*decoder, *mtp}}


def _stages(run: Workload, pipeline: Sequence[Sequence[Chunk]], layers: dict[LayerKind, LayerTime]) -> list[Seconds]:
    """Seconds of a micro batch on every pipeline rank; stages that hold the same are computed once."""
    decoder, mtp = decoder_kinds(run.model, run.precision), mtp_kinds(run.model, run.precision)
    different: dict[object, Seconds] = {}
    found = []
    for chunks in pipeline:
        kinds, ends = [], []
        for chunk in chunks:
            kinds.append((*map(decoder.__getitem__, chunk.layers), *mtp * chunk.mtp))
            ends.append((chunk.mtp, chunk.embedding, chunk.output))
        content = tuple(kinds), tuple(ends)
        if content not in different:
            different[content] = _stage(run, chunks, kinds, layers)
        found.append(different[content])
    return found


def _stage(
    run: Workload,
    chunks: Sequence[Chunk],
    kinds_of_chunks: Sequence[Sequence[LayerKind]],
    layers: dict[LayerKind, LayerTime],
) -> Seconds:
    """Seconds of a micro batch on one pipeline rank, forward and backward."""
    total = seconds()
    forward = 0.0
    held: Counter[LayerKind] = Counter()
    repeated: Counter[LayerKind] = Counter()
    for chunk, kinds in zip(chunks, kinds_of_chunks, strict=True):
        held.update(kinds)
        repeated.update(kinds[: recomputed_layers(run.args, len(kinds))])
        if chunk.output:
            _add_head(run, total, 1 + chunk.mtp)
        if chunk.mtp:
            combine = Linear("MTP projection", run.tokens, run.model.hidden // run.split.tp, 2 * run.model.hidden)
            total["GEMM MTP projection"] += chunk.mtp * sum(product_times(run, combine, run.recipe(True)))
        if chunk.embedding:
            total["elementwise"] += 6 * run.tokens * run.model.hidden * BF16 / run.speeds.memory
    for kind, number in held.items():
        layer = layers[kind]
        for passed in (layer.forward, layer.backward):
            for name, part in passed.items():
                total[name] += number * part
        once = sum(layer.forward.values())
        forward += number * once
        total["recompute"] += number * layer.recompute + repeated[kind] * (once - layer.recompute)
    if size := offloaded_bytes(run.args, run.model, run.split, run.precision, chunks):
        backward = sum(total.values()) - forward
        # Copies run beside the passes and take their part of the memory's bandwidth.
        link, traffic = size / run.speeds.host_link, size / run.speeds.memory
        total["offloading"] += max(link - forward, traffic) + max(link - backward, traffic)
    launches = [(layers[kind].host, number, repeated[kind]) for kind, number in held.items()]
    total["host"] += _waits_for_host(launches, forward, sum(total.values()) - forward)
    return total


def _waits_for_host(launches: Sequence[tuple[HostTime, int, int]], forward: float, backward: float) -> float:
    """Seconds in which the GPU, busy for so long in both passes, has nothing to do.

    It waits behind the routing, and where the host launches a whole pass slower than the GPU runs it. `launches` has
    the host's time of each kind of layer, how many there are, and how many of these run forward twice.
    """
    waiting = launched = waiting_again = launched_back = 0.0
    for host, number, repeated in launches:
        waiting += number * host.waiting
        launched += number * host.forward
        waiting_again += repeated * host.waiting
        launched_back += number * host.backward + repeated * host.forward
    return max(waiting, launched - forward) + max(waiting_again, launched_back - backward)


def _add_head(run: Workload, total: Seconds, outputs: int) -> None:
    """The language-model head and the loss, for the model and each MTP layer."""
    head = _head(run)
    total["GEMM output layer"] += outputs * sum(product_times(run, head, run.recipe(head.quantized)))
    kind = "unfused"
    if run.on("cross_entropy_loss_fusion"):
        kind = "native"
        if run.args.get("cross_entropy_fusion_impl") == "te":
            kind = "te"
    total["loss"] += outputs * LOSS_PASSES[kind] * run.tokens * head.n * BF16 / run.speeds.memory


def _add_pipeline(run: Workload, terms: Seconds, of_stages: Sequence[Seconds], slowest: int, microbatches: int) -> None:
    """The bubble, and what is sent between stages."""
    split = run.split
    others = [sum(stage.values()) for rank, stage in enumerate(of_stages) if rank != slowest]
    terms["pipeline bubble"] += sum(others) / split.vp
    group = Group(split.pp, split.tp * split.data)
    size = run.own_tokens * run.model.hidden * BF16
    once = send(size, group, run.speeds)
    name = f"PP communication ({group.link(run.speeds)})"
    if split.vp > 1:
        # The interleaved schedule sends behind another chunk's pass (overlap_p2p_communication).
        window = sum(of_stages[slowest].values()) / (2 * split.vp)
        once = max(once - window, run.speeds.fractions.contention * once)
    terms[name] += 2 * split.vp * microbatches * once

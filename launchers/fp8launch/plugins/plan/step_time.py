"""Predicted time of a training step on a GPU, as a table of terms.

    step = micro batches x slowest pipeline stage + bubble + exposed gradient and weight traffic + optimizer

`docs/speed_model.md` states its accuracy against published and measured runs.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeAlias

from fp8launch.check.resolved_run import ResolvedRun
from fp8launch.hardware.gpus import Gpu
from fp8launch.hardware.quantization import FP32
from fp8launch.megatron.architecture import Chunk, divided_model
from fp8launch.megatron.flops import flops_of
from fp8launch.megatron.model_arithmetic import Arguments
from fp8launch.plugins.estimate.activations import offloaded_layers, recomputed_layers
from fp8launch.plugins.estimate.dtype_sizes import LayerKind, precision
from fp8launch.plugins.estimate.memory import microbatches, offloaded_bytes
from fp8launch.plugins.plan.cluster_speeds import cluster_speeds
from fp8launch.plugins.plan.collectives import Group, send
from fp8launch.plugins.plan.known_runs import Dispatch, Kind, Situation, extrapolations, uncertainty
from fp8launch.plugins.plan.layer_terms import HostTime, LayerTime, Seconds, seconds
from fp8launch.plugins.plan.layers import layer_time, needs_new_kernels
from fp8launch.plugins.plan.settings import timed_arguments
from fp8launch.plugins.plan.speeds import FAST_HOST_LINK, Links, Speeds, speeds
from fp8launch.plugins.plan.step_end import add_step_end
from fp8launch.plugins.plan.term_notes import notes_of
from fp8launch.plugins.plan.workload import (
    BF16,
    LOSS_PASSES,
    Linear,
    Workload,
    loss_kernel,
    output_layer,
    product_times,
    scale,
)

# Offloading over PCIe. No such run was published.
UNCERTAINTY_OFFLOADED = 0.20
# Steps that wait for a slow host vary this much between one another (benchmarks/plan/host_bound.md).
UNCERTAINTY_SLOW_HOST = 0.20
# Below this share, the time that a slow host adds is not reported.
NOTICEABLE = 0.01


@dataclass(frozen=True)
class TimeTerm:
    """One part of a step: its milliseconds, and a note on what it consists of."""

    name: str
    ms: float
    note: str = field(default="", compare=False)


@dataclass(frozen=True)
class StepTime:
    """A predicted step of a trained model on a host as fast as in the published runs.

    `terms` add up to `ms`. `speeds` are the speeds that it was predicted with. `situation` decides the uncertainty,
    which is at least `least_uncertainty`. `slow_host_ms` is the same step on the slowest host measured, `first_ms` with
    the router of the first iterations, and `unfused_ms` with software that cannot fuse latent attention on Blackwell.
    In a search, which ranks by `ms` alone, these and `flops_per_token` are None.
    `first_ms` is also None if the router is balanced by force, and `unfused_ms` if any software fuses the attention.
    """

    terms: tuple[TimeTerm, ...]
    tokens: int
    gpus: int
    flops_per_token: float | None
    situation: Situation
    speeds: Speeds
    least_uncertainty: float = 0.0
    slow_host_ms: float | None = None
    first_ms: float | None = None
    unfused_ms: float | None = None

    @cached_property
    def ms(self) -> float:
        return sum(term.ms for term in self.terms)

    @cached_property
    def uncertainty(self) -> float:
        """The fraction by which eight in ten similar runs are off at most."""
        return max(uncertainty(self.situation), self.least_uncertainty)

    @property
    def extrapolations(self) -> list[str]:
        """The respects in which no measured run is like this one."""
        return extrapolations(self.situation)

    @property
    def depends_on_host(self) -> bool:
        """Whether the step is noticeably longer on the slowest host measured."""
        return self.slow_host_ms is not None and self.slow_host_ms > (1 + NOTICEABLE) * self.ms

    @property
    def range_ms(self) -> tuple[float, float]:
        """The least and the most milliseconds, over the uncertainty, the hosts measured and the router's training."""
        most = (1 + self.uncertainty) * self.ms
        if self.slow_host_ms is not None and self.depends_on_host:
            most = max(most, (1 + UNCERTAINTY_SLOW_HOST) * self.slow_host_ms)
        if self.first_ms is not None:
            most = max(most, (1 + self.uncertainty) * self.first_ms)
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


def predict_step(run: ResolvedRun) -> StepTime | None:
    """Predict the step of a run on its cluster, at the speeds that `plan` uses there."""
    known = cluster_speeds(run.gpu, run.layout.world, run.cluster)
    if known is None:
        return None
    return step_time_at(timed_arguments(run), run.layout.world, run.layout.global_batch, known)


def step_time(args: Arguments, world: int, global_batch: int, gpu: Gpu, links: Links | None = None) -> StepTime | None:
    """Predict the step of a run on `world` GPUs.

    `args` are Megatron's arguments by attribute name. None if the model is not counted, if its layers do not divide, or
    if the GPU's speeds are not known.
    """
    known = speeds(gpu, links)
    if known is None:
        return None
    return step_time_at(args, world, global_batch, known)


def step_time_at(
    args: Arguments, world: int, global_batch: int, known: Speeds, shared: LayerTimes | None = None
) -> StepTime | None:
    """Predict the step of a run at given speeds.

    A search passes `shared` to reuse the times of layers. The step then has neither notes, FLOPs nor a time on a slow
    host.
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
    _add_scale(run, terms, world)
    notes: dict[str, str] = {}
    slow_host_ms = first_ms = unfused_ms = None
    if shared is None:
        notes = notes_of(run, terms, world)
        on_slow_host = replace(known, device=replace(known.device, host=known.device.slow_host))
        slow = step_time_at(args, world, global_batch, on_slow_host, LayerTimes())
        assert slow is not None  # only the host differs
        slow_host_ms = slow.ms
        if terms["expert imbalance"]:
            software = replace(known.software, independent_tokens=known.software.independent_at_first)
            first = step_time_at(args, world, global_batch, replace(known, software=software), LayerTimes())
            assert first is not None  # only the router differs
            first_ms = first.ms
        if needs_new_kernels(model, known.gpu):
            software = replace(known.software, fuses_latent=False)
            unfused = step_time_at(args, world, global_batch, replace(known, software=software), LayerTimes())
            assert unfused is not None  # only attention differs
            unfused_ms = unfused.ms
    ordered = tuple(TimeTerm(name, 1000 * part, notes.get(name, "")) for name, part in terms.items() if part > 0)
    tokens = global_batch * model.seq_length
    least = 0.0
    if offloaded_layers(args) and known.device.host_link < FAST_HOST_LINK:
        least = UNCERTAINTY_OFFLOADED
    situation = _situation(run, world, terms)
    flops = flops_of(model, args) if shared is None else None
    return StepTime(ordered, tokens, world, flops, situation, known, least, slow_host_ms, first_ms, unfused_ms)


def _situation(run: Workload, world: int, terms: Seconds) -> Situation:
    model = run.model
    kind: Kind = "dense"
    name = f"{model.hidden} x {len(model.kinds)}"
    if model.mamba:
        kind = "hybrid"
    elif model.experts:
        kind, name = "experts", f"{name} x {model.experts.count}"
    share = terms["host"] / sum(terms.values())
    dispatch: Dispatch = ""
    if model.experts and run.split.ep > 1:
        dispatch = "packed" if run.packs_tokens else "capacity" if run.pads_to_capacity else "all-to-all"
    return Situation(run.speeds.gpu.name, kind, run.recipe(True), name, world, model.seq_length, share, dispatch)


def stage_times(
    args: Arguments, world: int, known: Speeds, shared: LayerTimes
) -> tuple[Sequence[Sequence[Chunk]], list[float]] | None:
    """Return the chunks of each pipeline stage, and its seconds for a micro batch."""
    staged = _staged(args, world, known, shared)
    if staged is None:
        return None
    _, pipeline, of_stages = staged
    return pipeline, [sum(stage.values()) for stage in of_stages]


def least_pipeline_ms(
    args: Arguments, world: int, global_batch: int, known: Speeds, shared: LayerTimes
) -> float | None:
    """Return a lower bound of the step for every split of a pipeline's layers, in milliseconds.

    It is the time of even stages without a bubble, waits for the host, and work that is done once per step.
    """
    staged = _staged(args, world, known, shared)
    if staged is None:
        return None
    run, _, of_stages = staged
    busy = sum(sum(stage.values()) - stage["host"] for stage in of_stages) / run.split.pp
    share, doublings = scale(run, world)
    return 1000 * (1 + share * doublings) * microbatches(run.args, run.split, global_batch) * busy


def _staged(args: Arguments, world: int, known: Speeds, shared: LayerTimes | None) -> Staged | None:
    """Return the workload, the chunks of each pipeline stage, and the stages' seconds for a micro batch."""
    if shared is None:
        shared = LayerTimes()
    # A search predicts a division's step and then asks for its stages.
    if shared.latest is None or shared.latest[0] is not args or shared.latest[1:3] != (world, known):
        shared.latest = args, world, known, _divided(args, world, known, shared)
    return shared.latest[3]


def _divided(args: Arguments, world: int, known: Speeds, shared: LayerTimes) -> Staged | None:
    args = dict(args)
    divided = divided_model(args, world)
    if divided is None:
        return None
    model, split, pipeline = divided
    formats = precision(args, known.gpu)
    # The model was never compared with runs in fp32. fp16 is as fast as bf16.
    if formats.dtype == FP32:
        return None
    run = Workload(args, model, split, formats, known)
    return run, pipeline, _stages(run, pipeline, shared.of(run))


# The workload of a run, the chunks of each pipeline stage, and the stages' seconds for a micro batch.
Staged: TypeAlias = "tuple[Workload, Sequence[Sequence[Chunk]], list[Seconds]]"


class LayerTimes:
    """Times of layers, which layouts share if they differ only in their pipeline.

    `latest` has the arguments that were divided last, with the number of GPUs, their speeds and the result.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], tuple[Arguments, dict[LayerKind, LayerTime]]] = {}
        self.latest: tuple[Arguments, int, Speeds, Staged | None] | None = None

    def of(self, run: Workload) -> dict[LayerKind, LayerTime]:
        """Return the times of the layers of `run`."""
        args = dict(run.args)
        for name in _OF_PIPELINE:
            args.pop(name, None)
        savings = [str(args.pop(name, None)) for name in _OF_SAVINGS]
        split = run.split
        alike = split.tp, split.cp, split.ep, split.etp, split.sequence_parallel, run.micro_batch, *savings
        known = self._known.get(alike)
        if known is None or known[0] != args:
            known = self._known[alike] = args, _layer_times(run)
        return known[1]


# Arguments that memory savings and CUDA graphs change.
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
# Arguments that do not affect the time of a layer.
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
    return {kind: layer_time(run, *kind) for kind in {*run.kinds, *run.mtp_kinds}}


def _stages(run: Workload, pipeline: Sequence[Sequence[Chunk]], layers: dict[LayerKind, LayerTime]) -> list[Seconds]:
    """Return the seconds of a micro batch on every pipeline rank. Equal stages are computed once."""
    ranks, different = _contents(tuple(pipeline), run.kinds, run.mtp_kinds)
    times = [_stage(run, pipeline[rank], kinds, layers) for rank, kinds in different]
    return [times[number] for number in ranks]


# A search divides different models over the same few pipelines thousands of times.
@functools.lru_cache(maxsize=512)
def _contents(
    pipeline: tuple[tuple[Chunk, ...], ...], decoder: tuple[LayerKind, ...], mtp: tuple[LayerKind, ...]
) -> tuple[list[int], list[tuple[int, list[tuple[LayerKind, ...]]]]]:
    """Return the number of each rank's content, and of each content its first rank and the kinds of its chunks."""
    numbers: dict[object, int] = {}
    ranks: list[int] = []
    different: list[tuple[int, list[tuple[LayerKind, ...]]]] = []
    for rank, chunks in enumerate(pipeline):
        kinds = [(*map(decoder.__getitem__, chunk.layers), *mtp * chunk.mtp) for chunk in chunks]
        content = tuple(kinds), tuple((chunk.mtp, chunk.embedding, chunk.output) for chunk in chunks)
        if content not in numbers:
            numbers[content] = len(different)
            different.append((rank, kinds))
        ranks.append(numbers[content])
    return ranks, different


def _stage(
    run: Workload,
    chunks: Sequence[Chunk],
    kinds_of_chunks: Sequence[Sequence[LayerKind]],
    layers: dict[LayerKind, LayerTime],
) -> Seconds:
    """Return the seconds of a micro batch on one pipeline rank, forward and backward."""
    total = seconds()
    forward = 0.0
    held: Counter[LayerKind] = Counter()
    repeated: Counter[LayerKind] = Counter()
    for chunk, kinds in zip(chunks, kinds_of_chunks, strict=True):
        held.update(kinds)
        again = recomputed_layers(run.args, len(kinds))
        if again:
            repeated.update(kinds[:again])
        if chunk.output:
            _add_head(run, total, 1 + chunk.mtp)
        if chunk.mtp:
            combine = Linear("MTP projection", run.tokens, run.model.hidden // run.split.tp, 2 * run.model.hidden)
            total["GEMM MTP projection"] += chunk.mtp * sum(product_times(run, combine, run.recipe(True)))
        if chunk.embedding:
            total["elementwise"] += 6 * run.tokens * run.model.hidden * BF16 / run.speeds.memory
    for kind, number in held.items():
        layer = layers[kind]
        for name, part in layer.both.items():
            total[name] += number * part
        once = layer.forward_seconds
        forward += number * once
        total["recompute"] += number * layer.recompute + repeated[kind] * (once - layer.recompute)
    if size := offloaded_bytes(run.args, run.model, run.split, run.precision, chunks):
        backward = sum(total.values()) - forward
        # Copies run during the passes and use part of the memory's bandwidth.
        link, traffic = size / run.speeds.host_link, size / run.speeds.memory
        total["offloading"] += max(link - forward, traffic) + max(link - backward, traffic)
    launches = [(layers[kind].host, number, repeated[kind]) for kind, number in held.items()]
    total["host"] += _waits_for_host(launches, forward, sum(total.values()) - forward)
    return total


def _waits_for_host(launches: Sequence[tuple[HostTime, int, int]], forward: float, backward: float) -> float:
    """Return the seconds in which the GPU waits for the host.

    It waits after the routing, and if the host takes longer to launch a pass than the GPU to run it. `forward` and
    `backward` are the seconds of the GPU. `launches` has the host's time for each kind of layer, the number of these
    layers, and how many of them run forward again in the backward pass.
    """
    waiting = launched = waiting_again = launched_back = 0.0
    for host, number, repeated in launches:
        waiting += number * host.waiting
        launched += number * host.forward
        waiting_again += repeated * host.waiting
        launched_back += number * host.backward + repeated * host.forward
    return max(waiting, launched - forward) + max(waiting_again, launched_back - backward)


def _add_head(run: Workload, total: Seconds, outputs: int) -> None:
    """Add the language-model head and the loss, for the model and each MTP layer."""
    head = output_layer(run)
    total["GEMM output layer"] += outputs * sum(product_times(run, head, run.recipe(head.quantized)))
    total["loss"] += outputs * LOSS_PASSES[loss_kernel(run)] * run.tokens * head.n * BF16 / run.speeds.memory


def _add_scale(run: Workload, terms: Seconds, world: int) -> None:
    """Add what all GPUs wait for the slowest one, and for a network that more of them share."""
    share, doublings = scale(run, world)
    terms["scale"] += share * doublings * sum(terms.values())


def _add_pipeline(run: Workload, terms: Seconds, of_stages: Sequence[Seconds], slowest: int, microbatches: int) -> None:
    """Add the bubble and the communication between stages."""
    split = run.split
    others = [sum(stage.values()) for rank, stage in enumerate(of_stages) if rank != slowest]
    terms["pipeline bubble"] += sum(others) / split.vp
    group = Group(split.pp, split.tp * split.data)
    size = run.own_tokens * run.model.hidden * BF16
    once = send(size, group, run.speeds)
    name = f"PP communication ({group.link(run.speeds)})"
    if split.vp > 1:
        # In the interleaved schedule another chunk's pass hides the transfer (overlap_p2p_communication).
        window = sum(of_stages[slowest].values()) / (2 * split.vp)
        once = max(once - window, run.speeds.fractions.contention * once)
    terms[name] += 2 * split.vp * microbatches * once

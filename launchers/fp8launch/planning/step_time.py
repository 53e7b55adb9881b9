"""Predicted time of a training step on a GPU, as a table of terms.

    step = micro batches x slowest pipeline stage + bubble + exposed gradient and weight traffic + optimizer

`docs/speed_model.md` says how well it agrees with published and measured runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from fp8launch.hardware.gpus import Gpu
from fp8launch.hardware.quantization import FP32
from fp8launch.megatron.architecture import Chunk, Division, divided_model
from fp8launch.megatron.dtype_sizes import precision
from fp8launch.megatron.flops import flops_per_token
from fp8launch.megatron.model_arithmetic import Arguments, whole
from fp8launch.megatron.parameters import Weight, chunk_weights, layer_weights
from fp8launch.planning.collectives import Group, gather, send
from fp8launch.planning.layers import LayerTime, Seconds, layer_time, seconds
from fp8launch.planning.speeds import Links, Speeds, speeds
from fp8launch.planning.workload import BF16, Linear, Workload, linears, product_times

# Passes over the bf16 logits in loss and its gradient: measured on H200, 101 ms of kernels for 8 micro batches with
# Megatron's fused loss, 81 ms less with Transformer Engine's (benchmarks/h200/NOTES.md, 2026-11-21).
LOSS_PASSES = {"native": 21.0, "te": 4.5, "unfused": 24.0}
# FP8 parameters are cast again from their fp32 masters, with a largest value across ranks for each: 245 ms for 7 * 10^9
# of them on H200, whatever the number of ranks (benchmarks/h200/NOTES.md, 2026-11-22).
CAST = {"tensorwise": 100.0, "delayed": 20.0, "blockwise": 40.0, "mxfp8": 10.0, "nvfp4": 20.0}
# Bytes of one weight that the optimizer's step passes besides: unscaling and scaling a state that is stored under a
# scale (TE's fused_adam.py: to fp32, times the scale, least and largest value, divided, stored), and the slow cast of
# a flat FP8 moment (562 ms a step more in all than fp32 moments: benchmarks/h200/2026-11-23-levels).
SCALED_STATE, FP8_MOMENT = 32.0, 440.0
# By how much nine in ten published and measured runs are off at most (benchmarks/plan/errors.md).
UNCERTAINTY_DENSE = 0.12
UNCERTAINTY_EXPERTS = 0.20
# Nothing was calibrated on these.
UNCERTAINTY_HYBRID = 0.70


@dataclass(frozen=True)
class TimeTerm:
    """One part of a step: its milliseconds, and what it consists of."""

    name: str
    ms: float
    note: str = ""


@dataclass(frozen=True)
class StepTime:
    """A predicted step. `terms` add up to `ms`; nine in ten runs are off by at most the fraction `uncertainty`."""

    terms: tuple[TimeTerm, ...]
    tokens: int
    gpus: int
    flops_per_token: float | None
    uncertainty: float

    @property
    def ms(self) -> float:
        return sum(term.ms for term in self.terms)

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
    return None if known is None else step_time_at(args, world, global_batch, known)


def step_time_at(
    args: Arguments, world: int, global_batch: int, known: Speeds, shared: LayerTimes | None = None
) -> StepTime | None:
    """The same, at given speeds. `shared` keeps the layers of predictions at these speeds for others."""
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
    microbatches = max(global_batch // (run.micro_batch * max(split.data // split.cp, 1)), 1)
    layers = _layer_times(run) if shared is None else shared.of(run)
    of_stages = _stages(run, pipeline, layers)
    slowest = max(range(split.pp), key=lambda rank: sum(of_stages[rank].values()))
    terms = seconds()
    for name, part in of_stages[slowest].items():
        terms[name] = part * microbatches
    if split.pp > 1:
        _add_pipeline(run, terms, of_stages, slowest, microbatches)
    _add_step(run, terms, pipeline[slowest], of_stages[slowest], microbatches)
    notes = _notes(run)
    ordered = tuple(TimeTerm(name, 1000 * part, notes.get(name, "")) for name, part in terms.items() if part > 0)
    uncertainty = UNCERTAINTY_DENSE
    if model.mamba:
        uncertainty = UNCERTAINTY_HYBRID
    elif model.experts:
        uncertainty = UNCERTAINTY_EXPERTS
    return StepTime(ordered, global_batch * model.seq_length, world, flops_per_token(args), uncertainty)


def _notes(run: Workload) -> dict[str, str]:
    """What the matrix products of a micro batch multiply, in which precision."""
    found = {}
    for kind in set(run.model.kinds):
        for linear in linears(run, kind):
            recipe = run.recipe if linear.quantized else "bf16"
            several = f"{linear.count} x " if linear.count > 1 else ""
            rows = linear.rows / linear.count
            found[f"GEMM {linear.name}"] = f"{recipe}, {several}{rows:.0f} x {linear.n} x {linear.k}"
    recipe = run.recipe if run.precision.output_quantized else "bf16"
    vocab = run.model.vocab // run.split.tp
    found["GEMM output layer"] = f"{recipe}, {run.tokens:.0f} x {vocab} x {run.model.hidden}"
    return found


class LayerTimes:
    """Times of layers of earlier predictions, which layouts that differ in their pipeline alone have in common."""

    def __init__(self) -> None:
        self._known: dict[tuple[Division, int], tuple[Arguments, dict[tuple[str, bool], LayerTime]]] = {}

    def of(self, run: Workload) -> dict[tuple[str, bool], LayerTime]:
        """The times of the layers of `run`."""
        args = {name: value for name, value in run.args.items() if name not in _OF_PIPELINE}
        alike = replace(run.split, pp=1, vp=1, data=1, expert_data=1), run.micro_batch
        known = self._known.get(alike)
        if known is None or known[0] != args:
            known = self._known[alike] = args, _layer_times(run)
        return known[1]


# Arguments that say nothing of a layer.
_OF_PIPELINE = {
    "pipeline_model_parallel_size",
    "pipeline_model_parallel_layout",
    "num_virtual_stages_per_pipeline_rank",
    "num_layers_per_virtual_pipeline_stage",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
}


def _layer_times(run: Workload) -> dict[tuple[str, bool], LayerTime]:
    model, covers = run.model, run.precision.covers
    kinds = {(kind, covers(number, model.layers)) for number, kind in enumerate(model.kinds)}
    kinds |= {(kind, covers(None, model.layers)) for kind in model.mtp_kinds}
    return {kind: layer_time(run, *kind) for kind in kinds}


def _stages(
    run: Workload, pipeline: Sequence[Sequence[Chunk]], layers: dict[tuple[str, bool], LayerTime]
) -> list[Seconds]:
    """Seconds of a micro batch on every pipeline rank; stages that hold the same are computed once."""
    different: dict[object, Seconds] = {}
    found = []
    for chunks in pipeline:
        content = tuple((tuple(_kinds(run, chunk)), chunk.mtp, chunk.embedding, chunk.output) for chunk in chunks)
        if content not in different:
            different[content] = _stage(run, chunks, layers)
        found.append(different[content])
    return found


def _kinds(run: Workload, chunk: Chunk) -> list[tuple[str, bool]]:
    """The parts of each layer of a virtual stage and whether it is quantized, MTP layers last."""
    model, covers = run.model, run.precision.covers
    decoder = [(model.kinds[number], covers(number, model.layers)) for number in chunk.layers]
    return decoder + [(kind, covers(None, model.layers)) for kind in model.mtp_kinds] * chunk.mtp


def _stage(run: Workload, chunks: Sequence[Chunk], layers: dict[tuple[str, bool], LayerTime]) -> Seconds:
    """Seconds of a micro batch on one pipeline rank, forward and backward."""
    total = seconds()
    recompute = host = 0.0
    full = run.args.get("recompute_granularity") == "full"
    for chunk in chunks:
        kinds = _kinds(run, chunk)
        again = len(kinds) if full else 0
        if full and run.args.get("recompute_method") == "block":
            again = min(whole(run.args, "recompute_num_layers") or 1, len(kinds))
        for kind, number in Counter(kinds).items():
            layer = layers[kind]
            for passed in (layer.forward, layer.backward):
                for name, part in passed.items():
                    total[name] += number * part
            recompute += number * layer.recompute
            host += number * layer.host
        for kind in kinds[:again]:
            recompute += sum(layers[kind].forward.values()) - layers[kind].recompute
        if chunk.output:
            _add_head(run, total, 1 + chunk.mtp)
        if chunk.mtp:
            combine = Linear("MTP projection", run.tokens, run.model.hidden // run.split.tp, 2 * run.model.hidden)
            total["GEMM MTP projection"] += chunk.mtp * sum(product_times(run, combine, run.recipe))
        if chunk.embedding:
            total["elementwise"] += 6 * run.tokens * run.model.hidden * BF16 / run.speeds.memory
    total["recompute"] += recompute
    # Where the host cannot launch kernels as fast as the GPU runs them, the GPU waits.
    total["host"] += max(host - sum(total.values()), 0.0)
    return total


def _add_head(run: Workload, total: Seconds, outputs: int) -> None:
    """The language-model head and the loss, for the model and each MTP layer."""
    vocab = run.model.vocab // run.split.tp
    recipe = run.recipe if run.precision.output_quantized else "bf16"
    head = Linear("output layer", run.tokens, vocab, run.model.hidden)
    total["GEMM output layer"] += outputs * sum(product_times(run, head, recipe))
    kind = "unfused"
    if run.on("cross_entropy_loss_fusion"):
        kind = "te" if run.args.get("cross_entropy_fusion_impl") == "te" else "native"
    total["loss"] += outputs * LOSS_PASSES[kind] * run.tokens * vocab * BF16 / run.speeds.memory


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


@dataclass
class _Traffic:
    """What a step moves and updates once for some weights: seconds of the links, bytes of memory."""

    reduced: float = 0.0
    gathered: float = 0.0
    update: float = 0.0
    linear: float = 0.0

    def add(self, other: _Traffic, times: float) -> None:
        self.reduced += times * other.reduced
        self.gathered += times * other.gathered
        self.update += times * other.update
        self.linear += times * other.linear


def _traffic(run: Workload, weights: Iterable[Weight]) -> _Traffic:
    split, formats, known = run.split, run.precision, run.speeds
    sharding = _sharding(run)
    divided = run.on("use_distributed_optimizer") or "optim" in sharding
    routed, dense = Group(split.expert_data, split.etp * split.ep), Group(split.data, split.tp)
    # Seconds of a byte.
    of_routed, of_dense = gather(1.0, routed, known), gather(1.0, dense, known)
    total = _Traffic()
    for weight in weights:
        group, each = (routed, of_routed) if weight.kind == "expert" else (dense, of_dense)
        linear = weight.kind in ("linear", "expert")
        sent = formats.weight
        if formats.param_gather and formats.recipe and linear:
            sent = formats.recipe.weight_bytes
            total.update += weight.count * CAST.get(run.recipe, 20.0) / (group.size if sharding else 1)
        total.linear += weight.count * linear
        total.reduced += weight.count * formats.gradient * each * (1 if divided else 2)
        total.gathered += weight.count * sent * each * divided
        passes = 2 * formats.gradient + 2 * formats.optimizer_bytes(weight) + BF16 + 8 * formats.copies_gradients
        passes += SCALED_STATE * formats.scaled_states + FP8_MOMENT * formats.fp8_moment
        total.update += weight.count * passes / (group.size if divided else 1)
    return total


def _add_step(run: Workload, terms: Seconds, chunks: Sequence[Chunk], stage: Seconds, microbatches: int) -> None:
    """Gradients, weights and the optimizer, once a step; with FSDP weights and gradients of every micro batch."""
    split, formats, known = run.split, run.precision, run.speeds
    total = _Traffic()
    for kind, number in Counter(run.model.kinds[number] for chunk in chunks for number in chunk.layers).items():
        total.add(_traffic(run, layer_weights(run.model, split, kind, 0)), number)
    for chunk in chunks:
        total.add(_traffic(run, chunk_weights(run.model, split, replace(chunk, layers=()))), 1)
    contention = known.fractions.contention
    busy = sum(stage.values())
    sharding = _sharding(run)
    dense, routed = Group(split.data, split.tp), Group(split.expert_data, split.etp * split.ep)
    if max(dense.size, routed.size) > 1:
        link = dense.link(known)
        if run.model.experts and routed.size > 1:
            link = routed.link(known)
        name = f"DP communication ({link})"
        if sharding:
            whole_step = microbatches * (2 * total.gathered + total.reduced)
            terms[name] += max(whole_step - microbatches * busy, contention * whole_step)
            # Gathered weights are quantized anew, and gradients added by a kernel of their own, in every micro batch.
            requantized = 6 if formats.quantized and not formats.param_gather else 0
            total.update += microbatches * total.linear * (requantized + 2 * formats.gradient)
        else:
            # Behind the last backward pass and the first forward pass.
            most = min(split.pp, microbatches)
            for link_time, window, overlapped in (
                (total.reduced, 2 / 3 * busy, run.on("overlap_grad_reduce")),
                (total.gathered, 1 / 3 * busy, run.on("overlap_param_gather")),
            ):
                terms[name] += _behind(link_time, window, split.vp, most, contention) if overlapped else link_time
    terms["optimizer"] += total.update / known.memory


def _behind(link: float, window: float, chunks: int, group: int, contention: float) -> float:
    """Seconds of communication left beside the pass of a micro batch, `window`, through a stage of `chunks`.

    With virtual stages a pipeline passes `group` micro batches through a chunk before the next. All chunks but the one
    at the step's edge so have that time as well (megatron/core/pipeline_parallel/schedules.py, `grad_sync_func` and
    `param_sync_func` of the interleaved schedule); that one has its own pass alone.
    """
    own = window / chunks
    return max(link - own * (1 + (chunks - 1) * group), link / chunks - own, contention * link)


def _sharding(run: Workload) -> str:
    if run.on("use_torch_fsdp2"):
        return "optim_grads_params"
    if run.on("use_megatron_fsdp"):
        return str(run.args.get("data_parallel_sharding_strategy") or "optim_grads_params")
    return ""

"""Work once per step: gradients and weights between data parallel ranks, and the optimizer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fp8launch.megatron.architecture import Chunk
from fp8launch.megatron.model_arithmetic import whole
from fp8launch.megatron.parameters import Weight, chunk_weights, layer_weights
from fp8launch.plugins.plan.collectives import Group, gather, ring_latency
from fp8launch.plugins.plan.layer_terms import Seconds
from fp8launch.plugins.plan.workload import BF16, Workload

# Picoseconds per FP8 parameter of a rank's shard for the cast from its fp32 masters. The kernel is bound by neither the
# memory nor the number of tensors: 72 ps on H100 and 70 ps on H200, and half of that for half a shard
# (benchmarks/plan/cast.md). MXFP8 and NVFP4 were not measured.
CAST = {"tensorwise": 71.0, "delayed": 73.0, "blockwise": 4.6, "mxfp8": 3.0, "nvfp4": 6.0}
# Weights of a bucket whose gradients are reduced together: at least, and for each data parallel rank.
LEAST_BUCKET, PER_RANK = 40e6, 1e6
# Additional bytes per weight in the optimizer's step. A state with a scale is unscaled and scaled (fused_adam.py of
# Transformer Engine: to fp32, times the scale, least and largest value, divided, stored). A flat FP8 moment needs a
# slow cast (together 562 ms per step more than fp32 moments: benchmarks/h200/layouts.md).
SCALED_STATE, FP8_MOMENT = 32.0, 440.0


@dataclass
class _Traffic:
    """Work on some weights once per step: seconds on the links and of casts, bytes of memory."""

    weights: float = 0.0
    experts: float = 0.0
    reduced: float = 0.0
    gathered: float = 0.0
    update: float = 0.0
    cast: float = 0.0
    linear: float = 0.0

    def add(self, other: _Traffic, times: float) -> None:
        self.weights += times * other.weights
        self.experts += times * other.experts
        self.reduced += times * other.reduced
        self.gathered += times * other.gathered
        self.update += times * other.update
        self.cast += times * other.cast
        self.linear += times * other.linear


def _traffic(run: Workload, weights: Iterable[Weight]) -> _Traffic:
    formats = run.precision
    sharding = _sharding(run)
    divided = run.on("use_distributed_optimizer") or "optim" in sharding
    dense, routed = _groups(run)
    # Seconds per byte.
    of_dense, of_routed = gather(1.0, dense, run.speeds), gather(1.0, routed, run.speeds)
    total = _Traffic()
    for weight in weights:
        count = weight.count
        ranks, each = dense.size, of_dense
        if weight.kind == "expert":
            ranks, each = routed.size, of_routed
            total.experts += count
        else:
            total.weights += count
        linear = weight.kind in ("linear", "expert")
        sent = formats.weight
        if formats.param_gather and formats.recipe and linear:
            sent = formats.recipe.weight_bytes
            # A rank casts the weights whose masters it holds.
            total.cast += count / ranks * CAST.get(formats.recipe.name, 6.0) * 1e-12
        total.linear += count * linear
        passes = 2 * formats.gradient + 2 * formats.optimizer_bytes(weight) + BF16 + 8 * formats.copies_gradients
        passes += SCALED_STATE * formats.scaled_states + FP8_MOMENT * formats.fp8_moment
        reduced, update = count * formats.gradient * each, count * passes
        if divided:
            total.gathered += count * sent * each
            update /= ranks
        else:
            reduced *= 2  # an all-reduce
        total.reduced += reduced
        total.update += update
    return total


def _groups(run: Workload) -> tuple[Group, Group]:
    """Return the ranks that hold the same dense weights, and the ranks that hold the same experts."""
    split = run.split
    return Group(split.data, split.tp), Group(split.expert_data, split.etp * split.ep)


def add_step_end(run: Workload, terms: Seconds, chunks: Sequence[Chunk], stage: Seconds, microbatches: int) -> None:
    """Add the exposed traffic of gradients and weights, and the optimizer.

    With FSDP weights and gradients are moved for every micro batch.
    """
    split, known = run.split, run.speeds
    total = _stage_traffic(run, chunks)
    busy = sum(stage.values())
    dense, routed = _groups(run)
    if max(dense.size, routed.size) > 1:
        link = dense.link(known)
        if run.model.experts and routed.size > 1:
            link = routed.link(known)
        if _sharding(run):
            exposed = _every_micro_batch(run, total, busy, microbatches)
        else:
            # Hidden by the last backward pass and the first forward pass.
            group = min(split.pp, microbatches)
            latency = _buckets(run, total.weights, dense.size) * ring_latency(dense, known)
            latency += _buckets(run, total.experts, routed.size) * ring_latency(routed, known)
            total.reduced += latency
            total.gathered += latency
            exposed = _exposed(run, "overlap_grad_reduce", total.reduced, 2 / 3 * busy, group)
            exposed += _exposed(run, "overlap_param_gather", total.gathered, 1 / 3 * busy, group)
        terms[f"DP communication ({link})"] += exposed
    terms["optimizer"] += total.update / known.memory + total.cast


def _buckets(run: Workload, weights: float, ranks: int) -> float:
    """Return the number of collectives that weights take (distributed_data_parallel.py of Megatron-Core)."""
    if not weights:
        return 0.0
    size = whole(run.args, "ddp_bucket_size") or max(LEAST_BUCKET, PER_RANK * ranks)
    if not run.on("overlap_grad_reduce"):
        return 1.0
    return max(weights / size, 1.0)


def _stage_traffic(run: Workload, chunks: Sequence[Chunk]) -> _Traffic:
    """Return the traffic of all weights of a stage."""
    total = _Traffic()
    kinds: Counter[str] = Counter()
    for chunk in chunks:
        kinds.update(map(run.model.kinds.__getitem__, chunk.layers))
    for kind, number in kinds.items():
        total.add(_traffic(run, layer_weights(run.model, run.split, kind, 0)), number)
    for chunk in chunks:
        if chunk.mtp or chunk.embedding or chunk.output or chunk.final_norm:
            total.add(_traffic(run, chunk_weights(run.model, run.split, chunk.around)), 1)
    return total


def _every_micro_batch(run: Workload, total: _Traffic, busy: float, microbatches: int) -> float:
    """Return the exposed seconds of FSDP, which gathers and reduces in every micro batch.

    Its passes over memory are added to `total`.
    """
    formats = run.precision
    whole_step = microbatches * (2 * total.gathered + total.reduced)
    # Gathered weights are quantized again, and a separate kernel accumulates gradients.
    passes = 2 * formats.gradient
    if formats.quantized and not formats.param_gather:
        passes += 6
    total.update += microbatches * total.linear * passes
    return max(whole_step - microbatches * busy, run.speeds.fractions.contention * whole_step)


def _exposed(run: Workload, overlap: str, link: float, window: float, group: int) -> float:
    """Return the exposed seconds of communication next to computation of `window` seconds.

    Nothing is hidden unless the flag `overlap` is on.
    """
    if not run.on(overlap):
        return link
    return _behind(link, window, run.split.vp, group, run.speeds.fractions.contention)


def _behind(link: float, window: float, chunks: int, group: int, contention: float) -> float:
    """Return the exposed seconds of communication that the pass of a micro batch through `chunks` chunks hides.

    `window` is the time of that pass. With virtual stages a pipeline runs `group` micro batches through a chunk before
    the next one, so the communication of a chunk has that time too. Only the chunk at the step's edge has just its own
    pass (`grad_sync_func` and `param_sync_func` in megatron/core/pipeline_parallel/schedules.py).
    """
    own = window / chunks
    return max(link - own * (1 + (chunks - 1) * group), link / chunks - own, contention * link)


def _sharding(run: Workload) -> str:
    if run.on("use_torch_fsdp2"):
        return "optim_grads_params"
    if run.on("use_megatron_fsdp"):
        return str(run.args.get("data_parallel_sharding_strategy") or "optim_grads_params")
    return ""

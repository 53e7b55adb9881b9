"""Time of a step beside its micro batches: gradients and weights between data parallel ranks, and the optimizer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fp8launch.megatron.architecture import Chunk
from fp8launch.megatron.parameters import Weight, chunk_weights, layer_weights
from fp8launch.planning.collectives import Group, gather
from fp8launch.planning.layer_terms import Seconds
from fp8launch.planning.workload import BF16, Workload

# FP8 parameters are cast again from their fp32 masters, with a largest value across ranks for each: 245 ms for 7 * 10^9
# of them on H200, whatever the number of ranks (benchmarks/h200/layouts.md).
CAST = {"tensorwise": 100.0, "delayed": 20.0, "blockwise": 40.0, "mxfp8": 10.0, "nvfp4": 20.0}
# Bytes of one weight that the optimizer's step passes besides: unscaling and scaling a state that is stored under a
# scale (TE's fused_adam.py: to fp32, times the scale, least and largest value, divided, stored), and the slow cast of
# a flat FP8 moment (562 ms a step more in all than fp32 moments: benchmarks/h200/layouts.md).
SCALED_STATE, FP8_MOMENT = 32.0, 440.0


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
    formats = run.precision
    sharding = _sharding(run)
    divided = run.on("use_distributed_optimizer") or "optim" in sharding
    dense, routed = _groups(run)
    # Seconds of a byte.
    of_dense, of_routed = gather(1.0, dense, run.speeds), gather(1.0, routed, run.speeds)
    total = _Traffic()
    for weight in weights:
        count = weight.count
        ranks, each = dense.size, of_dense
        if weight.kind == "expert":
            ranks, each = routed.size, of_routed
        linear = weight.kind in ("linear", "expert")
        sent = formats.weight
        if formats.param_gather and formats.recipe and linear:
            sent = formats.recipe.weight_bytes
            cast = count * CAST.get(formats.recipe.name, 20.0)
            if sharding:
                cast /= ranks
            total.update += cast
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
    """The ranks that hold the same dense weights, and those that hold the same experts."""
    split = run.split
    return Group(split.data, split.tp), Group(split.expert_data, split.etp * split.ep)


def add_step_end(run: Workload, terms: Seconds, chunks: Sequence[Chunk], stage: Seconds, microbatches: int) -> None:
    """Gradients, weights and the optimizer, once a step; with FSDP weights and gradients of every micro batch."""
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
            # Behind the last backward pass and the first forward pass.
            group = min(split.pp, microbatches)
            exposed = _exposed(run, "overlap_grad_reduce", total.reduced, 2 / 3 * busy, group)
            exposed += _exposed(run, "overlap_param_gather", total.gathered, 1 / 3 * busy, group)
        terms[f"DP communication ({link})"] += exposed
    terms["optimizer"] += total.update / known.memory


def _stage_traffic(run: Workload, chunks: Sequence[Chunk]) -> _Traffic:
    """The traffic of all weights of a stage."""
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
    """Exposed seconds of FSDP, which gathers and reduces in every micro batch; what it updates is added to `total`."""
    formats = run.precision
    whole_step = microbatches * (2 * total.gathered + total.reduced)
    # Gathered weights are quantized anew, and gradients added by a kernel of their own.
    passes = 2 * formats.gradient
    if formats.quantized and not formats.param_gather:
        passes += 6
    total.update += microbatches * total.linear * passes
    return max(whole_step - microbatches * busy, run.speeds.fractions.contention * whole_step)


def _exposed(run: Workload, overlap: str, link: float, window: float, group: int) -> float:
    """Seconds of communication that the flag `overlap` leaves beside computation of `window` seconds."""
    if not run.on(overlap):
        return link
    return _behind(link, window, run.split.vp, group, run.speeds.fractions.contention)


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

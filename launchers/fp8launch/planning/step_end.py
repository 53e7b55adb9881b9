"""Time of a step beside its micro batches: gradients and weights between data parallel ranks, and the optimizer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from fp8launch.megatron.architecture import Chunk
from fp8launch.megatron.parameters import Weight, chunk_weights, layer_weights
from fp8launch.planning.collectives import Group, gather
from fp8launch.planning.layer_terms import Seconds
from fp8launch.planning.workload import BF16, Workload

# FP8 parameters are cast again from their fp32 masters, with a largest value across ranks for each: 245 ms for 7 * 10^9
# of them on H200, whatever the number of ranks (benchmarks/h200/NOTES.md, 2026-11-22).
CAST = {"tensorwise": 100.0, "delayed": 20.0, "blockwise": 40.0, "mxfp8": 10.0, "nvfp4": 20.0}
# Bytes of one weight that the optimizer's step passes besides: unscaling and scaling a state that is stored under a
# scale (TE's fused_adam.py: to fp32, times the scale, least and largest value, divided, stored), and the slow cast of
# a flat FP8 moment (562 ms a step more in all than fp32 moments: benchmarks/h200/2026-11-23-levels).
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


def add_step_end(run: Workload, terms: Seconds, chunks: Sequence[Chunk], stage: Seconds, microbatches: int) -> None:
    """Gradients, weights and the optimizer, once a step; with FSDP weights and gradients of every micro batch."""
    split, formats, known = run.split, run.precision, run.speeds
    total = _Traffic()
    for kind, number in Counter(run.model.kinds[number] for chunk in chunks for number in chunk.layers).items():
        total.add(_traffic(run, layer_weights(run.model, split, kind, 0)), number)
    for chunk in chunks:
        if chunk.mtp or chunk.embedding or chunk.output or chunk.final_norm:
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

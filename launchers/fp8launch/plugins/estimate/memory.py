"""The memory that training needs on one GPU, by term.

`estimate` predicts the peak that PyTorch will report, and what the device needs on top of it. Each term states how well
it is known: `exact` terms follow from sizes alone, `calibrated` terms contain a factor that was measured on an H200,
and `reserve` terms are fixed allowances. benchmarks/h200/memory.md compares estimates with real runs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from fp8launch.hardware.gpus import Gpu
from fp8launch.megatron.architecture import Architecture, Chunk, Division, divided_model
from fp8launch.megatron.model_arithmetic import Arguments, recomputed_modules, whole
from fp8launch.megatron.parameters import Weight, layer_weights, parameter_count, stage_weights
from fp8launch.plugins.estimate.activations import (
    LayerMemory,
    in_flight,
    layer_memory,
    offloaded_layers,
    recomputed_layers,
    saving,
)
from fp8launch.plugins.estimate.divided_run import DividedRun
from fp8launch.plugins.estimate.dtype_sizes import FP32, LayerKind, PrecisionSizes, precision

MIB = 2**20

# Calibrated: workspaces of cuBLAS and Transformer Engine, and other small allocations that stay.
WORKSPACE = 100 * MIB
# Allowances that were not measured: CUDA context, kernels of the libraries, NCCL's channels.
CONTEXT = 1024 * MIB
NCCL = 512 * MIB
# Allowance for memory that the allocator reserves and cannot use: 1.0 and 1.7 % of the peak in the measured runs with
# expandable segments.
FRAGMENTATION = 0.015
# A run fits if it needs at most this share of the device. Above it an allocator under pressure slows the run down or
# ends it: a measured run at 97 % was 12 % slower for a while, and then ran out of memory. `estimate`, `check` and
# `plan` all use this limit.
LIMIT = 0.94

# Dense runs on Hopper that only data parallelism divides were measured and agree to 0.3 %. Other runs are derived from
# the same sizes, from Megatron's schedules and from measured single layers; measured ones are up to 5.5 % off.
MEASURED_UNCERTAINTY = 0.02
DERIVED_UNCERTAINTY = 0.06
# No run with Mamba layers was measured, and none on a GPU that is too new.
UNMEASURED_UNCERTAINTY = 0.10

Certainty = Literal["exact", "calibrated", "reserve"]


@dataclass(frozen=True)
class Term:
    """One part of the memory: its bytes, how well it is known, and its content."""

    name: str
    bytes: float
    certainty: Certainty
    note: str


def _bytes(terms: Iterable[Term]) -> float:
    return sum(term.bytes for term in terms)


@dataclass(frozen=True)
class MemoryEstimate:
    """The memory of the fullest GPU of a run, which belongs to pipeline stage `stage` of `stages`, counted from 0.

    All terms add up to `total`, the memory that the device should have. Without the reserves they add up to `peak`,
    which PyTorch reports as max allocated. `uncertainty` is the fraction by which `peak` may be off.
    """

    stage: int
    stages: int
    uncertainty: float
    terms: tuple[Term, ...]

    @property
    def peak(self) -> float:
        return _bytes(term for term in self.terms if term.certainty != "reserve")

    @property
    def total(self) -> float:
        return _bytes(self.terms)

    def fits(self, gpu: Gpu) -> bool:
        """Return whether the total is within the limit of the device. A device of unknown size fits everything."""
        return not gpu.memory_gib or self.total <= usable_bytes(gpu)

    @property
    def least(self) -> float:
        """The least memory that the device must have: the smallest probable peak, and the CUDA context."""
        return self.peak * (1 - self.uncertainty) + CONTEXT


def usable_bytes(gpu: Gpu) -> float:
    """Return the bytes of a GPU that a run may need at most to fit."""
    return LIMIT * gpu.memory_gib * 1024 * MIB


def estimate(args: Arguments, world: int, microbatches: int, gpu: Gpu) -> MemoryEstimate | None:
    """Estimate the memory of the fullest GPU.

    `args` are Megatron's arguments by attribute name, `world` is the number of GPUs, and `microbatches` the number of
    micro batches that each pipeline processes in a step. Return None for a model that is not counted, or whose layers
    cannot be divided as the arguments say.
    """
    # `args` is read a few thousand times below, and may be a slow chain of mappings.
    args = dict(args)
    divided = divided_model(args, world)
    if divided is None:
        return None
    model, split, pipeline = divided
    run = _Run(args, model, split, precision(args, gpu), microbatches)
    uncertainty = DERIVED_UNCERTAINTY
    plain = not (model.experts or model.mamba or run.sharding or run.on("use_transformer_engine_op_fuser"))
    if plain and gpu.capability[0] == 9 and split.tp * split.pp * split.cp == 1:
        uncertainty = MEASURED_UNCERTAINTY
    elif model.mamba or not gpu.measured:
        uncertainty = UNMEASURED_UNCERTAINTY
    found: dict[tuple[object, ...], MemoryEstimate] = {}
    for rank, own in enumerate(pipeline):
        content = tuple(_content(run, chunk) for chunk in own)
        # Among stages with the same content, the first one has the most micro batches in flight.
        if content not in found:
            found[content] = MemoryEstimate(rank, split.pp, uncertainty, _stage(run, rank, own))
    return max(found.values(), key=lambda estimate: estimate.total)


def microbatches(args: Arguments, split: Division, global_batch: int) -> int:
    """Return the micro batches per step of each replica; at least one, even if the batch does not divide."""
    return max(global_batch // ((whole(args, "micro_batch_size") or 1) * split.replicas), 1)


def offloaded_bytes(
    args: Arguments, model: Architecture, split: Division, formats: PrecisionSizes, chunks: Sequence[Chunk]
) -> float:
    """Return the bytes of activations of one micro batch that are offloaded to host memory."""
    number = offloaded_layers(args)
    if not number:
        return 0.0
    run = _Run(args, model, split, formats, 1)
    return sum(run.layers[kind].kept for chunk in chunks for kind in _all_kinds(run, chunk)[:number])


def _content(run: _Run, chunk: Chunk) -> tuple[object, ...]:
    """Return what determines the memory of a chunk: kinds of layers, and what comes before and after them."""
    return _kinds(run, chunk), chunk.mtp, chunk.embedding, chunk.output, chunk.final_norm


def _kinds(run: _Run, chunk: Chunk) -> tuple[LayerKind, ...]:
    return tuple(map(run.kinds.__getitem__, chunk.layers))


def _all_kinds(run: _Run, chunk: Chunk) -> tuple[LayerKind, ...]:
    """Return the kinds of a chunk's layers, MTP layers last."""
    return _kinds(run, chunk) + run.mtp_kinds * chunk.mtp


@dataclass(frozen=True)
class _Run(DividedRun):
    microbatches: int

    @cached_property
    def layers(self) -> dict[LayerKind, LayerMemory]:
        """The memory of each kind of layer."""
        memory = {}
        for kind in {*self.kinds, *self.mtp_kinds}:
            how = saving(self.args, self.precision, kind[1])
            memory[kind] = layer_memory(self.model, self.split, self.micro_batch, kind[0], how)
        return memory

    @cached_property
    def weights(self) -> dict[LayerKind, tuple[Weight, ...]]:
        """The weights of a decoder layer of each kind."""
        return {
            kind: tuple(layer_weights(self.model, self.split, kind[0], self.kinds.index(kind)))
            for kind in set(self.kinds)
        }

    @cached_property
    def chunks(self) -> dict[object, tuple[float, float]]:
        """A cache of the memory of virtual stages by their layers, because most stages are alike."""
        return {}

    @cached_property
    def sharding(self) -> str:
        """The kinds of state that FSDP divides over data parallel ranks; empty without FSDP."""
        if self.on("use_torch_fsdp2"):
            return "optim_grads_params"
        if self.on("use_megatron_fsdp"):
            return str(self.args.get("data_parallel_sharding_strategy") or "optim_grads_params")
        return ""

    @cached_property
    def divides_optimizer(self) -> bool:
        return self.on("use_distributed_optimizer") or "optim" in self.sharding


def _data_ranks(run: _Run, weight: Weight) -> int:
    """Return the number of data parallel ranks that hold the same weight."""
    if weight.kind == "expert":
        return run.split.expert_data
    return run.split.data


def _stage(run: _Run, rank: int, chunks: Sequence[Chunk]) -> tuple[Term, ...]:
    """Return the terms of one pipeline stage at its fullest moment."""
    weights = _weights(run, chunks)
    tied = run.model.tied and any(chunk.embedding and chunk.output for chunk in chunks)
    states = [*_states(run, weights), *_workspaces(run, weights, tied)]
    passes = _passes(run, rank, chunks)
    update = _update(run, weights)
    largest = max(passes, update, key=_bytes)
    allocated = [term for term in (*states, *largest) if term.bytes > 0]
    peak = _bytes(allocated)
    reserve = [Term("CUDA context", CONTEXT, "reserve", "driver context and kernels of the libraries")]
    if run.split.data * run.split.tp * run.split.pp > 1:
        reserve.append(Term("NCCL", NCCL, "reserve", "channels"))
    reserve.append(Term("fragmentation", peak * FRAGMENTATION, "reserve", f"{FRAGMENTATION:.1%} of what is allocated"))
    return (*allocated, *reserve)


def _weights(run: _Run, chunks: Sequence[Chunk]) -> list[Weight]:
    """Return the weights of a pipeline stage. Equal layers are computed once and multiplied."""
    alike: Counter[LayerKind] = Counter()
    for chunk in chunks:
        alike.update(_kinds(run, chunk))
    weights = stage_weights(run.model, run.split, [chunk.around for chunk in chunks])
    for kind, number in alike.items():
        for weight in run.weights[kind]:
            weights.append(Weight(weight.shape, weight.kind, weight.copies * number, weight.layer))
    return weights


def _states(run: _Run, weights: Sequence[Weight]) -> list[Term]:
    """Return the terms of weights, their quantized copies, gradients and optimizer states."""
    formats = run.precision
    held = copied = gradients = optimizer = 0.0
    shards_copies = bool(run.sharding) and not run.on("keep_fp8_transpose_cache")
    instances = whole(run.args, "num_distributed_optimizer_instances") or 1
    for weight in weights:
        data, count = _data_ranks(run, weight), weight.count
        parameter, copy = formats.weight_bytes(weight, run.model.layers)
        shard = gradient_shard = optimizer_shard = 1
        if run.sharding == "optim_grads_params":
            shard = data
        if "grads" in run.sharding:
            gradient_shard = data
        if shards_copies:
            copy *= 1 / shard
        held += count * parameter / shard
        copied += count * copy
        gradients += count * formats.gradient / gradient_shard
        if run.divides_optimizer:
            optimizer_shard = max(data // instances, 1)
        optimizer += count * formats.optimizer_bytes(weight) / optimizer_shard
    if run.on("optimizer_cpu_offload"):
        fraction = run.args.get("optimizer_offload_fraction")
        if not isinstance(fraction, (int, float)):
            fraction = 1.0
        optimizer *= 1 - fraction
    terms = [
        Term("weights", held, "exact", formats.weights_note),
        Term(f"{formats.copies} copies of weights", copied, "exact", formats.copies_note),
        Term("gradients", gradients, "exact", formats.gradients_note),
        Term("optimizer", optimizer, "exact", formats.optimizer_note(run.split.data)),
    ]
    if run.sharding == "optim_grads_params":
        units = _gathered_units(run)
        terms.append(Term("FSDP gathered layers", units, "calibrated", "weights and gradients of two layers, whole"))
    return terms


def _gathered_units(run: _Run) -> float:
    """Return the bytes of two gathered layers with their gradients, and of the vocabulary's weight."""
    model, split = run.model, run.split
    layer = 0.0
    for kind in set(model.kinds):
        layer = max(layer, parameter_count(layer_weights(model, split, kind, 0)))
    vocabulary = model.vocab * model.hidden / split.tp
    return (2 * layer + vocabulary) * (run.precision.weight + run.precision.gradient)


def _update(run: _Run, weights: Sequence[Weight]) -> list[Term]:
    """Return the terms of the optimizer's step, which are allocated in place of activations, all in fp32.

    They are copies of 16-bit gradients, unless the optimizer reads these directly, and states with a scale, which
    Transformer Engine's FusedAdam unscales for all weights at once (pytorch/optimizers/fused_adam.py, step).
    """
    formats = run.precision
    elements = 0.0
    for weight in weights:
        ranks = 1
        if run.divides_optimizer:
            ranks = _data_ranks(run, weight)
        elements += weight.count / ranks
    copied = elements * FP32 * formats.copies_gradients
    unscaled = elements * FP32 * formats.scaled_states
    return [
        Term("fp32 gradients", copied, "exact", "during the optimizer step, in place of activations"),
        Term("unscaled optimizer states", unscaled, "exact", f"{formats.scaled_states} a parameter during the step"),
    ]


def _workspaces(run: _Run, weights: Sequence[Weight], tied: bool) -> list[Term]:
    """Return the terms of permanent buffers. Fused accumulation keeps an unused gradient per weight shape.

    If the output layer shares the embedding's weight (`tied`), its gradient waits for the embedding's gradient.
    """
    kinds = ["linear", "expert", "output"]
    if tied:
        kinds[-1] = "embedding"
    shapes = {weight.shape for weight in weights if len(weight.shape) == 2 and weight.kind in kinds}
    placeholders = 0.0
    if run.args.get("gradient_accumulation_fusion", True) and not run.sharding:
        placeholders = sum(map(math.prod, shapes)) * run.precision.weight
    return [
        Term("gradient placeholders", placeholders, "exact", "one for each shape of a weight"),
        Term("workspaces", WORKSPACE, "calibrated", "cuBLAS and Transformer Engine"),
    ]


def _passes(run: _Run, rank: int, chunks: Sequence[Chunk]) -> list[Term]:
    """Return the terms of activations at the fullest moment of forward and backward passes."""
    kept, work = zip(*(_chunk(run, chunk) for chunk in chunks), strict=True)
    group = whole(run.args, "microbatch_group_size_per_vp_stage")
    extra = int(run.on("overlap_moe_expert_parallel_comm"))
    counts = in_flight(kept, run.split.pp, rank, run.microbatches, group, extra)
    activations = sum(count * size for count, size in zip(counts, kept, strict=True))
    note = "one micro batch"
    if run.split.pp > 1 and len(chunks) > 1:
        note = f"{'+'.join(map(str, counts))} micro batches of the virtual stages in flight"
    elif max(counts) > 1:
        note = f"{max(counts)} micro batches in flight"
    head = 0.0
    if any(chunk.output for chunk in chunks):
        head = _loss(run)
    busy = max(work)
    terms = [Term("activations", activations, "exact", f"{note}, {_recompute_note(run)}")]
    if head >= busy:
        terms.append(Term("logits and loss", head, "exact", _loss_note(run)))
    else:
        terms.append(Term("running layer", busy, "calibrated", "gradients, dispatch and what is recomputed"))
    return terms


def _chunk(run: _Run, chunk: Chunk) -> tuple[float, float]:
    """Return the bytes that a virtual stage keeps per micro batch, and the most that running one layer needs."""
    kinds = _all_kinds(run, chunk)
    content = kinds, chunk.mtp
    if content not in run.chunks:
        run.chunks[content] = _chunk_of(run, [run.layers[kind] for kind in kinds], chunk.mtp)
    return run.chunks[content]


def _chunk_of(run: _Run, layers: Sequence[LayerMemory], mtp: int) -> tuple[float, float]:
    hidden = _hidden_state(run)
    kept, work = 0.0, max((layer.work + layer.rebuilt for layer in layers), default=0.0)
    recomputed = recomputed_layers(run.args, len(layers))
    if recomputed:
        size = 1
        if run.args.get("recompute_method") != "block":
            size = whole(run.args, "recompute_num_layers") or 1
        kept += -(-recomputed // size) * hidden
        work += size * max(layer.kept for layer in layers)
    kept += sum(layer.kept for layer in layers[max(recomputed, offloaded_layers(run.args)) :])
    if mtp:
        # Norms of embedding and hidden state, and their concatenation.
        kept += mtp * 4 * hidden
    if run.args.get("create_attention_mask_in_dataloader", True):
        kept += run.micro_batch * run.model.seq_length**2
    return kept, work


def _hidden_state(run: _Run) -> float:
    """Return the bytes of a micro batch's hidden state on one rank, between layers."""
    return run.own_tokens * run.model.hidden * run.precision.weight


def _logits(run: _Run) -> float:
    """Return the number of logits on one rank."""
    return run.tokens * run.model.vocab / run.split.tp


def _loss(run: _Run) -> float:
    """Return the bytes of final norm, logits and cross entropy at their peak. Each MTP layer keeps its own softmax.

    Measured: the unfused loss works in place on one fp32 copy of the bf16 logits; the native fusion holds two copies.
    """
    softmax, work = float(FP32), run.precision.weight
    if run.on("cross_entropy_loss_fusion"):
        if run.args.get("cross_entropy_fusion_impl") == "te":
            softmax = run.precision.weight
        else:
            work += FP32
    return 2 * _hidden_state(run) + _logits(run) * (softmax * (1 + run.model.mtp) + work)


def _loss_note(run: _Run) -> str:
    if run.on("cross_entropy_loss_fusion") and run.args.get("cross_entropy_fusion_impl") != "te":
        return f"{run.precision.dtype} logits and two fp32 copies, as the native fusion makes"
    return f"{run.precision.dtype} logits and what the loss makes of them"


def _recompute_note(run: _Run) -> str:
    if modules := recomputed_modules(run.args):
        return f"recomputing {', '.join(sorted(modules))}"
    if run.args.get("recompute_granularity") == "full":
        return "full recompute"
    return "no recompute"

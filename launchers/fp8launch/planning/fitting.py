"""Whether a layout divides the GPUs and fits their memory."""

from __future__ import annotations

from fp8launch.megatron.architecture import architecture, divided_model, division, microbatches
from fp8launch.megatron.dtype_sizes import precision
from fp8launch.megatron.memory import MIB, TIGHT, MemoryEstimate, estimate, offloaded_bytes
from fp8launch.megatron.model_arithmetic import Arguments, whole
from fp8launch.megatron.parameters import whole_model
from fp8launch.planning.change import Target

# Bytes of a parameter that no saving takes away without FSDP: weight and gradient.
LEAST_BYTES = 3
# For activations of one GPU: three quarters of half of the 480 GB of a Grace (17 TB of LPDDR5X in a GB200 NVL72).
HOST_BYTES = 180e9


def fits(memory: MemoryEstimate, target: Target) -> bool:
    return memory.total <= target.gpu.memory_gib * 1024 * MIB * TIGHT


def memory_of(args: Arguments, target: Target) -> MemoryEstimate | None:
    number = microbatches(args, division(args, target.gpus), target.global_batch)
    return estimate(args, target.gpus, number, target.gpu)


def fits_host(args: Arguments, target: Target) -> bool:
    """Whether the host's memory holds the activations that wait there, of a run without a pipeline."""
    divided = divided_model(args, target.gpus)
    if divided is None:
        return False
    model, split, pipeline = divided
    return offloaded_bytes(args, model, split, precision(args, target.gpu), pipeline[0]) <= HOST_BYTES


def divides(args: Arguments, target: Target) -> bool:
    """Whether a run's own layout divides the GPUs and the batch."""
    split, micro = division(args, target.gpus), whole(args, "micro_batch_size") or 1
    if split.tp * split.pp * split.cp * split.replicas != target.gpus:
        return False
    return target.global_batch % (micro * split.replicas) == 0


def parameters_of(args: Arguments) -> tuple[int, int]:
    """All parameters of a model, and those of its routed experts."""
    model = architecture(args)
    if model is None:
        return 0, 0
    total, active = whole_model(model)
    if model.experts is None:
        return total, 0
    return total, round((total - active) / (1 - model.experts.top_k / model.experts.count))


def is_too_large(args: Arguments, target: Target, total: int, routed: int) -> bool:
    """Whether weights and gradients alone exceed the GPU, so that nothing else need be computed."""
    if args.get("use_megatron_fsdp"):
        return False
    pp = whole(args, "pipeline_model_parallel_size") or 1
    dense = (total - routed) / (whole(args, "tensor_model_parallel_size") or 1)
    experts = routed / (whole(args, "expert_model_parallel_size") or 1)
    return (dense + experts) / pp * LEAST_BYTES > target.gpu.memory_gib * 1024 * MIB

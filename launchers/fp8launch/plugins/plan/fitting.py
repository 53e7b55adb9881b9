"""Whether a layout divides the GPUs and fits their memory."""

from __future__ import annotations

from fp8launch.megatron.architecture import architecture, divided_model, division
from fp8launch.megatron.model_arithmetic import Arguments, whole
from fp8launch.megatron.parameters import whole_model
from fp8launch.plugins.estimate.dtype_sizes import precision
from fp8launch.plugins.estimate.memory import MIB, MemoryEstimate, estimate, microbatches, offloaded_bytes
from fp8launch.plugins.plan.change import Target

# Least bytes per parameter without FSDP: an FP8 weight and a bf16 gradient.
LEAST_BYTES = 3
# Host memory for the activations of one GPU. A Grace has 480 GB (17 TB of LPDDR5X in a GB200 NVL72) and two GPUs; a
# quarter is left to everything else.
HOST_BYTES = 180e9


def memory_of(args: Arguments, target: Target) -> MemoryEstimate | None:
    """Estimate the memory of a run on the target; None if it is not modelled."""
    number = microbatches(args, division(args, target.gpus), target.global_batch)
    return estimate(args, target.gpus, number, target.gpu)


def fits_host(args: Arguments, target: Target) -> bool:
    """Whether the offloaded activations of a run without pipeline stages fit the host's memory."""
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
    """Return the number of all parameters of a model, and of the parameters of its routed experts."""
    model = architecture(args)
    if model is None:
        return 0, 0
    total, active = whole_model(model)
    if model.experts is None:
        return total, 0
    return total, round((total - active) / (1 - model.experts.top_k / model.experts.count))


def is_too_large(args: Arguments, target: Target, total: int, routed: int) -> bool:
    """Whether weights and gradients alone exceed the GPU. Much cheaper than an estimate, it comes first."""
    if args.get("use_megatron_fsdp"):
        return False
    pp = whole(args, "pipeline_model_parallel_size") or 1
    dense = (total - routed) / (whole(args, "tensor_model_parallel_size") or 1)
    experts = routed / (whole(args, "expert_model_parallel_size") or 1)
    return (dense + experts) / pp * LEAST_BYTES > target.gpu.memory_gib * 1024 * MIB

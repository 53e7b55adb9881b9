"""CUDA_DEVICE_MAX_CONNECTIONS: how many queues to a GPU keep the order of its work.

Source: megatron/training/arguments.py, validate_args.
"""

from __future__ import annotations

from fp8launch.hardware.quantization import Capability

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
# Megatron's flags that need several queues.
NEED_MANY = ("use_megatron_fsdp", "use_torch_fsdp2", "overlap_moe_expert_parallel_comm")
_BLACKWELL: Capability = (10, 0)


def connections(split: bool, many: bool, capability: Capability) -> str:
    """Return the value that a layout needs on a GPU.

    Before Blackwell, tensors or contexts that are `split` need a single queue, unless FSDP or the overlap of experts
    requires `many`.
    """
    if split and not many and capability < _BLACKWELL:
        return "1"
    return "32"

"""Present the recipe's GPU to Megatron and Transformer Engine on a machine without one.

The job's CPU mode (`injob/rank/compat/cpu.py`) already places tensors on the host and emulates streams, events and
random state. This module adds the properties of the recipe's GPU: its compute capability, memory and libraries.
"""
# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import collections
import contextlib
import functools
import types
from typing import Any

import torch
import torch.overrides
from torch.autograd.function import BackwardCFunction
from torch.utils._device import _device_constructors

from fp8launch.injob.rank.compat import cpu
from fp8launch.plugins.rehearse import cuda_graphs


class _Current(str):
    """The current device: the host if a tensor is placed on it, a number if it is formatted into `cuda:...`."""

    def __format__(self, specification: str) -> str:
        return "0"

    def __int__(self) -> int:
        return 0

    __index__ = __int__


_CURRENT = _Current("cpu")


def set_count(gpus: int) -> None:
    """Report a node with `gpus` GPUs."""
    torch.cuda.device_count = lambda: gpus


def install(capability: tuple[int, int], memory_gib: float, cuda_version: str) -> None:
    """Report a GPU with these properties and this CUDA version. Call this after the CPU mode is installed."""
    cuda: Any = torch.cuda
    properties = types.SimpleNamespace(
        name="rehearsal",
        major=capability[0],
        minor=capability[1],
        total_memory=int(memory_gib * 2**30),
        multi_processor_count=132,
    )
    cuda.current_device = lambda: _CURRENT
    cuda.get_device_capability = lambda device=None: capability
    cuda.get_device_properties = lambda device=None: properties
    cuda.memory_stats = lambda device=None: collections.defaultdict(int)
    cuda.memory_allocated = cuda.max_memory_allocated = lambda device=None: 0
    cuda.memory_reserved = cuda.max_memory_reserved = lambda device=None: 0
    cuda.mem_get_info = lambda device=None: (properties.total_memory, properties.total_memory)
    cuda.empty_cache = cuda.ipc_collect = lambda: None
    cuda.Stream.priority_range = staticmethod(lambda: (0, -5))
    cuda.device = lambda *_: contextlib.nullcontext()
    cuda.is_bf16_supported = lambda *_, **__: True
    torch.version.cuda = ".".join(cuda_version.split(".")[:2])
    cuda.nvtx.range_push = cuda.nvtx.range_pop = lambda *_: None
    # Tensors report that they are on a GPU, because code asserts it.
    torch.Tensor.is_cuda = property(lambda tensor: True)
    torch.Tensor.cuda = lambda tensor, *_, **__: tensor
    cuda_graphs.install()
    _through_backward()
    _on_the_host()
    _with_defined_memory()


def _through_backward() -> None:
    """Keep the CPU mode in recomputation, although torch suspends it in `torch.autograd.backward`."""
    apply = BackwardCFunction.apply
    mode = cpu.HostMemory()

    def in_mode(self: Any, *arguments: Any) -> Any:
        if torch.overrides._get_current_function_mode_stack():
            return apply(self, *arguments)
        with mode:
            return apply(self, *arguments)

    BackwardCFunction.apply = in_mode


_FACTORIES = (
    "tensor", "as_tensor", "zeros", "ones", "full", "arange", "rand", "randn", "randint", "eye", "zeros_like",
    "ones_like", "full_like", "rand_like", "randn_like",
)  # fmt: skip


def _on_the_host() -> None:
    """Create new tensors on the host, even in custom operators, where torch suspends the CPU mode."""

    def hosted(original: Any) -> Any:
        @functools.wraps(original)
        def make(*arguments: Any, **options: Any) -> Any:
            return original(*arguments, **_placed(options))

        return make

    # torch remembers which functions `with torch.device("meta")` affects. Let it find the originals before they are
    # wrapped.
    _device_constructors()
    for name in _FACTORIES:
        setattr(torch, name, hosted(getattr(torch, name)))
    # Quantized tensors set their device explicitly, and torch cannot copy such a tensor for a GPU that it lacks.
    torch.Tensor._make_wrapper_subclass = staticmethod(hosted(torch.Tensor._make_wrapper_subclass))


def _with_defined_memory() -> None:
    """Fill new tensors with zeros: kernels that do not run leave them unchanged, and garbage may be infinite."""
    original, original_like = torch.empty, torch.empty_like

    def defined(tensor: torch.Tensor) -> torch.Tensor:
        # A kernel's workspace is large and allocated for each call, and nothing reads it.
        workspace = tensor.dtype is torch.uint8 and tensor.dim() == 1
        if tensor.device.type != "meta" and type(tensor) is torch.Tensor and not workspace:
            with torch.no_grad():
                (tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor).zero_()
        return tensor

    def empty(*shape: Any, **options: Any) -> Any:
        return defined(original(*shape, **_placed(options)))

    def empty_like(tensor: torch.Tensor, **options: Any) -> Any:
        return defined(original_like(tensor, **_placed(options)))

    torch.empty, torch.empty_like = empty, empty_like


def _placed(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a tensor factory with the host as the device."""
    if options.get("device") is not None and str(options["device"]) != "meta":
        options["device"] = "cpu"
    options.pop("pin_memory", None)
    return options

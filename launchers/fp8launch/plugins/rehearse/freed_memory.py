"""Detect reads of memory that Megatron has freed although tensors still refer to it.

Megatron frees such memory when it offloads tensors or recomputes outputs. On a GPU, a kernel that reads freed memory
ends the run. On the host, the read would crash the process without a message, so raise an error first.
"""
# mypy: disable-error-code="import-not-found, misc"

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

# Name prefixes of operators that do not read values.
SIZES_ONLY = ("empty", "new_", "set_", "resize", "zeros_like", "ones_like")
ILLEGAL = "CUDA error: an illegal memory access was encountered"


class _Freed(TorchDispatchMode):
    """Refuses operators that read freed memory. Views and size queries are allowed."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        reads = not func.is_view and not func.overloadpacket.__name__.startswith(SIZES_ONLY)
        if reads and any(map(_is_freed, tree_iter((args, kwargs)))):
            raise RuntimeError(ILLEGAL)
        return func(*args, **kwargs)


def _is_freed(value: Any) -> bool:
    plain = type(value) in (torch.Tensor, torch.nn.Parameter) and value.device.type != "meta"
    return plain and value.numel() > 0 and value.untyped_storage().nbytes() == 0


@contextlib.contextmanager
def guarded(offloads: bool) -> Iterator[None]:
    """Refuse reads of freed memory if activations are offloaded. Nothing else frees memory that is read later."""
    with _Freed() if offloads else contextlib.nullcontext():
        yield


def offload_from_the_host(handler: Any) -> None:
    """Make Megatron 0.19 offload tensors even though they are already on the host."""

    def manages(tensor: torch.Tensor) -> bool:
        return not isinstance(tensor, torch.nn.Parameter)

    if hasattr(handler, "_can_manage_tensor_for_offload"):
        handler._can_manage_tensor_for_offload = staticmethod(manages)


def share_storage(output: torch.Tensor, again: torch.Tensor) -> None:
    """Fill the freed storage of `output`, which all its views share, with the recomputed values of `again`."""
    storage, source = output.untyped_storage(), again.untyped_storage()
    storage.resize_(source.nbytes())
    storage.copy_(source)

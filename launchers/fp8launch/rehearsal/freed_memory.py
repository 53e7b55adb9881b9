"""Memory that offloading frees while something else still holds the tensor: a kernel that reads it ends a run on a GPU.

On the host it would end the process instead.
"""
# mypy: disable-error-code="import-not-found, misc"

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

# Operators that read no values, by the start of their names.
SIZES_ONLY = ("empty", "new_", "set_", "resize", "zeros_like", "ones_like")
ILLEGAL = "CUDA error: an illegal memory access was encountered"


class _Freed(TorchDispatchMode):
    """Refuses operators that read freed memory; views and what asks for sizes do not read."""

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
    """Refuse to read freed memory, where activations are offloaded: others free none that is read."""
    with _Freed() if offloads else contextlib.nullcontext():
        yield


def offload_from_the_host(handler: Any) -> None:
    """Let Megatron 0.19 offload tensors although they are on the host already."""

    def manages(tensor: torch.Tensor) -> bool:
        return not isinstance(tensor, torch.nn.Parameter)

    if hasattr(handler, "_can_manage_tensor_for_offload"):
        handler._can_manage_tensor_for_offload = staticmethod(manages)

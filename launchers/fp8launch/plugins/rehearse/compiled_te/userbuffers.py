"""Buffers for tensor parallel transfers that overlap with GEMMs: `--tp-comm-overlap`.

Interface: transformer_engine/pytorch/csrc/extensions/comm_gemm_overlap.cpp.
"""
# mypy: disable-error-code="import-not-found"

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class CommOverlapHelper:
    """The helper that sets up the buffers with torch's process groups."""

    def __init__(self, *groups: Any) -> None:
        self.groups = groups


class CommOverlap:
    """A buffer with the shape of a layer's input or output over all tensor parallel ranks."""

    def __init__(
        self, buffer_shape: Sequence[int], buffer_dtype: torch.dtype, helper: Any, tp_size: int, *_: Any, **__: Any
    ) -> None:
        self.shape, self.ranks, self.rank = list(buffer_shape), tp_size, 0
        self.data = torch.zeros(tuple(buffer_shape), dtype=buffer_dtype)

    def is_fp8_ubuf(self) -> bool:
        """Return whether the buffer holds bytes."""
        return bool(self.data.dtype == torch.uint8)

    def is_atomic_gemm(self) -> bool:
        """Always return False."""
        return False

    is_p2p_overlap = with_cublasmp = is_atomic_gemm

    def _part(self, local_chunk: bool) -> torch.Tensor:
        flat = self.data.reshape(-1)
        return flat[: flat.numel() // self.ranks] if local_chunk else flat

    def copy_into_buffer(self, tensor: torch.Tensor, local_chunk: bool = False) -> None:
        """Fill the buffer, or this rank's part of it."""
        part = self._part(local_chunk)
        if tensor.numel() != part.numel():
            raise RuntimeError(
                f"Tried to copy an invalid tensor into a local chunk of a Userbuffers buffer (input_ubuf_size="
                f"{tensor.numel()}, expected_size={part.numel()})"
            )
        if tensor.element_size() != part.element_size():
            raise RuntimeError(
                f"Tried to copy data into a Userbuffers buffer but dtypes are not compatible (input dtype has "
                f"{tensor.element_size()} bytes, UB dtype has {part.element_size()} bytes)"
            )
        if tensor.dtype == part.dtype:
            part.copy_(tensor.detach().reshape(-1))

    def get_buffer(self, local_chunk: bool = False, shape: Sequence[int] | None = None) -> torch.Tensor:
        """Return the buffer, or this rank's part of it, in a shape with the same number of elements."""
        part = self._part(local_chunk)
        if shape is None:
            rows = self.shape[0] // self.ranks if local_chunk else self.shape[0]
            return part.reshape(rows, -1)
        return part.reshape(tuple(shape))

    def get_communication_stream(self) -> tuple[Any, Any]:
        """Return the streams for sending and receiving."""
        stream = torch.cuda.current_stream()
        return stream, stream


class CommOverlapP2P(CommOverlap):
    """The same buffer for transfers in a ring between neighbors."""

"""Adam's kernels: the type checks on parameters and states, without the update.

Source: transformer_engine/common/multi_tensor/adam.cu, releases 2.9 to 2.18.
"""
# mypy: disable-error-code="import-not-found"

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

Lists = Sequence[Sequence[Any]]


def _require(dtype: torch.dtype, tensors: Sequence[Any], what: str) -> None:
    for number, tensor in enumerate(tensors):
        if tensor.dtype != dtype:
            raise RuntimeError(
                f"Assertion failed: {what} tensor {number} has dtype={tensor.dtype}, but expected dtype={dtype}"
            )


def _require_same_moments(first: Sequence[Any], second: Sequence[Any]) -> None:
    for number, (one, other) in enumerate(zip(first, second, strict=True)):
        if one.dtype != other.dtype or one.dtype not in (torch.float32, torch.bfloat16):
            raise RuntimeError(
                "Assertion failed: First and second moment tensors must both be Float32 or both be BFloat16, but "
                f"tensor {number} has first moment dtype={one.dtype} and second moment dtype={other.dtype}"
            )


def multi_tensor_adam(chunk: int, noop: Any, lists: Lists, *_: Any) -> None:
    """Check lists of gradients, parameters, both moments and, optionally, fp32 master parameters."""
    _require_same_moments(lists[2], lists[3])
    if len(lists) > 4:
        _require(torch.float32, lists[4], "Master param")


def multi_tensor_adam_param_remainder(chunk: int, noop: Any, lists: Lists, *_: Any) -> None:
    """Check lists with bf16 parameters and the 16 bits that they lack compared with fp32."""
    _require(torch.bfloat16, lists[1], "Param")
    _require_same_moments(lists[2], lists[3])
    _require(torch.int16, lists[4], "Param remainder")


def multi_tensor_adam_fp8(chunk: int, noop: Any, lists: Lists, *_: Any) -> None:
    """Check lists with FP8 parameters, in which everything else is in fp32."""
    for place, what in enumerate(("First moment", "Second moment", "Master param", "Scale", "Absmax", "Scale-inverse")):
        _require(torch.float32, lists[2 + place], what)


def functions() -> dict[str, Any]:
    """Return the stand-ins by the names that Transformer Engine calls."""
    return {
        "multi_tensor_adam": multi_tensor_adam,
        "multi_tensor_adam_param_remainder": multi_tensor_adam_param_remainder,
        "multi_tensor_adam_fp8": multi_tensor_adam_fp8,
    }

"""Quantized tensors without quantization kernels.

Transformer Engine's Python classes hold quantized data as bytes and scales. Here the bytes are whatever was allocated.
The high-precision tensor is kept alongside, so that later operations compute with real values if they can (a router
needs them to spread its tokens). If the values are gone, for instance after a gather of bytes, small random values of
the right shape replace them.
"""
# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import functools
import importlib
import inspect
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from fp8launch.plugins.rehearse.noise import noise

SOURCE = "_rehearsal_source"


def quantize(tensor: Any, quantizer: Any, output: Any = None, noop: Any = None) -> Any:
    """Return a tensor as `quantizer` would make it, or fill `output` with it."""
    plain = values(tensor)
    if quantizer is None:
        return plain if output is None else output.copy_(plain)
    if output is None:
        shape = plain.shape
        output = _empty(quantizer, shape, plain.dtype, plain.requires_grad)
    _keep(output, plain)
    return output


def _empty(quantizer: Any, shape: Sequence[int], dtype: torch.dtype, requires_grad: bool = False) -> Any:
    """Return an empty quantized tensor, or a storage without autograd if the quantizer is internal."""
    if not getattr(quantizer, "internal", False):
        return quantizer.make_empty(shape, dtype=dtype, device="cpu", requires_grad=requires_grad)
    quantizer.internal = False
    try:
        made = quantizer.make_empty(shape, dtype=dtype, device="cpu")
    finally:
        quantizer.internal = True
    return _storage_of(made)


def _storage_of(tensor: Any) -> Any:
    """Return the bare storage with the metadata of a quantized tensor."""
    storage = next(kind for kind in type(tensor).__mro__ if kind.__name__.endswith("TensorStorage"))
    metadata = tensor.get_metadata()
    return storage(**metadata)


def _keep(quantized: Any, plain: torch.Tensor) -> None:
    setattr(quantized, SOURCE, plain.detach())


def source(quantized: Any) -> torch.Tensor | None:
    """Return the high-precision tensor behind a quantized one; None if there is none or Megatron freed its memory."""
    found: torch.Tensor | None = getattr(quantized, SOURCE, None)
    if found is not None and found.numel() and not found.untyped_storage().size():
        return None
    return found


def values(tensor: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return the values of a tensor in high precision."""
    if tensor is None:
        raise ValueError("an operand is missing")
    found = source(tensor)
    if found is not None and tuple(found.shape) == _shape(tensor):
        return found if dtype is None else found.to(dtype)
    if is_quantized(tensor):
        wanted = dtype or getattr(tensor, "dtype", None) or torch.bfloat16
        return noise(_shape(tensor), wanted)
    plain: torch.Tensor = tensor.detach()
    return plain if dtype is None else plain.to(dtype)


def _shape(tensor: Any) -> tuple[int, ...]:
    """Return the shape that the compiled code sees. A bare FP8 storage with only its transpose reports a flat one."""
    transpose: Any = getattr(tensor, "_transpose", None)
    if torch.is_tensor(transpose) and getattr(tensor, "_data", None) is None:
        return (*transpose.shape[1:], transpose.shape[0])
    return tuple(tensor.size())


def plain_type(tensor: Any) -> torch.dtype:
    """Return the high-precision type of a tensor that may be quantized."""
    dtype = getattr(tensor, "dtype", torch.bfloat16)
    return dtype if isinstance(dtype, torch.dtype) and dtype.is_floating_point else torch.bfloat16


def is_quantized(tensor: Any) -> bool:
    """Return whether a tensor is one of Transformer Engine's quantized tensors or storages."""
    return any(kind.__name__ == "QuantizedTensorStorage" for kind in type(tensor).__mro__)


def finished(tensor: torch.Tensor, quantizer: Any, output: Any = None) -> Any:
    """Return a fused kernel's result: `tensor`, quantized if there is a quantizer, in `output` if it is given."""
    if quantizer is not None:
        return quantize(tensor, quantizer, output)
    if output is not None:
        output.copy_(tensor)
        return output
    return tensor


def split_quantize(tensor: torch.Tensor, sections: Sequence[int], quantizers: Iterable[Any], **_: Any) -> list[Any]:
    """Quantize sections along the first dimension, each with its own quantizer. Leave out rows after the last.

    Source: transformer_engine/pytorch/csrc/extensions/cast.cpp, split_quantize.
    """
    rows = [int(section) for section in sections]
    flat = tensor.reshape(-1, tensor.shape[-1])
    if sum(rows) > len(flat):
        raise RuntimeError(f"Attempted to split tensor with shape={list(flat.shape)} with split_sections={rows}")
    parts = torch.split(flat[: sum(rows)], rows)
    return [quantize(part, quantizer) for part, quantizer in zip(parts, quantizers, strict=True)]


def dequantize(tensor: Any, dtype: Any) -> torch.Tensor:
    """Return values in high precision; `dtype` is Transformer Engine's number for the type."""
    return values(tensor, TORCH_TYPES.get(int(dtype)))


# Transformer Engine's data types by number (transformer_engine.h, NVTEDType).
TORCH_TYPES = {
    0: torch.uint8,
    2: torch.int32,
    3: torch.int64,
    4: torch.float32,
    5: torch.float16,
    6: torch.bfloat16,
    7: torch.float8_e4m3fn,
    8: torch.float8_e5m2,
}


@functools.cache
def _accepted(tensor_class: type) -> frozenset[str]:
    """Return the constructor's argument names. Cached, because a rehearsal creates thousands of tensors."""
    return frozenset(inspect.signature(tensor_class.__new__).parameters)


def create_empty_quantized_tensor(
    quantizer: Any, shape: Sequence[int], dtype: torch.dtype, device: Any = None, pin_memory: bool = False
) -> Any:
    """Create a quantized tensor with the right storage but no values (the C++ half of `Quantizer.make_empty`)."""
    name = type(quantizer).__name__
    kind = _CLASSES.get(name)
    if kind is None:
        raise NotImplementedError(f"no stand-in for tensors of {name}")
    module, class_name = kind
    tensor_class = getattr(importlib.import_module(f"transformer_engine.pytorch.tensor.{module}"), class_name)
    rows, columns = bool(quantizer.rowwise_usage), bool(quantizer.columnwise_usage)
    if class_name == "Float8Tensor":
        turned = [shape[-1], *shape[:-1]] if len(shape) else []
        return tensor_class(
            shape=shape,
            dtype=dtype,
            data=torch.zeros(tuple(shape), dtype=torch.uint8) if rows or not columns else None,
            fp8_scale_inv=torch.ones(1),
            fp8_dtype=quantizer.dtype,
            data_transpose=torch.zeros(tuple(turned), dtype=torch.uint8) if columns else None,
            quantizer=quantizer,
        )
    row_shape = _packed(shape) if class_name == "NVFP4Tensor" else tuple(shape)
    if class_name == "NVFP4Tensor":
        # Transpose it as a matrix: a last dimension that is a batch of one could not be halved.
        column_shape = _packed((shape[-1], math.prod(shape[:-1])))
    else:
        column_shape = tuple(quantizer.get_columnwise_shape(tuple(shape)))
    scales = torch.float32 if class_name == "Float8BlockwiseQTensor" else torch.uint8
    parts: dict[str, Any] = {
        "rowwise_data": torch.zeros(row_shape, dtype=torch.uint8) if rows else None,
        "rowwise_scale_inv": _scales(quantizer, shape, False, scales) if rows else None,
        "columnwise_data": torch.zeros(column_shape, dtype=torch.uint8) if columns else None,
        "columnwise_scale_inv": _scales(quantizer, shape, True, scales) if columns else None,
        "amax_rowwise": torch.ones(1) if rows else None,
        "amax_columnwise": torch.ones(1) if columns else None,
        "fp8_dtype": quantizer.dtype,
        "fp4_dtype": quantizer.dtype,
        "quantizer": quantizer,
        "is_2D_scaled": getattr(quantizer, "block_scaling_dim", 1) == 2,
        "with_gemm_swizzled_scales": False,
    }
    accepted = _accepted(tensor_class)
    return tensor_class(
        shape=tuple(shape), dtype=dtype, **{name: part for name, part in parts.items() if name in accepted}
    )


_CLASSES = {
    "Float8Quantizer": ("float8_tensor", "Float8Tensor"),
    "Float8CurrentScalingQuantizer": ("float8_tensor", "Float8Tensor"),
    "MXFP8Quantizer": ("mxfp8_tensor", "MXFP8Tensor"),
    "Float8BlockQuantizer": ("float8_blockwise_tensor", "Float8BlockwiseQTensor"),
    "NVFP4Quantizer": ("nvfp4_tensor", "NVFP4Tensor"),
}


def _packed(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape in bytes, each of which holds two four-bit values."""
    return (*shape[:-1], shape[-1] // 2)


def _scales(quantizer: Any, shape: Sequence[int], columnwise: bool, dtype: torch.dtype) -> torch.Tensor:
    return torch.ones(tuple(quantizer.get_scale_shape(tuple(shape), columnwise)), dtype=dtype)

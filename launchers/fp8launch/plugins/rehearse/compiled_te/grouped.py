"""Grouped tensors and their GEMMs: one buffer for the tokens of all experts of a rank.

Transformer Engine uses them if the host does not know how many tokens each expert gets, as inside a CUDA graph.
"""
# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

from fp8launch.plugins.rehearse.compiled_te.functions import check_fp8, generic_gemm
from fp8launch.plugins.rehearse.compiled_te.tensors import SOURCE, is_quantized, source, values
from fp8launch.plugins.rehearse.noise import noise

Tensor: TypeAlias = "torch.Tensor"

# The names say which argument is a list with one tensor per group: none, the left operand, or the result.
GEMMS = tuple(f"te_general_grouped_gemm_for_{kind}" for kind in ("grouped_tensor", "discrete_in", "discrete_out"))


def group_quantize(
    x: Tensor, quantizer: Any, groups: int, first_dims: Any = None, tensor_offsets: Any = None, output: Any = None,
    **_: Any,
) -> Any:  # fmt: skip
    """Quantize the rows of all groups into one tensor: `output`, or a new one."""
    if output is not None:
        setattr(output, SOURCE, x.detach())
        return output
    height, width = x.shape
    rowwise, columnwise = bool(quantizer.rowwise_usage), bool(quantizer.columnwise_usage)
    kind = type(quantizer).__name__
    if kind not in SCALE_TYPES:
        raise NotImplementedError(f"no stand-in for grouped tensors of {kind}")
    # NVFP4 stores two four-bit values in a byte.
    size = height * width // (2 if kind == "NVFP4Quantizer" else 1)

    def scales(by_column: bool) -> Tensor:
        shape = (groups,) if kind in ONE_SCALE else quantizer.get_scale_shape((height, width), by_column)
        return torch.ones(math.prod(shape), dtype=SCALE_TYPES[kind])

    module = importlib.import_module("transformer_engine.pytorch.tensor.grouped_tensor")
    made_class = module.GroupedTensorStorage if quantizer.internal else module.GroupedTensor
    made = made_class(
        (height, width),
        x.dtype,
        num_tensors=groups,
        quantizer=quantizer,
        data=torch.zeros(size, dtype=torch.uint8) if rowwise else None,
        columnwise_data=torch.zeros(size, dtype=torch.uint8) if columnwise else None,
        scale_inv=scales(False) if rowwise else None,
        columnwise_scale_inv=scales(True) if columnwise else None,
        amax=torch.ones(groups) if rowwise and kind == "NVFP4Quantizer" else None,
        columnwise_amax=torch.ones(groups) if columnwise and kind == "NVFP4Quantizer" else None,
        first_dims=first_dims,
        tensor_offsets=tensor_offsets,
        with_gemm_swizzled_scales=bool(getattr(quantizer, "optimize_for_gemm", False)),
    )
    setattr(made, SOURCE, x.detach())
    return made


SCALE_TYPES = {
    "MXFP8Quantizer": torch.uint8,
    "NVFP4Quantizer": torch.uint8,
    "Float8BlockQuantizer": torch.float32,
    "Float8CurrentScalingQuantizer": torch.float32,
}
# Quantizers with one scale per group.
ONE_SCALE = ("Float8CurrentScalingQuantizer",)


def bgrad_group_quantize(
    grad: Tensor, quantizer: Any, groups: int, first_dims: Any = None, tensor_offsets: Any = None, **_: Any
) -> tuple[Any, Tensor]:
    """Return the quantized gradient, and the bias gradient of each group."""
    made = group_quantize(grad, quantizer, groups, first_dims, tensor_offsets)
    return made, torch.stack([part.float().sum(0) for part in parts(made)]).to(grad.dtype)


def splits_to_offsets_multi(
    splits: Tensor,
    device: Any,
    strides: Sequence[int],
    include_leading_zero: Sequence[bool],
    dtypes: Sequence[torch.dtype],
    **_: Any,
) -> tuple[Tensor, list[Tensor]]:
    """Return the splits, and their boundaries in units of each stride, with a leading zero if requested."""
    ends = splits.to(torch.int64).cumsum(0)
    starts = torch.cat([ends.new_zeros(1), ends])
    found = [
        ((starts if leading else ends) * stride).to(dtype)
        for stride, leading, dtype in zip(strides, include_leading_zero, dtypes, strict=True)
    ]
    return splits, found


def parts(operand: Any) -> list[Tensor]:
    """Return the matrices of a grouped tensor, or of a list with one tensor per group."""
    if isinstance(operand, (list, tuple)):
        return [values(each) for each in operand]
    height, width = operand.logical_shape
    plain = source(operand)
    if plain is None and operand.quantizer is None:
        plain = operand.rowwise_data.view(height, width)
    if plain is None:
        plain = noise((height, width), operand.fake_dtype)
    rows = group_rows(operand)
    return list(torch.split(plain.reshape(height, width)[: sum(rows)], rows))


def group_rows(grouped: Any) -> list[int]:
    """Return the number of rows of each group. The buffer may have more rows than all groups together."""
    if grouped.first_dims is None:
        return [grouped.logical_shape[0] // grouped.num_tensors] * grouped.num_tensors
    return [int(rows) for rows in grouped.first_dims.tolist()]


def _in_low_precision(operand: Any) -> bool:
    if isinstance(operand, (list, tuple)):
        return any(is_quantized(each) for each in operand)
    return operand.quantizer is not None


def grouped_gemm(
    a: Any, transa: bool, b: Any, transb: bool, out: Any, bias: Any, bias_scale: Any, alpha: Tensor, beta: Tensor,
    *_: Any,
) -> Any:  # fmt: skip
    """Run one GEMM per group. `a` or `out` may be lists with one tensor per group."""
    accumulate = bool(beta.reshape(-1)[0])
    targets = list(out) if isinstance(out, (list, tuple)) else parts(out)
    biases = parts(bias) if bias is not None else [None] * len(targets)
    quantized = _in_low_precision(a) or _in_low_precision(b)
    for left, right, target, one in zip(parts(a), parts(b), targets, biases, strict=True):
        if right.numel() == 0:
            # Without tokens, the gradient is zero, or the result has no rows.
            if not accumulate:
                target.zero_()
            continue
        if quantized:
            check_fp8(right.T if transb else right, left.T if transa else left)
        result, _bias_gradient, _before, _extra = generic_gemm(left, transa, right, transb, None, None, None)
        result = result.to(target.dtype).reshape(target.shape)
        if one is not None:
            result = result + one.to(result.dtype)
        target.add_(result) if accumulate else target.copy_(result)
    return out


def functions() -> dict[str, Any]:
    """Return the stand-ins by the names that Transformer Engine calls."""
    quantization = {each.__name__: each for each in (group_quantize, bgrad_group_quantize, splits_to_offsets_multi)}
    return {**quantization, **dict.fromkeys(GEMMS, grouped_gemm)}

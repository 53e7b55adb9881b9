"""flash-linear-attention's gated delta rule and convolution: outputs and gradients of the right shapes.

Interface: fla-org/flash-linear-attention, release 0.4 (`fla/modules`, `fla/ops/gated_delta_rule/chunk.py`).
"""
# mypy: disable-error-code="import-not-found"

from __future__ import annotations

from typing import Any

import torch

from fp8launch.plugins.rehearse.noise import result_of
from fp8launch.plugins.rehearse.packages import stated, used

WIDEST_HEAD = 256


def l2norm(x: torch.Tensor, eps: float = 1e-6, output_dtype: torch.dtype | None = None) -> torch.Tensor:
    """Divide the last dimension by its length."""
    return (x * torch.rsqrt(x.float().square().sum(-1, keepdim=True) + eps)).to(output_dtype or x.dtype)


def causal_conv1d(
    x: torch.Tensor, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None, *_: Any, **__: Any
) -> tuple[torch.Tensor, None]:
    """Convolution over (batch, sequence, channels)."""
    used("fla", "flash-linear-attention's kernels")
    inputs = stated(weight, bias)
    for each in inputs:
        if each.shape[0] != x.shape[-1]:
            raise ValueError(f"a convolution of {each.shape[0]} channels over {x.shape[-1]}")
    return result_of(x.shape, x.dtype, x, *inputs), None


def chunk_gated_delta_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, *_: Any, **__: Any
) -> tuple[torch.Tensor, None]:
    """Linear attention over (batch, sequence, heads, head size)."""
    used("fla", "flash-linear-attention's kernels")
    if q.shape != k.shape or q.shape[:3] != v.shape[:3] or not g.shape == beta.shape == q.shape[:3]:
        shapes = ", ".join(str(tuple(each.shape)) for each in (q, k, v, g, beta))
        raise ValueError(f"query, key, value, gate and beta do not fit together: {shapes}")
    if k.shape[-1] > WIDEST_HEAD:
        raise AssertionError("current kernel does not support head dimension larger than 256.")
    return result_of(v.shape, q.dtype, q, k, v, g, beta), None

"""FlashAttention 2: outputs and gradients of the right shapes, and the checks of its interface.

Interface: Dao-AILab/flash-attention, `flash_attn/flash_attn_interface.py`, release 2.8.
"""
# mypy: disable-error-code="import-not-found, no-untyped-call, misc"

from __future__ import annotations

from typing import Any

import torch

from fp8launch.plugins.rehearse.noise import noise
from fp8launch.plugins.rehearse.packages import used

WIDEST_HEAD = 256


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    used("flash_attn", "FlashAttention's kernels")
    if q.dtype not in (torch.float16, torch.bfloat16):
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    if q.shape[-1] > WIDEST_HEAD:
        raise RuntimeError("FlashAttention forward only supports head dimension at most 256")
    if q.shape[-2] % k.shape[-2]:
        raise RuntimeError("Number of heads in key/value must divide number of heads in query")


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(q, k, v)
        return noise((*q.shape[:-1], v.shape[-1]), q.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(torch.zeros_like(each) for each in ctx.saved_tensors)


def flash_attn_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Any = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Attention over (batch, sequence, heads, head size)."""
    _check(q, k, v)
    made: torch.Tensor = _Attention.apply(q, k, v)
    return made


def flash_attn_varlen_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int,
    max_seqlen_k: int, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Any = None,
    deterministic: bool = False, return_attn_probs: bool = False, block_table: Any = None,
) -> torch.Tensor:  # fmt: skip
    """Attention over (tokens, heads, head size)."""
    _check(q, k, v)
    made: torch.Tensor = _Attention.apply(q, k, v)
    return made


def _flash_attn_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any) -> tuple[Any, ...]:
    """Return output, log-sum-exp over (batch, heads, sequence), probabilities and random state."""
    _check(q, k, v)
    out = noise((*q.shape[:-1], v.shape[-1]), q.dtype)
    return out, torch.zeros(q.shape[0], q.shape[2], q.shape[1]), None, torch.zeros(2, dtype=torch.int64)


def _flash_attn_varlen_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any
) -> tuple[Any, ...]:
    """Return output, log-sum-exp over (heads, tokens), probabilities and random state."""
    _check(q, k, v)
    out = noise((*q.shape[:-1], v.shape[-1]), q.dtype)
    return out, torch.zeros(q.shape[1], q.shape[0]), None, torch.zeros(2, dtype=torch.int64)


def _backward(*arguments: Any, **named: Any) -> torch.Tensor:
    """Fill the three gradients that were passed in."""
    for name in ("dq", "dk", "dv"):
        if torch.is_tensor(named.get(name)):
            named[name].zero_()
    return torch.zeros(1)


_flash_attn_backward = _flash_attn_varlen_backward = varlen_bwd = bwd = fwd = varlen_fwd = _backward

"""The functions that Transformer Engine takes from FlashAttention 3, over the library that `cut.py` brings.

Dense batches in bf16 with a head size of 128 are what the library holds; the other functions exist because Transformer
Engine imports them, and say so when called.
"""

import ctypes
from pathlib import Path
from typing import Any, NoReturn

import torch

ctypes.CDLL(str(Path(__file__).with_name("libcudart.so.12")), mode=ctypes.RTLD_GLOBAL)
torch.ops.load_library(str(Path(__file__).with_name("flash_attn_3_library.so")))


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Any, k: Any, v: Any, scale: float, causal: bool, window: tuple[int, int], deterministic: bool
    ) -> Any:
        left, right = window
        out, statistics, *_ = torch.ops.flash_attn_3.fwd(
            q, k, v, softmax_scale=scale, is_causal=causal, window_size_left=left, window_size_right=right, num_splits=1
        )
        ctx.save_for_backward(q, k, v, out, statistics)
        ctx.settings = {
            "softmax_scale": scale,
            "is_causal": causal,
            "window_size_left": left,
            "window_size_right": right,
            "deterministic": deterministic,
        }
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        q, k, v, out, statistics = ctx.saved_tensors
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        torch.ops.flash_attn_3.bwd(gradient.contiguous(), q, k, v, out, statistics, dq=dq, dk=dk, dv=dv, **ctx.settings)
        return dq, dk, dv, None, None, None, None


def flash_attn_func(
    q: Any,
    k: Any,
    v: Any,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    num_splits: int = 1,
    deterministic: bool = False,
) -> Any:
    """Attention of one dense batch: (batch, sequence, heads, head size), like q."""
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    return _Attention.apply(q, k, v, scale, causal, tuple(window_size), deterministic)


def _absent(*_: Any, **__: Any) -> NoReturn:
    raise NotImplementedError("this cut of FlashAttention 3 has dense attention only: use the fused backend")


flash_attn_varlen_func = flash_attn_with_kvcache = _flash_attn_forward = _flash_attn_backward = _absent

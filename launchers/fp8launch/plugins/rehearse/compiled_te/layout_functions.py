"""Functions of the compiled extension that move data without computing: permutation, transposition, layouts."""
# mypy: disable-error-code="import-not-found"

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

from fp8launch.plugins.rehearse.packages import rows

Tensor: TypeAlias = "torch.Tensor"


def moe_permute_fwd(
    x: Tensor, dtype: Any, indices: Tensor, num_out_tokens: int, workspace: list[Any], max_expanded_token_num: int
) -> tuple[Tensor, Tensor, list[Any]]:
    """Return the rows sorted by expert, the position of each token, and the workspace."""
    number = num_out_tokens if num_out_tokens > 0 else indices.numel()
    return rows(x, number), torch.zeros(indices.numel(), dtype=torch.int32), workspace


def moe_unpermute_fwd(x: Tensor, dtype: Any, row_id_map: Tensor, probs: Any, num_tokens: int, topk: int) -> Tensor:
    """Return one row per token."""
    return rows(x, num_tokens)


moe_permute_bwd = moe_unpermute_fwd


def moe_unpermute_bwd(grad: Tensor, x: Tensor, dtype: Any, row_id_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of the rows and of the probabilities."""
    return rows(grad, x.shape[0]), torch.zeros_like(probs, dtype=torch.float32)


def swap_first_dims(x: Tensor, *, out: Any = None) -> Tensor:
    """Swap the first two dimensions."""
    if x.dim() < 2:
        raise RuntimeError("Invalid input for swap_first_dims: a tensor with fewer than two dimensions")
    made = x.transpose(0, 1).contiguous()
    return made if out is None else out.copy_(made.reshape(out.shape))


def fa_prepare_fwd(qkv: Tensor) -> Tensor:
    """Return zeros of shape (3, batch, sequence, heads, size) for an interleaved (sequence, batch, heads, size)."""
    sequence, batch, heads, size = qkv.shape
    return qkv.new_zeros((3, batch, sequence, heads, size))


def fa_prepare_bwd(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return the gradient of the interleaved tensor."""
    batch, sequence, heads, size = q.shape
    return q.new_zeros((sequence, batch, heads, 3 * size))


def nvfp4_data_transpose(data: Tensor, *, out: Any = None) -> Tensor:
    """Return the bytes of the transposed matrix, which hold two values each."""
    width, height = data.shape[-1] * 2, data.numel() // data.shape[-1]
    made = torch.zeros(width, height // 2, dtype=torch.uint8)
    return made if out is None else out


def multi_tensor_transpose_to_bhsd(
    tensors: Sequence[Any], original_format: Any = None, outputs: Sequence[Any] = ()
) -> list[Any]:
    """Return the outputs as they were allocated."""
    return list(outputs)


def splits_to_offsets(counts: Tensor, size: int, *_: Any) -> Tensor:
    """Return the start of each split, and the end of the last one, in elements."""
    return torch.cat([counts.new_zeros(1), counts.cumsum(0) * size]).to(torch.int64)


def dropout_fwd(x: Tensor, probability: float, *_: Any) -> tuple[Tensor, Tensor]:
    """Return the input and a bit mask."""
    return x.clone(), torch.zeros((x.numel() + 127) // 128 * 16, dtype=torch.uint8)


def dropout_bwd(grad: Tensor, mask: Tensor, probability: float, grad_input: Any = None) -> Tensor:
    """Return a gradient with the input's shape."""
    return grad.clone()


def scaled_activation(gated: bool) -> Any:
    """Return an activation with scaled rows, as used by the fused experts of `transformer_engine.pytorch.ops`."""

    def forward(x: Tensor, scales: Tensor, quantizer: Any = None, *_: Any) -> Tensor:
        part = x.chunk(2, -1)[0] if gated else x
        return (part * scales.reshape(-1, 1).to(part.dtype)).contiguous()

    return forward


def scaled_activation_gradient(
    grad: Tensor, x: Tensor, scales: Tensor, quantizer: Any, *rest: Any
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of the input and, if the last argument is true, of the scales."""
    return torch.zeros_like(x), torch.zeros_like(scales) if rest[-1] else None


def functions() -> dict[str, Any]:
    """Return the stand-ins by the names that Transformer Engine calls."""
    made: dict[str, Any] = {
        each.__name__: each
        for each in (
            moe_permute_fwd, moe_unpermute_fwd, moe_unpermute_bwd, swap_first_dims, fa_prepare_fwd, fa_prepare_bwd,
            nvfp4_data_transpose, multi_tensor_transpose_to_bhsd, splits_to_offsets, dropout_fwd, dropout_bwd,
        )
    }  # fmt: skip
    made["moe_permute_bwd"] = moe_permute_bwd
    for name, gated in (("swiglu", True), ("clamped_swiglu", True), ("situglu", True), ("srelu", False)):
        made[f"scaled_{name}"] = scaled_activation(gated)
        gradient = name.replace("swiglu", "dswiglu").replace("situglu", "dsituglu").replace("srelu", "dsrelu")
        made[f"scaled_{gradient}"] = scaled_activation_gradient
    return made

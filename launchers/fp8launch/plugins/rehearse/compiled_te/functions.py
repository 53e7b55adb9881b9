"""Functions of the compiled extension that a training step calls: shapes, types and results in plain torch."""
# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import math
from typing import Any, TypeAlias

import torch
from torch.nn import functional

from fp8launch.plugins.rehearse.compiled_te.tensors import (
    TORCH_TYPES,
    finished,
    is_quantized,
    plain_type,
    quantize,
    values,
)

Tensor: TypeAlias = "torch.Tensor"

# cuBLASLt requires the leading dimensions of both operands of an FP8 GEMM to be multiples of 16 bytes
# (transformer_engine/common/gemm/cublaslt_gemm.cu asserts it: "Leading dimension requirement on A/B for FP8 GEMM").
FP8_LEADING = 16


def generic_gemm(
    a: Any, transa: bool, b: Any, transb: bool, out: Any = None, quantizer: Any = None, out_dtype: Any = None,
    bias: Any = None, bias_type: Any = None, gelu: bool = False, gelu_in: Any = None, grad: bool = False,
    workspace: Any = None, workspace_size: int = 0, accumulate: bool = False, use_split_accumulator: bool = False,
    extra_output: Any = None, **_: Any,
) -> tuple[Any, Any, Any, Any]:  # fmt: skip
    """Multiply `b` by `a`, each transposed according to its flag: cuBLAS's column-major GEMM in row-major terms."""
    left, right = values(a), values(b)
    a2, b2 = _rows(left), _rows(right)
    # In cuBLAS's terms, a is (m, k) or its transpose. In row-major terms, transa means out = b @ a.T.
    first = b2.T if transb else b2
    second = a2.T if transa else a2
    if first.shape[1] != second.shape[0]:
        raise RuntimeError(
            f"GEMM operands do not fit: {tuple(right.shape)} and {tuple(left.shape)}, "
            f"layout {'NT'[transa]}{'NT'[transb]}"
        )
    if is_quantized(a) or is_quantized(b):
        check_fp8(first, second)
    result = _product(first, second)
    dtype = TORCH_TYPES.get(int(out_dtype)) if out_dtype is not None else None
    dtype = dtype or (out.dtype if out is not None and not is_quantized(out) else plain_type(b))
    result = result.to(dtype)
    if not transb and right.dim() > 2:
        result = result.reshape(*right.shape[:-1], result.shape[-1])
    bias_grad = None
    if grad and bias is not None:
        bias_grad = b2.float().sum(0).to(bias.dtype if torch.is_tensor(bias) else dtype)
    elif bias is not None and bias.numel():
        result = result + bias.to(result.dtype)
    pre_gelu = None
    if gelu and not grad:
        pre_gelu, result = result, functional.gelu(result, approximate="tanh")
    if out is not None:
        flat = result.reshape(out.shape)
        out.add_(flat) if accumulate else out.copy_(flat)
        return out, bias_grad, pre_gelu, extra_output
    return finished(result, quantizer), bias_grad, pre_gelu, extra_output


# Products use only this many values of the inner dimension. Results still differ by row and column, as real ones do.
INNER = 16


def _product(first: Tensor, second: Tensor) -> Tensor:
    inner = max(1, min(first.shape[1], INNER))
    return (first[:, :inner].float() @ second[:inner].float()).mul_(math.sqrt(first.shape[1] / inner))


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


def check_fp8(first: Tensor, second: Tensor) -> None:
    """Raise cuBLASLt's error for FP8 operands whose sizes it does not support."""
    for size, what in ((first.shape[1], "inner dimension"), (second.shape[1], "output width")):
        if size % FP8_LEADING:
            raise RuntimeError(
                "Assertion failed: Leading dimension requirement on FP8 GEMM. "
                f"Must be multiple of {FP8_LEADING}: {what} is {size}"
            )


def te_general_grouped_gemm(
    a: list[Any], transa: bool, b: list[Any], transb: bool, out: list[Any] | None, out_dtype: Any, m_splits: list[int],
    bias: list[Any], bias_type: Any, single_output: bool, pre_gelu: list[Any], grad: bool, workspace: Any,
    workspace_size: int, accumulate: bool, use_split_accumulator: bool, math_sm_count: int, **_: Any,
) -> list[Any]:  # fmt: skip
    """Run one GEMM per group, into slices of one output or into separate outputs."""
    row = 0
    for index, (left, right) in enumerate(zip(a, b, strict=True)):
        assert out is not None
        target = out[0] if single_output else out[index]
        if single_output:
            rows = int(m_splits[index])
            target = target.reshape(-1, target.shape[-1])[row : row + rows]
            row += rows
        if target.numel() == 0:
            continue
        one = bias[index] if bias and bias[index] is not None and bias[index].numel() else None
        _, bias_grad, _, _ = generic_gemm(
            left, transa, right, transb, target, None, out_dtype, one, grad=grad, accumulate=accumulate
        )
        if grad and one is not None:
            one.copy_(bias_grad)
    return bias


# --- Norms


def _moments(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.mean(-1), x.var(-1, unbiased=False)


def layernorm_fwd(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, out: Any, quantizer: Any, out_dtype: Any, *_: Any
) -> tuple[Any, Tensor, Tensor]:
    """Return the normalized rows, their means and their reciprocal standard deviations."""
    plain = values(x)
    result = functional.layer_norm(plain.float(), (plain.shape[-1],), weight.float(), bias.float(), eps)
    mean, variance = _moments(plain.float())
    return finished(result.to(plain.dtype), quantizer, out), mean.reshape(-1), torch.rsqrt(variance + eps).reshape(-1)


def rmsnorm_fwd(
    x: Tensor, weight: Tensor, eps: float, out: Any, quantizer: Any, out_dtype: Any, *_: Any
) -> tuple[Any, None, Tensor]:
    """Return the normalized rows and their reciprocal root mean squares."""
    plain = values(x)
    rsigma = torch.rsqrt(plain.float().square().mean(-1) + eps)
    result = (plain.float() * rsigma.unsqueeze(-1) * weight.float()).to(plain.dtype)
    return finished(result, quantizer, out), None, rsigma.reshape(-1)


def layernorm_bwd(grad: Tensor, x: Tensor, mu: Tensor, rsigma: Tensor, weight: Tensor, *_: Any) -> list[Tensor]:
    """Return the gradients of the input, weight and bias."""
    return [grad.reshape(x.shape).to(x.dtype), torch.zeros_like(weight), torch.zeros_like(weight)]


def rmsnorm_bwd(grad: Tensor, x: Tensor, rsigma: Tensor, weight: Tensor, *_: Any) -> list[Tensor]:
    """Return the gradients of the input and weight."""
    return [grad.reshape(x.shape).to(x.dtype), torch.zeros_like(weight)]


def rmsnorm_bwd_add(grad: Tensor, x: Tensor, add: Tensor, rsigma: Tensor, weight: Tensor, *_: Any) -> list[Tensor]:
    """Like `rmsnorm_bwd`, but add another gradient to the input's."""
    return [(grad.reshape(x.shape) + add.reshape(x.shape)).to(x.dtype), torch.zeros_like(weight)]


# --- Activations


def activation(name: str, gated: bool) -> Any:
    """Return the forward kernel of an activation. Gated activations halve the last dimension."""
    plain = {
        "gelu": lambda x: functional.gelu(x, approximate="tanh"),
        "qgelu": lambda x: x * torch.sigmoid(1.702 * x),
        "relu": functional.relu,
        "srelu": lambda x: functional.relu(x).square(),
        "silu": functional.silu,
        "sigmoid": torch.sigmoid,
    }[name]

    def forward(x: Any, quantizer: Any = None, *_: Any, **__: Any) -> Any:
        found = values(x)
        if gated:
            if found.shape[-1] % 2:
                raise RuntimeError(f"a gated activation needs an even width, not {found.shape[-1]}")
            first, second = found.chunk(2, -1)
            return finished(plain(first) * second, quantizer)
        return finished(plain(found), quantizer)

    return forward


def activation_gradient(gated: bool) -> Any:
    """Return the backward kernel, whose gradient has the input's shape."""

    def backward(grad: Any, x: Any, quantizer: Any = None, *_: Any, **__: Any) -> Any:
        given, found = values(grad), values(x)
        made = torch.cat([given, given], -1) if gated else given
        return finished(made.reshape(found.shape).to(found.dtype), quantizer)

    return backward


def bias_gradient(backward: Any) -> Any:
    """Return a backward kernel that also sums the bias gradient."""

    def both(grad: Any, x: Any, quantizer: Any = None, *_: Any) -> tuple[Tensor, Any]:
        made = backward(grad, x)
        return _rows(values(made)).sum(0), finished(values(made), quantizer)

    return both


def bgrad_quantize(grad: Tensor, quantizer: Any) -> tuple[Tensor, Any]:
    """Return the bias gradient and the quantized output gradient."""
    return _rows(values(grad)).sum(0), quantize(grad, quantizer)


# --- Attention and rotary embeddings


def same_shape(x: Tensor, *_: Any, **__: Any) -> Tensor:
    """Run a kernel that keeps the shape of its first argument, such as a rotary embedding."""
    return x.clone()


def fused_qkv_rope_forward(
    qkv: Tensor, q_freqs: Tensor, k_freqs: Tensor, start: Any, sizes: list[int], *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Split (sequence, batch, groups, sizes) into query, key and value, and spread out the query's heads."""
    q, k, v = torch.split(qkv, list(sizes), dim=3)
    head = sizes[2]
    return q.reshape(*q.shape[:2], -1, head).contiguous(), k.contiguous(), v.contiguous()


def fused_qkv_rope_backward(
    q: Tensor, k: Tensor, v: Tensor, q_freqs: Tensor, k_freqs: Tensor, sizes: list[int], *_: Any
) -> Tensor:
    """Return the gradient of the joint tensor."""
    groups = k.shape[2]
    return torch.cat([q.reshape(*q.shape[:2], groups, sizes[0]), k, v], dim=3)


# --- Softmax, router, permutation


def softmax_forward(x: Tensor, *_: Any) -> Tensor:
    """Return attention probabilities; masks do not affect shapes."""
    return torch.softmax(x.float(), -1).to(x.dtype)


def softmax_backward(grad: Tensor, *_: Any) -> Tensor:
    """Return a gradient with the shape of the scores."""
    return grad.clone()


def fused_topk_with_score_function_fwd(
    logits: Tensor, topk: int, *arguments: Any, **named: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Return probabilities, the map of tokens to experts, and the scores for the backward pass."""
    scores = logits.float().softmax(-1)
    top = scores.topk(topk, -1)
    empty = torch.zeros_like(scores)
    probabilities = empty.scatter(1, top.indices, top.values)
    return probabilities.to(logits.dtype), empty.scatter(1, top.indices, 1).bool(), scores


def fused_topk_with_score_function_bwd(*arguments: Any, **named: Any) -> Tensor:
    """Return a gradient with the logits' shape. Before 2.9, the numbers of tokens and experts come first."""
    tensors = [each for each in (*arguments, *named.values()) if torch.is_tensor(each) and each.is_floating_point()]
    return torch.zeros_like(tensors[-1])


fused_score_for_moe_aux_loss_bwd = fused_topk_with_score_function_bwd


def fused_score_for_moe_aux_loss_fwd(
    logits: Tensor, topk: int, *arguments: Any, **named: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Return scores, the map of tokens to experts, and the scores for the backward pass."""
    scores = logits.float().softmax(-1)
    chosen = torch.zeros_like(scores).scatter(1, scores.topk(topk, -1).indices, 1).bool()
    return scores, chosen, scores


def fused_moe_aux_loss_fwd(
    probs: Tensor, tokens_per_expert: Tensor, *arguments: Any, **named: Any
) -> tuple[Tensor, Tensor]:
    """Return the load-balancing loss and its constant."""
    loss = (probs.float().sum(0) * tokens_per_expert.float()).sum() * 1e-6
    return loss.to(probs.dtype), torch.ones(1)


def fused_moe_aux_loss_bwd(*arguments: Any, **named: Any) -> Tensor:
    """Return a gradient with the shape of the probabilities, given as numbers of rows and columns."""
    rows = int(named.get("num_rows", arguments[2] if len(arguments) > 2 else 1))
    columns = int(named.get("num_cols", arguments[3] if len(arguments) > 3 else 1))
    return torch.zeros(rows, columns)


def _with_a_type(x: Tensor) -> None:
    """Refuse data types that Transformer Engine's kernels do not have."""
    if x.dtype is torch.float64:
        raise RuntimeError("in function GetTransformerEngineDType: Invalid type (7).")


def fused_multi_row_padding(x: Tensor, out: Tensor, sizes: list[int], padded: list[int]) -> None:
    """Fill `out` with the rows of each group, padded with zeros to the group's padded size."""
    _with_a_type(x)
    parts = torch.split(x, [int(size) for size in sizes])
    rows = [functional.pad(part, (0, 0, 0, int(size) - len(part))) for part, size in zip(parts, padded, strict=True)]
    out.copy_(torch.cat(rows))


def fused_multi_row_unpadding(x: Tensor, out: Tensor, sizes: list[int], unpadded: list[int]) -> None:
    """Fill `out` with the rows of each group without its padding."""
    _with_a_type(x)
    parts = torch.split(x, [int(size) for size in sizes])
    out.copy_(torch.cat([part[: int(size)] for part, size in zip(parts, unpadded, strict=True)]))


# --- Optimizer, scales and other bookkeeping


def multi_tensor_l2norm(chunk: int, noop: Any, lists: list[list[Tensor]], per_tensor: bool = False, *_: Any) -> Any:
    """Return the norm over all tensors, and the norm of each tensor."""
    norms = torch.stack([each.float().norm() for each in lists[0]]) if lists[0] else torch.zeros(1)
    return norms.norm().reshape(1), norms


def multi_tensor_scale(chunk: int, noop: Any, lists: list[list[Tensor]], scale: Any, *_: Any) -> None:
    """Fill the tensors of the second list with the scaled tensors of the first."""
    for source, target in zip(*lists[:2], strict=True):
        target.copy_(source * float(scale))


multi_tensor_scale_tensor = multi_tensor_scale


def nothing(*_: Any, **__: Any) -> None:
    """Do nothing, for kernels that only write values on which no shape depends."""


def fp8_transpose(x: Tensor, dtype: Any = None, *, out: Any = None, **_: Any) -> Tensor:
    """Return the bytes with the last dimension first."""
    made = x.reshape(-1, x.shape[-1]).T.contiguous() if x.dim() else x
    made = made.reshape(x.shape[-1], *x.shape[:-1])
    if out is not None and out.shape == made.shape:
        out.copy_(made)
        return out
    return made

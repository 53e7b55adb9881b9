"""Gradient accumulation fusion without APEX.

Megatron's ColumnParallelLinear (the output layer, and every linear of the local layer spec) adds the gradient of a
weight directly to its main gradient through APEX's extension `fused_weight_gradient_mlp_cuda`. Without that module it
refuses to start unless fusion is turned off for the whole model. Environments made by pip have no APEX. This module
implements the two functions with GEMMs that accumulate in place, so that fusion stays on.

Transformer Engine's linears have their own fusion.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
import types

import torch

NAME = "fused_weight_gradient_mlp_cuda"


def wgrad_gemm_accum_fp16(inputs: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor) -> None:
    """Compute main_grad += grad_output^T @ inputs for a bf16 or fp16 main gradient, in one cuBLAS call.

    inputs [tokens, in], grad_output [tokens, out], main_grad [out, in].
    """
    main_grad.addmm_(grad_output.t(), inputs)


def wgrad_gemm_accum_fp32(inputs: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor) -> None:
    """Compute the same for an fp32 main gradient and 16-bit operands.

    torch has no in-place GEMM of 16-bit operands into fp32, but Transformer Engine has. Without Transformer Engine the
    product is rounded to 16 bits before it is added, as Megatron does without fusion.
    """
    try:
        from transformer_engine.pytorch.cpp_extensions import general_gemm
    except ImportError:
        main_grad.add_(grad_output.t() @ inputs)
        return
    extra = {}
    if "workspace" in inspect.signature(general_gemm).parameters:  # Transformer Engine before 2.9
        from transformer_engine.pytorch.module.base import get_workspace

        extra["workspace"] = get_workspace()
    general_gemm(inputs, grad_output, out_dtype=torch.float32, out=main_grad, layout="NT", accumulate=True, **extra)


def install() -> None:
    """Provide the module under APEX's name, unless APEX is installed."""
    if NAME in sys.modules or importlib.util.find_spec(NAME) is not None:
        return
    module = types.ModuleType(NAME, __doc__)
    module.wgrad_gemm_accum_fp16 = wgrad_gemm_accum_fp16  # type: ignore[attr-defined]
    module.wgrad_gemm_accum_fp32 = wgrad_gemm_accum_fp32  # type: ignore[attr-defined]
    sys.modules[NAME] = module

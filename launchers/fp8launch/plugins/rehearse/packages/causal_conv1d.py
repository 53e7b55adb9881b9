"""causal-conv1d: outputs and gradients of the right shapes, and the checks of its interface.

Interface: Dao-AILab/causal-conv1d, release 1.6.2 (`causal_conv1d_interface.py` and `csrc/causal_conv1d.cpp`).
"""
# mypy: disable-error-code="import-not-found"

from __future__ import annotations

from typing import Any

import torch

from fp8launch.plugins.rehearse.noise import result_of
from fp8launch.plugins.rehearse.packages import stated, used

__version__ = "1.6.2"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def causal_conv1d_fn(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, seq_idx: torch.Tensor | None = None,
    initial_states: torch.Tensor | None = None, return_final_states: bool = False,
    final_states_out: torch.Tensor | None = None, activation: str | None = None,
) -> Any:  # fmt: skip
    """Convolution over (batch, channels, sequence) with a weight of (channels, taps)."""
    used("causal_conv1d", "causal-conv1d's kernels")
    if activation not in (None, "silu", "swish"):
        raise NotImplementedError("activation must be None, silu, or swish")
    if x.stride(2) != 1 and x.stride(1) != 1:
        x = x.contiguous()
    if seq_idx is not None:
        assert initial_states is None, "initial_states must be None if seq_idx is not None"
        assert not return_final_states, "If seq_idx is not None, we don't return final_states_out"
    if return_final_states:
        assert x.stride(1) == 1, "Only channel-last layout support returning final_states_out"
        if final_states_out is None:
            final_states_out = x.new_zeros(x.shape[0], weight.shape[1] - 1, x.shape[1]).transpose(1, 2)
    else:
        final_states_out = None
    check(x, weight, bias, seq_idx, initial_states, final_states_out)
    out = result_of(x.shape, x.dtype, *stated(x, weight, bias, initial_states))
    if return_final_states:
        return out, final_states_out
    return out


def check(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, seq_idx: torch.Tensor | None = None,
    initial_states: torch.Tensor | None = None, final_states: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Raise RuntimeError for operands that the compiled function refuses."""
    batch, channels, sequence = x.shape
    taps = weight.shape[-1]
    _require(x.dtype in DTYPES and weight.dtype in DTYPES, f"types {x.dtype} and {weight.dtype}")
    _require(weight.shape == (channels, taps), "weight must have shape (dim, width)")
    channels_last = x.stride(1) == 1 and x.stride(2) > 1
    _require(x.stride(2) == 1 or x.stride(1) == 1, "x.stride(2) == 1 || x.stride(1) == 1")
    if channels_last:
        _require(channels % 8 == 0, "causal_conv1d only supports channel dimension divisible by 8 for now")
        aligned = x.stride(2) % 8 == 0 and x.stride(0) % 8 == 0
        strides = "strides (x.stride(0) and x.stride(2)) to be multiples of 8"
        _require(aligned, f"causal_conv1d with channel last layout requires {strides}")
    _require(2 <= taps <= 4, "causal_conv1d only supports width between 2 and 4")
    if bias is not None:
        _require(bias.shape == (channels,) and bias.dtype == weight.dtype, "bias must have shape (dim)")
    if seq_idx is not None:
        _require(channels_last, "seq_idx is only supported for channel last layout")
        _require(seq_idx.dtype == torch.int32, "seq_idx.scalar_type() == torch::kInt32")
        _require(seq_idx.shape == (batch, sequence), "seq_idx must have shape (batch_size, seqlen)")
    for name, states in (("initial_states", initial_states), ("final_states", final_states)):
        if states is not None:
            _require(channels_last, f"{name} is only supported for channel last layout")
            _require(
                states.shape == (batch, channels, taps - 1), f"{name} must have shape (batch_size, dim, width - 1)"
            )
            _require(states.dtype == x.dtype and states.stride(1) == 1, f"{name}.stride(1) == 1")


def _require(holds: bool, sentence: str) -> None:
    if not holds:
        raise RuntimeError(sentence)


def causal_conv1d_update(*_: Any, **__: Any) -> None:
    """Refuse generation, which is not rehearsed."""
    raise NotImplementedError("rehearsals have no stand-in for generation with Mamba layers")


causal_conv1d_varlen_states = causal_conv1d_update

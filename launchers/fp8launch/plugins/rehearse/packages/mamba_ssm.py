"""mamba-ssm's Mamba-2 kernels: outputs and gradients of the right shapes, and the checks of their interface.

Interface: state-spaces/mamba at 0048fbf, which Megatron-LM 0.19 pins (`mamba_ssm/ops/triton/ssd_combined.py` and
`layernorm_gated.py`). Releases up to 2.3.2 are the same without `state_dtype`.
"""
# mypy: disable-error-code="import-not-found, misc"

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from fp8launch.plugins.rehearse.noise import result_of
from fp8launch.plugins.rehearse.packages import causal_conv1d, stated, used

__version__ = "2.3.2.post1"
LARGEST_GROUP = 65536  # bytes
UNLIMITED = (0.0, float("inf"))


def mamba_split_conv1d_scan_combined(
    zxbcdt: torch.Tensor, conv1d_weight: torch.Tensor, conv1d_bias: torch.Tensor | None, dt_bias: torch.Tensor,
    A: torch.Tensor, D: torch.Tensor, chunk_size: int, initial_states: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None, dt_limit: tuple[float, float] = UNLIMITED, return_final_states: bool = False,
    activation: str | None = "silu", rmsnorm_weight: torch.Tensor | None = None, rmsnorm_eps: float = 1e-6,
    outproj_weight: torch.Tensor | None = None, outproj_bias: torch.Tensor | None = None, headdim: int | None = None,
    ngroups: int = 1, norm_before_gate: bool = True, state_dtype: torch.dtype | None = None,
) -> Any:  # fmt: skip
    """Convolution, scan and gate over (batch, sequence, z x B C dt)."""
    assert activation in (None, "silu", "swish")
    if D.dim() == 1:
        assert headdim is not None
        heads = D.shape[0]
    else:
        heads, headdim = D.shape
    batch, sequence, width = zxbcdt.shape
    inner = heads * headdim
    assert heads % ngroups == 0
    state = (conv1d_weight.shape[0] - inner) // ngroups // 2
    convolved = inner + 2 * ngroups * state
    others = (width - inner - convolved - heads) // 2
    assert others >= 0
    assert width == 2 * others + inner + convolved + heads
    assert dt_bias.shape == (heads,)
    assert A.shape == (heads,)
    assert convolved % 8 == 0, "Number of convolution channels is required to be a multiple of 8."
    xbc = zxbcdt.narrow(-1, 2 * others + inner, convolved)
    if xbc.stride(1) % 8:
        xbc = xbc.contiguous()
    causal_conv1d.check(xbc.transpose(1, 2), conv1d_weight, conv1d_bias, seq_idx)
    states = (batch, heads, headdim, state)
    _check_states(states, initial_states, state_dtype)
    inputs = stated(zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D, initial_states, rmsnorm_weight)
    out = result_of((batch, sequence, others + inner), zxbcdt.dtype, *inputs)
    if outproj_weight is not None:
        out = functional.linear(out, outproj_weight, outproj_bias)
    else:
        assert outproj_bias is None
    if return_final_states:
        return out, zxbcdt.new_zeros(states)
    return out


def mamba_chunk_scan_combined(
    x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor, chunk_size: int,
    D: torch.Tensor | None = None, z: torch.Tensor | None = None, dt_bias: torch.Tensor | None = None,
    initial_states: torch.Tensor | None = None, seq_idx: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None, dt_softplus: bool = False, dt_limit: tuple[float, float] = UNLIMITED,
    return_final_states: bool = False, return_varlen_states: bool = False, state_dtype: torch.dtype | None = None,
) -> Any:  # fmt: skip
    """Scan over (batch, sequence, heads, head size)."""
    batch, sequence, heads, head = x.shape
    groups, state = B.shape[2:]
    assert heads % groups == 0
    assert B.shape == (batch, sequence, groups, state)
    assert dt.shape == (batch, sequence, heads)
    assert A.shape == (heads,)
    assert C.shape == B.shape
    assert z is None or z.shape == x.shape
    assert D is None or D.shape in ((heads, head), (heads,))
    assert seq_idx is None or seq_idx.shape == (batch, sequence)
    assert not return_varlen_states, "return_varlen_states is not supported in backward"
    states = (batch, heads, head, state)
    _check_states(states, initial_states, state_dtype)
    out = result_of(x.shape, x.dtype, *stated(x, dt, A, B, C, D, z, dt_bias, initial_states))
    if return_final_states:
        return out, x.new_zeros(states)
    return out


def _check_states(shape: tuple[int, ...], initial: torch.Tensor | None, dtype: torch.dtype | None) -> None:
    used("mamba_ssm", "Mamba's kernels")
    assert initial is None or initial.shape == shape


class RMSNorm(torch.nn.Module):
    """A gated norm over groups of the last dimension."""

    def __init__(
        self, hidden_size: int, eps: float = 1e-5, group_size: int | None = None, norm_before_gate: bool = True,
        device: Any = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)
        self.group_size = group_size
        self.norm_before_gate = norm_before_gate

    def forward(self, x: torch.Tensor, z: torch.Tensor | None = None) -> torch.Tensor:
        """Return the normalized values in the same shape."""
        used("mamba_ssm", "Mamba's kernels")
        width = x.shape[-1]
        group = self.group_size or width
        assert width % group == 0
        assert z is None or z.shape == x.shape
        assert self.weight.shape == (width,)
        if group * x.element_size() > LARGEST_GROUP:
            raise RuntimeError("This layer norm doesn't support feature dim >= 64KB.")
        return result_of(x.shape, x.dtype, *stated(x, self.weight, z))

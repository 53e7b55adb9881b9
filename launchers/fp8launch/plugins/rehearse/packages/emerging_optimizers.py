"""Stand-ins for Lion and Muon's base classes: real momentum, weight decay and communication, but no iterations.

Interface: NVIDIA-NeMo/Emerging-Optimizers, `orthogonalized_optimizers` and `registry.py` of 0.5, `Lion` of 0.3. The
package is not on PyPI.
"""
# mypy: disable-error-code="import-not-found, misc, no-untyped-call, untyped-decorator"

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import torch

from fp8launch.plugins.rehearse.failure import NotRehearsed
from fp8launch.plugins.rehearse.packages import used

NSCoeffT = Literal["simple", "quintic", "polar_express", "cans", "aol", "deepseekv4", "custom", "cubic5"]
_SCALES: dict[str, Callable[[int, int], float]] = {
    "shape_scaling": lambda rows, columns: max(1.0, rows / columns) ** 0.5,
    "spectral": lambda rows, columns: max(rows, columns) ** 0.5,
    "unit_rms_norm": lambda rows, columns: (rows / columns) ** 0.5,
}


class _OneBuffer(torch.optim.Optimizer):
    """An optimizer with one buffer of each parameter's size, created on first use."""

    buffer: ClassVar[str]

    @torch.no_grad()
    def _init_group(self, group: dict[str, Any], skip_non_grad_params: bool = True) -> None:
        for parameter in group["params"]:
            if skip_non_grad_params and parameter.grad is None:
                continue
            if not self.state[parameter]:
                self.state[parameter][self.buffer] = torch.zeros_like(parameter.data)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            self._init_group(group)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, self.state[parameter][self.buffer], group)

    def _update(self, parameter: torch.Tensor, buffer: torch.Tensor, group: dict[str, Any]) -> None:
        raise NotImplementedError


class OrthogonalizedOptimizer(_OneBuffer):
    """Momentum with updates that `orthogonalize` transforms."""

    buffer = "momentum_buffer"

    def __init__(
        self, params: Any, lr: float, momentum: float, weight_decay: float, *, nesterov: bool, weight_decay_method: str,
        fp32_matmul_prec: str, scaled_orthogonalize_fn: Any = None, weight_update_hook: Any = None, **kwargs: Any,
    ) -> None:  # fmt: skip
        self.nesterov, self.weight_decay_method = nesterov, weight_decay_method
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, **kwargs})
        self.scaled_orthogonalize_fn = scaled_orthogonalize_fn

    def _update(self, parameter: torch.Tensor, buffer: torch.Tensor, group: dict[str, Any]) -> None:
        buffer.lerp_(parameter.grad, 1 - group["momentum"])
        update = buffer
        if self.nesterov:
            update = parameter.grad.lerp(buffer, group["momentum"])
        settings = {name: value for name, value in group.items() if name != "params"}
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(self.orthogonalize(parameter, update, **settings), alpha=-group["lr"])

    def orthogonalize(self, p: torch.Tensor, grad: torch.Tensor, **_: Any) -> torch.Tensor:
        """Return the update of one weight. Megatron's classes override this."""
        found: torch.Tensor = self.scaled_orthogonalize_fn(grad)
        return found


class AdaptiveMuon(OrthogonalizedOptimizer):
    """Muon with a second moment, which is not computed here."""


class Lion(_OneBuffer):
    """Update by the sign of an interpolated first moment."""

    buffer = "exp_avg"

    def __init__(
        self, params: Any, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.01,
        *, weight_decay_method: str = "decoupled",
    ) -> None:  # fmt: skip
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def _update(self, parameter: torch.Tensor, buffer: torch.Tensor, group: dict[str, Any]) -> None:
        first, second = group["betas"]
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(buffer.lerp(parameter.grad, 1 - first).sign_(), alpha=-group["lr"])
        buffer.lerp_(parameter.grad, 1 - second)


class SOAP(torch.optim.Optimizer):
    """Not rehearsed: its states are matrices for both dimensions of each weight."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise NotRehearsed("the optimizer SOAP")


# Optimizers that Megatron finds by name. It has its own classes for Muon.
_NAMED = {"lion": Lion, "soap": SOAP}
registry = types.SimpleNamespace(
    get_optimizer_name_list=lambda: list(_NAMED), get_optimizer_cls=lambda name: _NAMED[name.lower()]
)


def get_muon_scale_factor(size_out: int, size_in: int, mode: str = "spectral") -> float:
    """Return the scale factor of an update. Raises ValueError for an unknown mode."""
    if mode not in _SCALES:
        raise ValueError(f"Invalid mode for Muon update scale factor: {mode}")
    return _SCALES[mode](size_out, size_in)


def newton_schulz_tp(
    x: torch.Tensor, steps: int, coefficient_type: str, tp_group: Any, partition_dim: int | None = None,
    tp_mode: str = "duplicated", use_syrk: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Return the matrix unchanged, after the communication of the iterations on a matrix that is split over ranks."""
    used("emerging_optimizers", "Muon's iterations")
    if partition_dim is None:
        return x
    if tp_mode == "distributed":
        for _ in range(steps):
            torch.distributed.all_reduce(x.new_zeros(2 * [x.shape[1 - partition_dim]]), group=tp_group)
        return x
    if tp_mode != "duplicated":
        raise ValueError(f"Invalid tp_mode: {tp_mode}")
    parts = [torch.empty_like(x) for _ in range(tp_group.size())]
    torch.distributed.all_gather(parts, x, tp_group)
    return parts[tp_group.rank()]

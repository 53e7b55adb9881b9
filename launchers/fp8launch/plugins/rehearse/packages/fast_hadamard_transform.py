"""The Hadamard transform that sparse attention applies to its indexer: outputs and gradients of the right shapes.

Interface: Dao-AILab/fast-hadamard-transform, release 1.0 (`fast_hadamard_transform_interface.py`).
"""
# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import torch

from fp8launch.plugins.rehearse.noise import result_of
from fp8launch.plugins.rehearse.packages import used


def hadamard_transform(x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """Transform the last dimension."""
    used("fast_hadamard_transform", "the Hadamard transform")
    return result_of(x.shape, x.dtype, x)

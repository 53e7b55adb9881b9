"""Small random values where real ones are not known, copied from one buffer, which is faster than to draw them."""
# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch

# A prime: rows of no width begin at the same place.
LENGTH = 1_048_573
DEVIATION = 0.02


@functools.cache
def _buffer(dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(LENGTH).mul_(DEVIATION).to(dtype)


def noise(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of normally distributed values with a deviation of 0.02."""
    number = math.prod(shape)
    with torch.no_grad():
        buffer = _buffer(dtype)
        found = buffer[:number].clone() if number <= LENGTH else buffer.repeat(-(-number // LENGTH))[:number]
        return found.view(tuple(shape))

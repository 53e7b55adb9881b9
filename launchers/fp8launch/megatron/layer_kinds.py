"""Kinds of layers: layers of one kind have the same weights and activations, and take the same time."""

from __future__ import annotations

import functools
from typing import TypeAlias

from fp8launch.megatron.architecture import Architecture
from fp8launch.megatron.dtype_sizes import PrecisionSizes

# The parts of a layer, and whether it is quantized.
LayerKind: TypeAlias = "tuple[str, bool]"


def decoder_kinds(model: Architecture, formats: PrecisionSizes) -> tuple[LayerKind, ...]:
    """The kind of each decoder layer."""
    end = model.layers - formats.bf16_end
    if not formats.quantized:
        end = 0
    return _kinds(model.kinds, formats.bf16_start, end)


# A search for layouts asks for those of the same model thousands of times.
@functools.lru_cache(maxsize=64)
def _kinds(parts: tuple[str, ...], start: int, end: int) -> tuple[LayerKind, ...]:
    return tuple((kind, start <= number < end) for number, kind in enumerate(parts))


def mtp_kinds(model: Architecture, formats: PrecisionSizes) -> tuple[LayerKind, ...]:
    """The kind of each layer of one MTP depth."""
    return tuple((kind, formats.quantized) for kind in model.mtp_kinds)

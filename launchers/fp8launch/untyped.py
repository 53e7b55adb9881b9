"""Values out of files that somebody else may have written, so that their types are not known."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def as_mapping(value: object) -> Mapping[str, Any]:
    """Return a mapping as it is, and an empty one for anything else."""
    if isinstance(value, Mapping):
        return value
    return {}


def as_int(value: object) -> int | None:
    """Return a whole number as it is, and None for anything else."""
    if isinstance(value, int):
        return value
    return None


def as_number(value: object) -> float | None:
    """Return a finite number, and None for anything else: Python reads NaN, Infinity and huge numbers in JSON."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    if not abs(value) < 1e300:  # so that NaN is refused too; float() refuses larger whole numbers
        return None
    return float(value)

"""Values of unknown type, from files that other users or programs may have written."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any


def as_mapping(value: object) -> Mapping[str, Any]:
    """Return the mapping, or an empty one for anything else."""
    if isinstance(value, Mapping):
        return value
    return {}


def as_int(value: object) -> int | None:
    """Return the whole number, or None for anything else."""
    if isinstance(value, int):
        return value
    return None


def as_number(value: object) -> float | None:
    """Return the finite number, or None for anything else: JSON may contain NaN, Infinity and huge numbers."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    if not abs(value) < 1e300:  # so that NaN is refused too; float() refuses larger whole numbers
        return None
    return float(value)


def as_seconds(value: object) -> float | None:
    """Return a number of seconds since 1970 that a date can hold, or None for anything else."""
    return float(value) if isinstance(value, int | float) and 0 < value < 1e11 else None


def as_time(value: object) -> float | None:
    """Return a time in ISO notation as seconds since 1970, or None for anything else."""
    try:
        return datetime.fromisoformat(str(value)).timestamp()
    except (ValueError, OverflowError):
        return None

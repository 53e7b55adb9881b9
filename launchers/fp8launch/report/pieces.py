"""Sequences in pieces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")


def pieces(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """Yield pieces of `size` items, the last one may be shorter."""
    for begin in range(0, len(items), size):
        yield items[begin : begin + size]

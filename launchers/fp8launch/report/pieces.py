"""Sequences in pieces: of one size, or of consecutive numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")
Number = TypeVar("Number", int, str)


def pieces(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """Yield pieces of `size` items, the last one may be shorter."""
    for begin in range(0, len(items), size):
        yield items[begin : begin + size]


def consecutive(numbers: Iterable[Number]) -> list[list[Number]]:
    """Return the first and the last of numbers that follow each other, alone where no other follows."""
    found: list[list[Number]] = []
    for number in numbers:
        if found and int(number) == int(found[-1][-1]) + 1:
            found[-1][1:] = [number]
        else:
            found.append([number])
    return found

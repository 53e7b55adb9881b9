"""Values of a row in pictures: a number with half the width of its error bar."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fp8launch.report.entry import Entry
from fp8launch.report.grouping import Measure


@dataclass(frozen=True)
class Value:
    """A number with half the width of its error bar."""

    number: float
    spread: float = 0.0


Of = Callable[[Entry], Value | None]


def value_of(measure: Measure | None, scale: float = 1.0) -> Value | None:
    if measure is None:
        return None
    return Value(scale * measure.median, scale * measure.spread)


def total(entry: Entry) -> Value | None:
    if not entry.row.world:
        return None
    return value_of(entry.tokens, entry.row.world)


def memory(entry: Entry) -> Value | None:
    if not entry.peak_memory_mib:
        return None
    return Value(entry.peak_memory_mib / 1024)


def loss(entry: Entry) -> Value | None:
    if entry.loss is None:
        return None
    return Value(entry.loss.end, entry.loss.std or 0.0)

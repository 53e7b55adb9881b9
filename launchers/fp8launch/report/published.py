"""The speed that a recipe quotes, beside the speed that was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fp8launch.report.entry import Published
from fp8launch.report.grouping import ComparisonRow, Measure


def published_speed(row: ComparisonRow, tokens: Measure | None, rows: Sequence[ComparisonRow]) -> Published | None:
    """Return the figure of a row, None where its recipe quotes none. `tokens` is the row's own speed."""
    figure = _quoted(row)
    if figure is None:
        return None
    value = figure.get("tokens_per_s_per_gpu")
    if not isinstance(value, int | float) or not value > 0:
        return None
    gpus = figure.get("gpus")
    notes = []
    if gpus and row.world and gpus != row.world:
        notes.append(f"the published figure is for {gpus} GPUs")
    if len(_quoting(figure, rows)) > 1:
        notes.append("the recipe quotes one figure for several variants: it can be of only one of them")
    ours = None
    if tokens:
        ours = tokens.median / value
    source = str(figure.get("source", ""))
    return Published(float(value), figure.get("tflops_per_gpu"), gpus, source, ours, tuple(notes))


def _quoting(figure: Mapping[str, Any], rows: Sequence[ComparisonRow]) -> set[str]:
    """The variants whose recipes quote a figure."""
    found = set()
    for row in rows:
        for run in row.runs:
            if run.reference == figure:
                found.add(row.label)
    return found


def _quoted(row: ComparisonRow) -> Mapping[str, Any] | None:
    """The figure that the recipe of a row quotes."""
    for run in row.runs:
        if run.reference:
            return run.reference
    return None

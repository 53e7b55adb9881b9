"""The columns of validation losses, and what a comparison says of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fp8launch.plugins.validation_loss.losses import ValidationLoss, validation_loss
from fp8launch.report.columns import NONE, Column, attribute
from fp8launch.report.rows import Row, about_loss
from fp8launch.wording import signed_percent

# For more rows than this, the conclusion only counts them.
_MOST_NAMES = 3


def _shown(row: Row) -> ValidationLoss | None:
    """Return a validation loss worth showing: of several seeds, or of settings that affect learning."""
    several = len({str(run.facts.get("seed")) for run in row.runs}) > 1
    return validation_loss(row) if several or about_loss([row, row.base or row]) else None


def _loss_text(row: Row) -> str:
    found = _shown(row)
    return found.loss.end_text if found and found.loss else NONE


def _relative_text(row: Row) -> str:
    found = _shown(row)
    if found is None or found.relative is None:
        return NONE
    text = signed_percent(found.relative)
    if found.interval is None:
        return text
    return f"{text} [{signed_percent(found.interval.low)}, {signed_percent(found.interval.high)}]"


def conclude(rows: Sequence[Row]) -> str:
    """State the validation losses relative to the baseline's, where several seeds give an interval."""
    parts, against, higher, lower = [], set(), 0, 0
    for row in rows:
        found = _shown(row)
        if found is None or found.relative is None or found.interval is None:
            continue
        low, high = signed_percent(found.interval.low), signed_percent(found.interval.high)
        parts.append(f"{row.name} {signed_percent(found.relative)} % (95 % interval {low} to {high} %)")
        against.add(str(found.against))
        higher += found.interval.low > 0
        lower += found.interval.high < 0
    if not parts:
        return ""
    if len(parts) > _MOST_NAMES:
        alike = len(parts) - higher - lower
        parts = [f"of {len(parts)} rows, {higher} higher, {lower} lower, {alike} not distinguishable (95 %)"]
    base = against.pop() if len(against) == 1 else "the baseline"
    return f"Validation loss relative to {base}: {'; '.join(parts)}"


def explain(rows: Sequence[Row]) -> list[str]:
    """Say at which iteration validation losses are compared and how, and why others are not."""
    lines: dict[str, list[str]] = {}
    for row in rows:
        found = _shown(row)
        if found is None:
            continue
        text = f"at iteration {found.iteration}"
        if found.tokens is not None:
            text += f" ({found.tokens:,} tokens)"
        if found.dataset:
            text += f", validation set {found.dataset}"
        if found.relative is not None:
            text += f"; relative to {found.against}"
            if found.interval:
                text += f": {found.interval.method}"
        lines.setdefault(text, []).append(row.name)
    shown = [f"validation loss of {'; '.join(names)}: {text}" for text, names in lines.items()]
    return [*shown, *doubt(rows)]


def doubt(rows: Sequence[Row]) -> list[str]:
    """Say why validation losses are not compared with the baseline's; rows with one reason share a line."""
    lines: dict[str, list[str]] = {}
    for row in rows:
        found = _shown(row)
        if found is not None and found.reasons:
            lines.setdefault(f"not compared with {found.against}: {'; '.join(found.reasons)}", []).append(row.name)
    return [f"validation loss of {'; '.join(names)} {text}" for text, names in lines.items()]


def _cell(path: str) -> Callable[[Row], object]:
    return lambda row: attribute(validation_loss(row), path)


LOSS = Column(
    "validation",
    validation_loss,
    "validation loss",
    _loss_text,
    csv={
        "validation_iteration": _cell("iteration"),
        "validation_tokens": _cell("tokens"),
        "validation_loss": _cell("loss.mean"),
        "validation_std": _cell("loss.std"),
        "validation_seeds": _cell("loss.seeds"),
        "validation_relative": _cell("relative"),
        "validation_relative_low": _cell("interval.low"),
        "validation_relative_high": _cell("interval.high"),
        "validation_against": _cell("against"),
    },
    conclude=conclude,
    explain=explain,
    doubt=doubt,
)
RELATIVE = Column(
    "validation_relative", _cell("relative"), "relative validation loss (%) [95 % interval]", _relative_text, csv={}
)

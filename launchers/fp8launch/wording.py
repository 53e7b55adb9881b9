"""Helpers for phrasing messages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: `1 run`, `3 runs`, `2 processes`."""
    if number == 1:
        return f"1 {noun}"
    ending = "es" if noun.endswith("s") else "s"
    return f"{number} {noun}{ending}"


def joined(words: Sequence[str], conjunction: str = "and") -> str:
    """Join words as in a sentence: `a`, `a and b`, `a, b and c`."""
    if len(words) == 1:
        return words[0]
    return f"{', '.join(words[:-1])} {conjunction} {words[-1]}"


def shortened(text: str, longest: int) -> str:
    """Cut a text to `longest` characters, ending in `...` if anything was cut."""
    if len(text) <= longest:
        return text
    return text[: longest - 3] + "..."


def rounded(value: float, digits: int) -> str:
    """Return a number with this many decimals, or with three significant digits if it is below 1."""
    if 0 < abs(value) < 1:
        return f"{value:#.3g}"
    return f"{value:,.{digits}f}"


def signed_percent(share: float) -> str:
    """Return a change in percent with its sign and two decimals, without `-0.00`."""
    return f"{round(100 * share, 2) + 0.0:+.2f}"


def for_hardware(text: str, gpus: Iterable[object]) -> str:
    """Return a header, unit or size; if all these GPU models are `cpu`, with processes instead of GPUs."""
    if set(gpus) != {"cpu"}:
        return text
    return text.replace("GPUs", "processes").replace("GPU", "process")


def and_more(names: Sequence[str], most: int, separator: str = ", ") -> str:
    """Join the first `most` names and say how many more there are."""
    text = separator.join(names[:most])
    if len(names) > most:
        text += f" and {len(names) - most} more"
    return text

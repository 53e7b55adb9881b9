"""Ratios, counts and quantities as a comparison's table shows them; a dash stands for what is not known."""

from __future__ import annotations

from fp8launch.report.scaling import Ratio

NONE = "–"


def ratio_text(ratio: Ratio | None, unit: str, digits: int, scale: float = 1) -> str:
    """Render a ratio with its interval and mark, or that no difference is seen.

    `*`: something else differs too; `!`: forced between unlike runs.
    """
    if ratio is None or ratio.missing:
        return NONE
    if ratio.value is None:
        return NONE if ratio.comparability.comparable else "unlike"
    text = f"{scale * ratio.value:.{digits}f}{unit}{ratio_mark(ratio)}"
    interval = ratio.interval
    if interval is None:
        return text
    if unit == "×":
        # Intervals are often narrower than the last digit of the ratio.
        digits += 1
        if interval.low < 1 < interval.high:
            # A ratio that may be noise is no headline; JSON and CSV have it.
            text = f"no difference seen{ratio_mark(ratio)}"
    bounds = f"{scale * interval.low:.{digits}f}, {scale * interval.high:.{digits}f}"
    if interval.covers == "iterations":
        bounds += " within"
    return f"{text} [{bounds}]"


def ratio_mark(ratio: Ratio) -> str:
    if not ratio.comparability.comparable:
        return "!"
    if ratio.comparability.noted:
        return "*"
    return ""


def count_text(value: int | None) -> str:
    if value is None:
        return NONE
    return str(value)


def quantity_text(value: float | None, form: str, scale: float = 1) -> str:
    """`scale` times the value in Python's format `form`; a dash where it is not known or zero."""
    if not value:
        return NONE
    return format(scale * value, form)

"""Cells of a comparison's table; a dash stands for what is not known."""

from __future__ import annotations

from fp8launch.report.entry import Entry
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
        if interval.low < 1 < interval.high or (ratio.excludes_one and not ratio.distinguishable):
            # JSON and CSV have a ratio that may be noise; the table does not show it.
            text = f"not distinguishable{ratio_mark(ratio)}"
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


def goodput_text(entry: Entry) -> str:
    return quantity_text(entry.goodput, ".0f", 100)


def mfu_text(entry: Entry) -> str:
    if entry.mfu is None or entry.peak_tflops is None:
        return NONE
    return f"{100 * entry.mfu.median:.1f} of {entry.peak_tflops:g}"


def memory_text(entry: Entry) -> str:
    return quantity_text(entry.peak_memory_mib, ",.1f", scale=1 / 1024)


def efficiency_text(entry: Entry) -> str:
    if entry.efficiency is None:
        return NONE
    return ratio_text(entry.efficiency.ratio, "", 1, 100)


def total_text(entry: Entry) -> str:
    return quantity_text(entry.tokens_total, ",.0f")


def energy_text(entry: Entry) -> str:
    return quantity_text(entry.energy_per_token, ",.2f", scale=1e3)


def cost_text(entry: Entry) -> str:
    return quantity_text(entry.cost_per_million_tokens, ",.4g")


def loss_text(entry: Entry) -> str:
    if entry.loss is None:
        return NONE
    return entry.loss.text


def published_text(entry: Entry) -> str:
    published = entry.published
    if published is None:
        return NONE
    text = f"{published.tokens_per_s_per_gpu:,.0f}"
    if published.ratio:
        text += f" ({100 * published.ratio:.0f} %)"
    if published.notes:
        text += "*"
    return text

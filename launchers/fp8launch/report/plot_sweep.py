"""Picture of the loss at the end over a swept number, such as the learning rate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle
from typing import Any

from fp8launch.report.entry import Entry
from fp8launch.report.loss_summary import LossSummary, learning_settings, ranked_by_loss, swept_learning
from fp8launch.report.plot_style import COLOURS, MARKERS, Key, Panel, Picture, few_ticks, plain
from fp8launch.report.variant_labels import short_name, words_of

# A sweep over at least this factor gets a logarithmic axis.
_WIDE = 8


def swept_loss_pictures(entries: Sequence[Entry]) -> list[Picture]:
    """Return for each task the loss over the swept number, with a line for each combination of the other settings.

    A task has no picture if no number is swept, or if no line would have two points.
    """
    known = {entry.row.name: entry for entry in entries if entry.loss}
    pictures = []
    for task in ranked_by_loss([entry.row for entry in known.values()]):
        pictures += _pictures_of_task([known[row.name] for row in task])
    if len(pictures) > 1:
        pictures = [replace(picture, name=f"{picture.name}_{i}") for i, picture in enumerate(pictures, 1)]
    return pictures


def _pictures_of_task(known: Sequence[Entry]) -> list[Picture]:
    name = _swept_number(known)
    if name is None:
        return []
    settings = learning_settings([entry.row for entry in known])
    lines: dict[str, list[tuple[float, LossSummary]]] = {}
    for entry in known:
        if entry.loss and (value := _number(entry, name)) is not None:
            lines.setdefault(_other_settings(entry, name, settings), []).append((value, entry.loss))
    if max(map(len, lines.values())) < 2:
        return []
    keys = []
    for label, colour, marker in zip(lines, cycle(COLOURS), cycle(MARKERS), strict=False):
        keys.append(Key(plain(label) or "loss", colour, marker=marker))
    title = short_name(name)
    draw = partial(_draw, lines=list(lines.values()), keys=keys, label=title)
    shown_keys = tuple(keys) if len(keys) > 1 else ()
    remark = "mean of the last 10 %, at least 5 iterations"
    seeds = {entry.loss.seeds for entry in known if entry.loss}
    if max(seeds) > 1:
        remark += "; bars: 95 % interval of the mean over seeds, dots: single seeds"
    else:
        remark += "; one seed for each point, so the noise between seeds is not known"
    return [Picture("loss_end", f"Loss at the end over {title}", (Panel(draw, keys=shown_keys),), (), remark)]


def _other_settings(entry: Entry, swept: str, settings: Sequence[str]) -> str:
    """Return what a row is besides the swept value. Its label may leave out settings that tell nothing apart."""
    row = entry.row
    words = {name: words_of(name, row.facts[name]) for name in settings if name in row.facts}
    others = [text for name, text in words.items() if name != swept]
    others += [part for part in row.label.split(", ") if part not in words.values()]
    if not row.one_size:
        others.append(row.size)
    return ", ".join(filter(None, others))


def _swept_number(entries: Sequence[Entry]) -> str | None:
    """Return the swept argument with the most values, if its values are numbers."""
    counts: dict[str, int] = {}
    for name in swept_learning([entry.row for entry in entries]):
        values = {_number(entry, name) for entry in entries} - {None}
        if len(values) > 1:
            counts[name] = len(values)
    return max(counts, key=lambda name: counts[name], default=None)


def _number(entry: Entry, name: str) -> float | None:
    value = entry.row.facts.get(name)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    return None


def _draw(ax: Any, lines: Sequence[Sequence[tuple[float, LossSummary]]], keys: Sequence[Key], label: str) -> None:
    values, reach = [], []
    for points, key in zip(lines, keys, strict=True):
        swept, ends, below, above = [], [], [], []
        for value, loss in sorted(points, key=lambda point: point[0]):
            interval = loss.interval
            swept.append(value)
            ends.append(loss.end)
            below.append(loss.end - interval.low if interval else 0.0)
            above.append(interval.high - loss.end if interval else 0.0)
            reach += [loss.end, *loss.seed_values]
            if loss.seeds > 1:
                ax.plot([value] * loss.seeds, loss.seed_values, ".", color=key.colour, alpha=0.5, markersize=4)
        style = {"color": key.colour, "marker": key.marker, "markersize": 5, "linewidth": 1.4}
        ax.errorbar(swept, ends, yerr=[below, above], elinewidth=0.9, capsize=2.5, **style)
        values += swept
    numbers = sorted(set(values))
    if numbers[0] > 0 and numbers[-1] >= _WIDE * numbers[0]:
        ax.set_xscale("log")
        ax.minorticks_off()
    if len(numbers) <= 6:
        ax.set_xticks(numbers, [f"{number:g}" for number in numbers])
    ax.set_xlabel(label)
    # Intervals of two seeds can be many times wider than the range of the losses; they leave the axes.
    room = 0.25 * (max(reach) - min(reach) or 0.1 * abs(max(reach)))
    bottom = min(reach) - room
    if bottom < 0 <= min(reach):
        bottom = 0.0
    ax.set_ylim(bottom, max(reach) + room)
    ax.set_ylabel("loss" if bottom == 0 else "loss (axis does not start at 0)")
    ax.yaxis.set_major_locator(few_ticks(integer=False))

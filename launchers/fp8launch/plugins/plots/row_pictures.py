"""Pictures of rows: bars, and lines over the sequence length, the number of GPUs or a swept setting."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from typing import Any

from fp8launch.plugins.plots.style import (
    COLOURS,
    INK,
    LABEL,
    MARKERS,
    RING,
    Encoding,
    Key,
    Lines,
    Panel,
    Picture,
    Size,
    bars_height,
    doubling_axis,
    few_ticks,
    grouped,
    left_out,
    length,
    lines_of,
    loss_axis,
    name_bars,
    plain,
    side_by_side,
    thousands,
    time_unit,
    world,
)
from fp8launch.report.columns import ratio_mark
from fp8launch.report.losses import LossSummary, end_words, learning_settings, ranked_by_loss, swept_learning
from fp8launch.report.rows import Published, Row, in_units, scaling_modes
from fp8launch.report.run_report import Statistic
from fp8launch.report.variant_labels import short_name, words_of
from fp8launch.wording import rounded


@dataclass(frozen=True)
class Value:
    """A number, half the length of its error bar, and the numbers of single runs if there are several."""

    number: float
    spread: float = 0.0
    runs: tuple[float, ...] = ()


Of = Callable[[Row], Value | None]


def value_of(measure: Statistic | None, scale: float = 1.0) -> Value | None:
    if measure is None:
        return None
    runs = tuple(scale * run for run in measure.runs) if len(measure.runs) > 1 else ()
    return Value(scale * measure.median, scale * measure.spread, runs)


def total(row: Row) -> Value | None:
    if not row.world:
        return None
    return value_of(row.tokens, row.world)


def memory(row: Row) -> Value | None:
    if not row.peak_memory_mib:
        return None
    return Value(row.peak_memory_mib / 1024)


def loss(row: Row) -> Value | None:
    if row.loss is None:
        return None
    return Value(row.loss.end, row.loss.std or 0.0, row.loss.seed_values if row.loss.seeds > 1 else ())


# With more bars than this, lines show the same numbers instead.
MOST_BARS = 16
# Runs that differ by less than this share of the axis are not drawn: their rings would hide each other.
_SEEN = 0.03
# Characters in a line of a name.
_LINE = 56


@dataclass(frozen=True)
class Bars:
    """A picture of bars for one quantity. `text` is printed at the end of a bar, `detail` after its name.

    If `zero` is false, points replace the bars, and the axis need not start at zero. `remark` explains the error bars.
    """

    name: str
    title: str
    unit: str
    value: Of
    text: Callable[[Row, Value], str]
    detail: Callable[[Row], str] = lambda row: ""
    published: Callable[[Published], float | None] = lambda published: None
    zero: bool = True
    remark: str = ""


def _number(value: float) -> str:
    if value >= 1000:
        return f"{value:,.0f}"
    if 0 < value < 1:
        return rounded(value, 0)
    return f"{value:.4g}"


def _with_gain(row: Row, value: Value, units: Sequence[str]) -> str:
    """Return the value, with the speed-up if that is a ratio of values in one of these units."""
    text = _number(value.number)
    speedup = row.speedup
    if speedup is None or speedup.value is None or speedup.against == row.name or speedup.unit not in units:
        return text
    if speedup.interval and not speedup.distinguishable:
        return f"{text}  not distinguishable"
    return f"{text}  {speedup.value:.2f}×{ratio_mark(speedup)}"


def _flops(row: Row) -> str:
    if not row.tflops:
        return ""
    text = f"{_number(row.tflops.median)} TFLOP/s"
    if row.mfu:
        share = 100 * row.mfu.median
        text += f", {share:.{0 if share >= 10 else 1}f} % of {row.peak_tflops:g}"
    return text


THROUGHPUT = Bars(
    "throughput",
    "Throughput",
    "tokens/s/GPU",
    lambda row: value_of(row.tokens),
    lambda row, value: _with_gain(row, value, ["tokens/s/GPU"]),
    _flops,
    lambda published: published.tokens_per_s_per_gpu,
)


def step_time_bars(rows: Sequence[Row]) -> Bars:
    """Return the picture of step times, in seconds if all are long."""
    unit = time_unit([row.step_time.median for row in rows if row.step_time])
    return Bars(
        "step_time_bars",
        "Step time",
        f"{unit.name} per iteration",
        lambda row: value_of(row.step_time, unit.per_ms),
        lambda row, value: _with_gain(row, value, ["iterations/s", "samples/s/GPU"]),
    )


MEMORY = Bars(
    "memory",
    "Peak memory",
    "GiB on the fullest GPU",
    memory,
    lambda row, value: f"{value.number:,.1f}",
)
LOSS = Bars(
    "loss_end",
    "Loss at the end",
    "loss (axis does not start at 0)",
    loss,
    lambda row, value: f"{value.number:.4f}",
    zero=False,
    remark="mean over the seeds; error bars: standard deviation over several seeds",
)


def bar_picture(rows: Sequence[Row], encoding: Encoding, bars: Bars) -> list[Picture]:
    """Return a picture with a bar for each row, or nothing if no row has the quantity."""
    if not any(map(bars.value, rows)):
        return []
    names = [_name(row.name, bars.detail(row)) for row in rows]
    bars = replace(bars, unit=in_units(rows, bars.unit))
    draw = partial(draw_bars, rows=rows, names=names, encoding=encoding, bars=bars)
    panel = Panel(draw, tall=bars_height(names), left=0.1)
    return [Picture(bars.name, bars.title, (panel,), (), bars.remark)]


def _name(name: str, detail: str) -> str:
    """Return the text above a bar: the row's name, broken between words, and the detail."""
    lines = textwrap.wrap(plain(name), _LINE, break_long_words=False, break_on_hyphens=False)
    if detail and len(lines[-1]) + len(detail) + 3 <= _LINE + 4:
        lines[-1] += f" · {detail}"
    elif detail:
        lines.append(detail)
    return "\n".join(lines)


def draw_bars(ax: Any, rows: Sequence[Row], names: Sequence[str], encoding: Encoding, bars: Bars) -> None:
    """Draw a bar for each row, with the spread of its runs as an error bar and the published figure as a line."""
    known = list(filter(None, map(bars.value, rows)))
    highest = max(value.number + value.spread for value in known)
    lowest = 0.0
    if not bars.zero:
        low = min(value.number - value.spread for value in known)
        lowest = low - 0.15 * (highest - low or 0.1 * highest)
    for row, position in zip(rows, name_bars(ax, names, bars.unit), strict=True):
        value = bars.value(row)
        if value is None:
            ax.annotate("not known", (lowest, position), (6, 0), va="center", **LABEL)
            continue
        if value.runs and max(value.runs) - min(value.runs) > _SEEN * (highest - lowest):
            ax.plot(value.runs, [position] * len(value.runs), **RING, color=INK)
        highest = max(highest, _draw_bar(ax, position, row, value, encoding.colour(row), bars))
    ax.spines["left"].set_visible(bars.zero)
    # Leave room for the text at the end of the longest bar.
    ax.set_xlim(lowest, lowest + (highest - lowest) * 1.6)
    ax.xaxis.set_major_locator(few_ticks(integer=bars.zero))


def _draw_bar(ax: Any, at: float, row: Row, value: Value, colour: str, bars: Bars) -> float:
    """Draw one bar with its error bar, published figure and text. Return its end, including error bar and figure."""
    if bars.zero:
        ax.barh(at, value.number, color=colour, height=0.42)
    else:
        ax.plot(value.number, at, "o", color=colour)
    if value.spread:
        ax.errorbar(value.number, at, xerr=value.spread, color=INK, elinewidth=1, capsize=2.5)
    text = bars.text(row, value)
    end = max(value.number + value.spread, *value.runs, 0)
    figure = None
    if row.published:
        figure = bars.published(row.published)
    if figure:
        ax.plot([figure] * 2, [at - 0.28, at + 0.28], color=INK, linewidth=1.6, linestyle=":")
        end = max(end, figure)
        text += f"  (published {figure:,.0f})"
    ax.annotate(text, (end, at), (5, 0), va="center", **LABEL)
    return end


@dataclass(frozen=True)
class Quantity:
    """One quantity over a size. With `shared` all panels have the same scale; `full` is the ideal value."""

    name: str
    title: str
    unit: str
    value: Of
    shared: bool = False
    full: float | None = None


def _efficiency(row: Row) -> Value | None:
    if row.efficiency is None or not row.efficiency.ratio.value:
        return None
    interval = row.efficiency.ratio.interval
    spread = 0.0
    if interval:
        spread = 50 * (interval.high - interval.low)
    return Value(100 * row.efficiency.ratio.value, spread)


_TOTAL = Quantity("total", "Aggregate tokens/s", "tokens/s on all GPUs", total)
_OVER_LENGTH = (
    Quantity("tflop_s", "TFLOP/s", "model TFLOP/s/GPU", lambda row: value_of(row.tflops), shared=True),
    Quantity("tokens", "Tokens/s", "tokens/s/GPU", lambda row: value_of(row.tokens)),
    _TOTAL,
    Quantity("mfu", "MFU", "% of each data type's own peak", lambda row: value_of(row.mfu, 100), shared=True),
)
_MEMORY_OVER_LENGTH = Quantity("memory", "Peak memory", "GiB on the fullest GPU", memory, shared=True)


def sequence_pictures(rows: Sequence[Row], encoding: Encoding, memory: bool) -> list[Picture]:
    """Return pictures over the sequence length, including memory if there are too many rows for bars."""
    quantities = list(_OVER_LENGTH)
    if not any((world(row) or 1) > 1 for row in rows):
        quantities.remove(_TOTAL)
    if memory:
        quantities.append(_MEMORY_OVER_LENGTH)
    over = _Over("sequence", "sequence length", "sequence length (tokens, log scale)", length, world)
    found = []
    for quantity in quantities:
        found += _line_picture(rows, encoding, quantity, over)
    return found


def scaling_pictures(rows: Sequence[Row], encoding: Encoding) -> list[Picture]:
    """Return scaling efficiency over GPUs. Without it, return aggregate speed, unless a picture over lengths has it.

    Aggregate speed grows with the GPUs in any case, so that its lines hide how much is lost.
    """
    over = _Over("scaling", in_units(rows, "number of GPUs"), in_units(rows, "GPUs (log scale)"), world, length)
    modes = ", ".join(scaling_modes(rows))
    unit = f"efficiency (%), {modes} scaling"
    efficiency = Quantity("efficiency", "Scaling efficiency", unit, _efficiency, shared=True, full=100)
    found = _line_picture(rows, encoding, efficiency, over)
    if not found and len(set(map(length, rows))) < 2:
        found = _line_picture(rows, encoding, _TOTAL, over)
    return found


@dataclass(frozen=True)
class _Over:
    """The x axis is one size; dashes stand for the other size."""

    name: str
    title: str
    label: str
    size: Size
    other: Size


def _line_picture(rows: Sequence[Row], encoding: Encoding, quantity: Quantity, over: _Over) -> list[Picture]:
    """Return one picture with a panel for each group of rows, or nothing if no line has two points."""
    drawn: set[str] = set()
    missing = []
    quantity = replace(quantity, unit=in_units(rows, quantity.unit))
    for same in _lines(rows, encoding, over).values():
        known = [row for row in same if quantity.value(row) and over.size(row)]
        if len(set(map(over.size, known))) > 1:
            drawn.update(row.name for row in known)
        else:
            missing += [row.name for row in same]
    if not drawn:
        return []
    shown = [row for row in rows if row.name in drawn]
    dashes = lines_of(shown, over.other)
    top = None
    if quantity.shared:
        top = _top(shown, quantity)
    note = ""
    if quantity.full is not None:
        note = in_units(rows, "speed per GPU relative to the fewest GPUs; bars: 95 % interval")
    panels = []
    for title, same in grouped(shown, encoding.panel).items():
        draw = partial(_draw_lines, rows=same, encoding=encoding, quantity=quantity, over=over, dashes=dashes, top=top)
        panels.append(Panel(draw, title))
    return [
        Picture(
            f"{over.name}_{quantity.name}",
            f"{quantity.title} over {over.title}",
            tuple(panels),
            (*encoding.keys(shown), *dashes.keys(INK)),
            "; ".join(filter(None, (note, left_out(missing, "fewer than two values")))),
        )
    ]


def _lines(rows: Sequence[Row], encoding: Encoding, over: _Over) -> dict[str, list[Row]]:
    """Group the rows that one line connects: they share a panel, a colour and a dash."""

    def line(row: Row) -> str:
        return repr((encoding.panel(row), encoding.word(row), over.other(row)))

    return grouped(rows, line)


def _top(rows: Sequence[Row], quantity: Quantity) -> float:
    """Return the highest end of an error bar."""
    top = quantity.full or 0.0
    for row in rows:
        if value := quantity.value(row):
            top = max(top, value.number + value.spread)
    return top


def _draw_lines(
    ax: Any,
    rows: Sequence[Row],
    encoding: Encoding,
    quantity: Quantity,
    over: _Over,
    dashes: Lines,
    top: float | None,
) -> None:
    """Draw one line for each colour and dash, with error bars."""
    with_ideal = quantity.name == _TOTAL.name and over.size is world
    groups = list(_lines(rows, encoding, over).values())
    lowest = quantity.full or 0.0
    for i, same in enumerate(groups):
        points = []
        for row in same:
            if value := quantity.value(row):
                points.append((over.size(row) or 0, value.number, value.spread))
        sizes, numbers, spreads = zip(*sorted(points), strict=True)
        dash, marker = dashes.style(same[0])
        if len(dashes.values) < 2:
            dash, marker = "-", "o"
        style: dict[str, Any] = {"color": encoding.colour(same[0]), "linestyle": dash, "marker": marker}
        style["markersize"] = 5
        lowest = min(lowest, *(number - spread for number, spread in zip(numbers, spreads, strict=True)))
        if quantity.full is not None:
            # All lines meet at the ideal value, where error bars would cover each other.
            style["transform"] = side_by_side(ax, i, len(groups))
        if any(spreads):
            style["yerr"] = spreads
        ax.errorbar(sizes, numbers, linewidth=1.4, elinewidth=0.9, capsize=2.5, **style)
        if with_ideal:
            ideal = [numbers[0] * size / sizes[0] for size in sizes]
            ax.plot(sizes, ideal, color=style["color"], linewidth=0.8, linestyle=":", alpha=0.8)
    if quantity.full is not None:
        ax.axhline(quantity.full, color=INK, linewidth=0.8, linestyle=":")
    doubling_axis(ax, list(filter(None, map(over.size, rows))), over.label)
    unit = quantity.unit
    top = top or _top(rows, quantity)
    bottom = 0.0
    if quantity.full is not None and lowest > 0.5 * quantity.full:
        bottom = lowest - 0.2 * (top - lowest)
        unit += "\n(axis does not start at 0)"
    ax.set_ylim(bottom, top + 0.08 * (top - bottom))
    if with_ideal:
        unit += "\n(dotted: ideal)"
    ax.set_ylabel(unit)
    ax.yaxis.set_major_formatter(thousands())


# A sweep over at least this factor gets a logarithmic axis.
_WIDE = 8
# Room to the left and right of the points, as a share of the axis, which holds the rings of the last point.
_BESIDE = 0.1


def swept_loss_pictures(rows: Sequence[Row]) -> list[Picture]:
    """Return a picture for each task: the loss over the swept number, with a line for each combination of settings.

    A task has no picture if no number is swept, or if no line would have two points.
    """
    known = {row.name: row for row in rows if row.loss}
    pictures = []
    for task in ranked_by_loss(list(known.values())):
        pictures += _pictures_of_task([known[row.name] for row in task])
    if len(pictures) > 1:
        pictures = [replace(picture, name=f"{picture.name}_{i}") for i, picture in enumerate(pictures, 1)]
    return pictures


def _pictures_of_task(known: Sequence[Row]) -> list[Picture]:
    name = _swept_number(known)
    if name is None:
        return []
    settings = learning_settings(known)
    lines: dict[str, list[tuple[float, LossSummary]]] = {}
    for row in known:
        if row.loss and (value := _swept_value(row, name)) is not None:
            lines.setdefault(_other_settings(row, name, settings), []).append((value, row.loss))
    if max(map(len, lines.values())) < 2:
        return []
    keys = []
    for label, colour, marker in zip(lines, cycle(COLOURS), cycle(MARKERS), strict=False):
        keys.append(Key(plain(label) or "loss", colour, marker=marker))
    title = short_name(name)
    draw = partial(_draw_sweep, lines=list(lines.values()), keys=keys, label=title)
    shown_keys = tuple(keys) if len(keys) > 1 else ()
    remark = f"mean of the {end_words(row.loss for row in known)}"
    seeds = {row.loss.seeds for row in known if row.loss}
    if max(seeds) > 1:
        remark += "; bars: 95 % interval of the mean over seeds"
        if any(row.loss and row.loss.interval and row.loss.interval.low == 0 for row in known):
            remark += ", cut off at 0"
        if 2 in seeds:
            remark += ", wide for 2 seeds; arrows: the interval goes beyond the axis"
        mean = replace(keys[0], text="mean over the seeds")
        shown_keys = (*(shown_keys or [mean]), Key("single seeds", INK, shape="ring"))
    else:
        remark += "; one seed for each point, so the noise between seeds is not known"
    return [Picture("loss_end", f"Loss at the end over {title}", (Panel(draw, keys=shown_keys),), (), remark)]


def _other_settings(row: Row, swept: str, settings: Sequence[str]) -> str:
    """Name the settings of a row other than the swept one, including settings that its label leaves out."""
    words = {name: words_of(name, row.facts[name]) for name in settings if name in row.facts}
    others = [text for name, text in words.items() if name != swept]
    others += [part for part in row.label.split(", ") if part not in words.values()]
    if not row.one_size:
        others.append(row.size)
    return ", ".join(filter(None, others))


def _swept_number(rows: Sequence[Row]) -> str | None:
    """Return the swept argument with the most values, if its values are numbers."""
    counts: dict[str, int] = {}
    for name in swept_learning(rows):
        values = {_swept_value(row, name) for row in rows} - {None}
        if len(values) > 1:
            counts[name] = len(values)
    return max(counts, key=lambda name: counts[name], default=None)


def _swept_value(row: Row, name: str) -> float | None:
    value = row.facts.get(name)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    return None


def _draw_sweep(ax: Any, lines: Sequence[Sequence[tuple[float, LossSummary]]], keys: Sequence[Key], label: str) -> None:
    values, reach, arrows = [], [], []
    for i, (points, key) in enumerate(zip(lines, keys, strict=True)):
        beside = {"transform": side_by_side(ax, i, len(lines))}
        swept, ends, below, above = [], [], [], []
        for value, loss in sorted(points, key=lambda point: point[0]):
            interval = loss.interval
            swept.append(value)
            ends.append(loss.end)
            below.append(loss.end - interval.low if interval else 0.0)
            above.append(interval.high - loss.end if interval else 0.0)
            reach += [loss.end, *loss.seed_values]
            if interval:
                arrows.append((value, interval, {"color": key.colour, "markersize": 5, "clip_on": False, **beside}))
            for k, seed in enumerate(loss.seed_values if loss.seeds > 1 else ()):
                # Seeds that agree would hide each other, and the mean.
                aside = side_by_side(ax, i, len(lines), more=5 + 6 * k / (loss.seeds - 1))
                ax.plot(value, seed, **RING, color=key.colour, transform=aside)
        style = {"color": key.colour, "marker": key.marker, "markersize": 5, "linewidth": 1.4}
        ax.errorbar(swept, ends, yerr=[below, above], elinewidth=0.9, capsize=2.5, **style, **beside)
        values += swept
    numbers = sorted(set(values))
    # Lines with a transform of their own do not set the scale.
    if numbers[0] > 0 and numbers[-1] >= _WIDE * numbers[0]:
        ax.set_xscale("log")
        ax.minorticks_off()
        label += " (log scale)"
        room = (numbers[-1] / numbers[0]) ** _BESIDE
        ax.set_xlim(numbers[0] / room, numbers[-1] * room)
    else:
        room = _BESIDE * (numbers[-1] - numbers[0])
        ax.set_xlim(numbers[0] - room, numbers[-1] + room)
    if len(numbers) <= 6:
        ax.set_xticks(numbers, [f"{number:g}" for number in numbers])
    ax.set_xlabel(label)
    # The interval of two seeds can be many times wider than the range of the losses, so it may leave the axes.
    loss_axis(ax, min(reach), max(reach), room=0.25)
    bottom, top = ax.get_ylim()
    for value, interval, style in arrows:
        # On a log axis, 0 is beyond the axis too.
        if interval.low < bottom:
            ax.plot(value, bottom, marker="v", **style)
        if interval.high > top:
            ax.plot(value, top, marker="^", **style)

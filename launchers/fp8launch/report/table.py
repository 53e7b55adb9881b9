"""A comparison as one table of text, the same for the terminal, Markdown and HTML: units in the headers.

A mark at a ratio: `*` something else differs too, `!` given by force between unlike runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fp8launch.report.comparison import Comparison, Entry
from fp8launch.report.phases import PHASE_COLUMNS, phase_cells
from fp8launch.report.rows import Measure
from fp8launch.report.scaling import Ratio

NONE = "–"
LEGEND = {
    "*": "something beside the variant differs too: see what differs",
    "!": "given by force: the runs are unlike",
    "unlike": "no ratio: the runs are unlike",
}


@dataclass(frozen=True)
class Column:
    """`text` renders an entry; a column in which nothing is known is left out. Numbers stand to the right."""

    header: str
    text: Callable[[Entry], str]
    number: bool = True


@dataclass(frozen=True)
class Table:
    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numbers: tuple[bool, ...]


def main_table(comparison: Comparison) -> Table:
    """A row for each variant and size. Runs without a number keep their row, with what became of them."""
    weak = {e.efficiency.mode for e in comparison.entries if e.efficiency}
    mode = f" ({', '.join(sorted(weak))})" if weak else ""
    several = any((e.row.world or 0) > 1 for e in comparison.entries)
    columns = [
        Column("variant", lambda e: e.row.label, number=False),
        Column("nodes", lambda e: _count(e.row.nodes)),
        Column("GPUs", lambda e: _count(e.row.world)),
        Column("runs", _runs, number=False),
        Column("tokens/s/GPU", lambda e: _spread(e.tokens, 0)),
        Column("step time (ms)", lambda e: _spread(e.step_time, 1)),
        Column("TFLOP/s/GPU", lambda e: _number(e.tflops, 1)),
        Column("MFU (% of peak)", _mfu),
        Column("peak memory (GiB)", lambda e: f"{e.peak_memory_mib / 1024:,.1f}" if e.peak_memory_mib else NONE),
        Column("speed-up [95 % interval]", lambda e: ratio_text(e.speedup, "×", 2)),
        Column(
            f"scaling efficiency{mode} (%)",
            lambda e: ratio_text(e.efficiency.ratio, "", 1, 100) if e.efficiency else NONE,
        ),
        Column("tokens/s in all", lambda e: f"{e.tokens_total:,.0f}" if e.tokens_total and several else NONE),
        Column("energy (mJ/token)", lambda e: f"{e.energy_per_token * 1e3:,.2f}" if e.energy_per_token else NONE),
        Column("cost (per million tokens)", _cost),
        Column("published tokens/s/GPU (ours in %)", _published),
    ]
    return _table(columns, comparison.entries)


def differences_table(comparison: Comparison) -> Table:
    """What differs between the rows, and what that means for a ratio."""
    names = [entry.row.name for entry in comparison.entries]
    rows = [
        (d.name, "what is compared" if d.axis else d.kind, *(_short(d.values.get(name, "?")) for name in names))
        for d in comparison.differences
    ]
    return Table(("what differs", "meaning", *names), tuple(rows), (False,) * (2 + len(names)))


def phases_table(comparison: Comparison) -> Table | None:
    """A row for each phase of each run that has several; None where no run has."""
    runs = [run for entry in comparison.entries for run in entry.row.runs if len(run.report.phases) > 1]
    rows = [(run.name, *cells) for run in runs for cells in phase_cells(run.report)]
    return Table(("run", *PHASE_COLUMNS), tuple(rows), (False, *PHASE_COLUMNS.values())) if rows else None


def _table(columns: Sequence[Column], entries: Sequence[Entry]) -> Table:
    cells = [[column.text(entry) for entry in entries] for column in columns]
    kept = [i for i, column in enumerate(cells) if i == 0 or any(cell != NONE for cell in column)]
    return Table(
        tuple(columns[i].header for i in kept),
        tuple(zip(*(cells[i] for i in kept), strict=True)),
        tuple(columns[i].number for i in kept),
    )


def ratio_text(ratio: Ratio | None, unit: str, digits: int, scale: float = 1) -> str:
    if ratio is None:
        return NONE
    if ratio.value is None:
        return "unlike" if not ratio.missing and not ratio.verdict.comparable else NONE
    mark = "!" if not ratio.verdict.comparable else "*" if ratio.verdict.noted else ""
    text = f"{scale * ratio.value:.{digits}f}{unit}{mark}"
    if ratio.interval is None:
        return text
    # One digit more: intervals are often narrower than the ratio's last digit.
    low, high = (f"{scale * v:.{digits + (unit == '×')}f}" for v in (ratio.interval.low, ratio.interval.high))
    return f"{text} [{low}, {high}{' within' if ratio.interval.covers == 'iterations' else ''}]"


def _runs(entry: Entry) -> str:
    row = entry.row
    return row.status if row.status != "ok" else f"{len(row.good)} ok"


def _count(value: int | None) -> str:
    return NONE if value is None else str(value)


def _number(measure: Measure | None, digits: int) -> str:
    if measure is None:
        return NONE
    return f"{measure.median:,.{4 if abs(measure.median) < 1 else digits}f}"


def _spread(measure: Measure | None, digits: int) -> str:
    """`median ± half the interquartile range`; with repeats half the range of the runs' medians instead."""
    if measure is None:
        return NONE
    text = _number(measure, digits)
    if len(measure.runs) > 1:
        return f"{text} ± {(max(measure.runs) - min(measure.runs)) / 2:,.{digits}f}"
    return f"{text} ± {measure.iqr / 2:,.{digits}f}"


def _mfu(entry: Entry) -> str:
    if entry.mfu is None or entry.peak_tflops is None:
        return NONE
    return f"{100 * entry.mfu.median:.1f} of {entry.peak_tflops:g}"


def _cost(entry: Entry) -> str:
    return NONE if entry.cost_per_million_tokens is None else f"{entry.cost_per_million_tokens:,.4g}"


def _published(entry: Entry) -> str:
    published = entry.published
    if published is None:
        return NONE
    ours = f" ({100 * published.ratio:.0f} %)" if published.ratio else ""
    return f"{published.tokens_per_s_per_gpu:,.0f}{ours}{'*' if published.notes else ''}"


def _short(value: object) -> str:
    words = {"None": "off", "False": "off", "True": "on"}
    text = words.get(str(value), str(value))
    return text if len(text) <= 40 else f"{text[:18]}…{text[-18:]}"


def remarks(comparison: Comparison) -> list[str]:
    """Everything that a reader of the numbers must know, in sentences; what makes it invalid is in `problems`."""
    lines = []
    if comparison.baseline:
        lines.append(
            f"speed-up: tokens/s/GPU over {comparison.baseline}, of the row that is alike otherwise; intervals marked "
            "'within' cover the iterations of two single runs, the others cover repeats"
        )
    if any(e.row.good for e in comparison.entries):
        lines.append("±: half the range of the repeats' medians; for a single run half its interquartile range")
    if comparison.price_per_gpu_hour:
        lines.append(f"cost: at {comparison.price_per_gpu_hour:g} per GPU-hour")
    lines += _ratio_remarks(comparison)
    lines += _row_remarks(comparison)
    lines += list(dict.fromkeys(f"published: {e.published.source}" for e in comparison.entries if e.published))
    return [*lines, *comparison.notes]


def _row_remarks(comparison: Comparison) -> list[str]:
    """The notes of the rows; one that several rows share comes once."""
    rows: dict[str, list[str]] = {}
    for entry in comparison.entries:
        for note in (*entry.notes, *(entry.published.notes if entry.published else ())):
            rows.setdefault(note, []).append(entry.row.name)
    every = len(comparison.entries)
    return [f"{'all rows' if len(names) == every > 1 else '; '.join(names)}: {note}" for note, names in rows.items()]


def _ratio_remarks(comparison: Comparison) -> list[str]:
    lines = []
    for entry in comparison.entries:
        one = entry.speedup
        if one and one.missing:
            lines.append(f"{entry.row.name}: no speed-up, {one.missing}")
        if one and one.verdict.noted and not one.missing:
            lines.append(f"* {entry.row.name} over {one.against} differs in {'; '.join(one.verdict.noted)}")
        scaling = entry.efficiency
        if scaling and scaling.ratio.verdict.noted and not scaling.ratio.missing:
            noted = "; ".join(scaling.ratio.verdict.noted)
            lines.append(f"* scaling of {entry.row.name} over {scaling.ratio.against} differs in {noted}")
    return lines

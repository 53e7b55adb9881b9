"""The columns of a comparison, one list for every medium: table, Markdown, HTML, CSV and JSON.

To add a column, add an entry to COLUMNS.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fp8launch.report.cells import (
    NONE,
    cost_text,
    count_text,
    efficiency_text,
    energy_text,
    goodput_text,
    loss_text,
    memory_text,
    mfu_text,
    published_text,
    ratio_text,
    total_text,
)
from fp8launch.report.differences import settings_change_speed
from fp8launch.report.entry import Entry, about_loss, scaling_modes
from fp8launch.report.grouping import Measure
from fp8launch.report.json_values import json_list


@dataclass(frozen=True)
class Column:
    """One quantity of the rows.

    `name` is its JSON field and `value` what stands there. `header`, with the unit, and `text` are what tables show,
    right-aligned for a `number`; a column without a header is not in them. `csv` maps names of CSV columns to values;
    without it the CSV has `name` with `value`.
    """

    name: str
    value: Callable[[Entry], object]
    header: str = ""
    text: Callable[[Entry], str] = lambda entry: NONE
    csv: Mapping[str, Callable[[Entry], object]] | None = None
    number: bool = True

    @property
    def csv_cells(self) -> Mapping[str, Callable[[Entry], object]]:
        return {self.name: self.value} if self.csv is None else self.csv


def entry_json(entry: Entry) -> dict[str, object]:
    """Return a row as the JSON report has it."""
    found: dict[str, object] = {}
    for column in COLUMNS:
        value = column.value(entry)
        as_json = getattr(value, "as_json", None)
        found[column.name] = as_json() if as_json else value
    return found


def csv_names() -> list[str]:
    """Return the header of the CSV file."""
    names: list[str] = []
    for column in COLUMNS:
        names += column.csv_cells
    return names


def csv_row(entry: Entry) -> list[object]:
    """Return the cells of one line of the CSV file, numbers unrounded, None where nothing is known."""
    cells = []
    for column in COLUMNS:
        for value in column.csv_cells.values():
            cells.append(value(entry))
    return cells


# --- What tables show -----------------------------------------------------------------------------------------------


def _number(measure: Measure | None, digits: int) -> str:
    if measure is None:
        return NONE
    if abs(measure.median) < 1:
        digits = 4
    return f"{measure.median:,.{digits}f}"


def _spread(measure: Measure | None, digits: int) -> str:
    """`median ± half the interquartile range`; with repeats, half the range of the runs' medians instead."""
    if measure is None:
        return NONE
    return f"{_number(measure, digits)} ± {measure.spread:,.{digits}f}"


def _runs_text(entry: Entry) -> str:
    row = entry.row
    if row.status == "ok":
        unhealthy = sum(run.report.status == "unhealthy" for run in row.runs)
        counts = ((len(row.good) - unhealthy, "ok"), (unhealthy, "unhealthy"))
        return ", ".join(f"{count} {state}" for count, state in counts if count)
    return row.status


# --- What JSON and CSV hold -----------------------------------------------------------------------------------------


def _status(entry: Entry) -> str:
    row = entry.row
    if row.status == "ok":
        return "unhealthy" if any(run.report.status == "unhealthy" for run in row.runs) else "ok"
    if row.good:
        return "partial"
    if all(run.absent for run in row.runs):
        return "missing"
    return row.runs[0].report.status


def _runs(entry: Entry) -> list[dict[str, object]]:
    runs: list[dict[str, object]] = []
    for run in entry.row.runs:
        status: str = run.report.status
        if run.absent:
            status = "missing"
        goodput = None
        if run.report.goodput:
            goodput = run.report.goodput.as_json()
        runs.append(
            {
                "name": run.name,
                "status": status,
                "command": run.command,
                "health": json_list(run.report.health),
                "goodput": goodput,
            }
        )
    return runs


def _of(path: str) -> Callable[[Entry], object]:
    """An attribute of the entry, such as `speedup.interval.low`; None where a part of the path is missing."""

    def value(entry: Entry) -> object:
        found: object = entry
        for name in path.split("."):
            if found is None:
                return None
            found = getattr(found, name)
        return found

    return value


def _unlike(entry: Entry) -> str | None:
    if entry.speedup is None:
        return None
    return "; ".join(entry.speedup.comparability.unlike)


def _noted(entry: Entry) -> str | None:
    if entry.speedup is None:
        return None
    return "; ".join(entry.speedup.comparability.noted)


# Its position in the table depends on what is compared.
_LOSS = Column(
    "loss",
    lambda e: e.loss,
    "loss at the end (perplexity)",
    loss_text,
    csv={
        "loss_last": _of("loss.last"),
        "loss_smoothed": _of("loss.smoothed"),
        "perplexity": _of("loss.perplexity"),
        "loss_mean": _of("loss.mean"),
        "loss_std": _of("loss.std"),
        "loss_mean_low": _of("loss.interval.low"),
        "loss_mean_high": _of("loss.interval.high"),
        "seeds": _of("loss.seeds"),
    },
)
_RUNS = Column(
    "runs",
    _runs,
    "runs",
    _runs_text,
    csv={"runs_ok": lambda e: len(e.row.good), "runs": lambda e: len(e.row.runs)},
    number=False,
)
_SPEEDUP = Column(
    "speedup",
    lambda e: e.speedup,
    "speed-up [95 % interval]",
    lambda e: ratio_text(e.speedup, "×", 2),
    csv={
        "speedup": _of("speedup.value"),
        "speedup_unit": _of("speedup.unit"),
        "speedup_low": _of("speedup.interval.low"),
        "speedup_high": _of("speedup.interval.high"),
        "speedup_covers": _of("speedup.interval.covers"),
        "speedup_against": _of("speedup.against"),
        "comparable": _of("speedup.comparability.comparable"),
        "unlike": _unlike,
        "noted": _noted,
    },
)
COLUMNS: tuple[Column, ...] = (
    Column("variant", lambda e: e.row.label, "variant", lambda e: e.row.label, number=False),
    Column("nodes", lambda e: e.row.nodes, "nodes", lambda e: count_text(e.row.nodes)),
    Column("gpus", lambda e: e.row.world, "GPUs", lambda e: count_text(e.row.world)),
    Column("status", _status, csv={"status": lambda e: e.row.status}),
    Column("status_text", lambda e: e.row.status, csv={}),
    _RUNS,
    Column(
        "tokens_per_s_per_gpu",
        lambda e: e.tokens,
        "tokens/s/GPU",
        lambda e: _spread(e.tokens, 0),
        csv={"tokens_per_s_per_gpu": _of("tokens.median"), "tokens_per_s_per_gpu_iqr": _of("tokens.iqr")},
    ),
    Column(
        "step_time_ms",
        lambda e: e.step_time,
        "step time (ms)",
        lambda e: _spread(e.step_time, 1),
        csv={
            "step_time_ms": _of("step_time.median"),
            "step_time_ms_iqr": _of("step_time.iqr"),
            "step_time_ms_run_min": lambda e: e.step_time and min(e.step_time.runs),
            "step_time_ms_run_max": lambda e: e.step_time and max(e.step_time.runs),
            "iteration_lines": _of("step_time.n"),
        },
    ),
    Column(
        "tflops_per_gpu",
        lambda e: e.tflops,
        "TFLOP/s/GPU",
        lambda e: _number(e.tflops, 1),
        csv={"tflops_per_gpu": _of("tflops.median")},
    ),
    Column("mfu", lambda e: e.mfu, "MFU (% of peak)", mfu_text, csv={"mfu": _of("mfu.median")}),
    Column("mfu_denominator_tflops", lambda e: e.peak_tflops),
    Column("peak_memory_mib", lambda e: e.peak_memory_mib, "peak memory (GiB)", memory_text),
    _SPEEDUP,
    Column(
        "scaling_efficiency",
        lambda e: e.efficiency,
        "scaling efficiency{modes} (%)",
        efficiency_text,
        csv={
            "scaling": _of("efficiency.mode"),
            "scaling_efficiency": _of("efficiency.ratio.value"),
        },
    ),
    Column("goodput", lambda e: e.goodput, "goodput (%)", goodput_text),
    Column("tokens_per_s", lambda e: e.tokens_total, "tokens/s in all", total_text),
    Column("energy_j_per_token", lambda e: e.energy_per_token, "energy (mJ/token)", energy_text),
    Column("cost_per_million_tokens", lambda e: e.cost_per_million_tokens, "cost (per million tokens)", cost_text),
    Column(
        "published",
        lambda e: e.published,
        "published tokens/s/GPU (ours in %)",
        published_text,
        csv={
            "published_tokens_per_s_per_gpu": _of("published.tokens_per_s_per_gpu"),
            "published_ratio": _of("published.ratio"),
        },
    ),
    _LOSS,
    Column("notes", lambda e: list(e.notes), csv={}),
)


# --- Tables ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Table:
    """A table of text; `numbers` says which columns are right-aligned."""

    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numbers: tuple[bool, ...]


def shows_speedup(entries: Sequence[Entry]) -> bool:
    """Whether the speed-up is a result: between rows that only learn differently it is noise."""
    return not about_loss(entries) or settings_change_speed([entry.row for entry in entries])


def _table_columns(entries: Sequence[Entry]) -> list[Column]:
    """Return the columns in the table's order. The loss comes first if the rows are about it, else it is left out."""
    ordered = list(COLUMNS)
    ordered.remove(_LOSS)
    if about_loss(entries):
        ordered.insert(ordered.index(_RUNS) + 1, _LOSS)
    if not shows_speedup(entries):
        ordered.remove(_SPEEDUP)
    return ordered


def main_table(entries: Sequence[Entry]) -> Table:
    """Return the columns in which something is known. Runs without a number keep their row."""
    modes = ", ".join(scaling_modes(entries))
    if modes:
        modes = f" ({modes})"
    headers: list[str] = []
    cells: list[list[str]] = []
    numbers: list[bool] = []
    for column in _table_columns(entries):
        if not column.header:
            continue
        texts = list(map(column.text, entries))
        if cells and set(texts) <= {NONE}:
            continue
        if column.name == "tokens_per_s" and all((entry.row.world or 1) == 1 for entry in entries):
            continue  # the same as tokens/s/GPU
        headers.append(column.header.format(modes=modes))
        cells.append(texts)
        numbers.append(column.number)
    return Table(tuple(headers), tuple(zip(*cells, strict=True)), tuple(numbers))

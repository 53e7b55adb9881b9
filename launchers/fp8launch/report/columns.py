"""The columns of a comparison, one list for every medium: table, Markdown, HTML, CSV and JSON.

To add a column, add an entry to COLUMNS.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fp8launch.report.grouping import ComparisonRow, Measure
from fp8launch.report.loss_summary import LossSummary, compares_learning
from fp8launch.report.scaling import Ratio, ScalingEfficiency

NONE = "–"


@dataclass(frozen=True)
class Published:
    """The speed that the recipe quotes; `ratio` is the measured speed over it, in tokens/s/GPU."""

    tokens_per_s_per_gpu: float
    tflops_per_gpu: float | None
    gpus: int | None
    source: str
    ratio: float | None
    notes: tuple[str, ...]

    def as_json(self) -> dict[str, object]:
        return {**{name: getattr(self, name) for name in self.__dataclass_fields__}, "notes": list(self.notes)}


@dataclass(frozen=True)
class Entry:
    """A row with its numbers. Units: tokens/s/GPU, ms, dense model TFLOP/s/GPU, MiB, J/token, currency/million."""

    row: ComparisonRow
    tokens: Measure | None
    step_time: Measure | None
    tflops: Measure | None
    mfu: Measure | None
    peak_tflops: float | None
    peak_memory_mib: float | None
    tokens_total: float | None
    energy_per_token: float | None
    cost_per_million_tokens: float | None
    speedup: Ratio | None
    efficiency: ScalingEfficiency | None
    published: Published | None
    notes: tuple[str, ...]
    loss: LossSummary | None = None

    def as_json(self) -> dict[str, object]:
        found: dict[str, object] = {}
        for column in COLUMNS:
            value = column.value(self)
            as_json = getattr(value, "as_json", None)
            found[column.name] = as_json() if as_json else value
        return found


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


def csv_names() -> list[str]:
    """Return the header of the CSV file."""
    return [name for column in COLUMNS for name in column.csv_cells]


def csv_row(entry: Entry) -> dict[str, object]:
    """Return the cells of one line of the CSV file, numbers unrounded, None where nothing is known."""
    return {name: of(entry) for column in COLUMNS for name, of in column.csv_cells.items()}


# --- What tables show -----------------------------------------------------------------------------------------------


def ratio_text(ratio: Ratio | None, unit: str, digits: int, scale: float = 1) -> str:
    """Render a ratio with its interval and mark, or that no difference is seen.

    `*`: something else differs too; `!`: forced between unlike runs.
    """
    if ratio is None or ratio.missing:
        return NONE
    if ratio.value is None:
        return NONE if ratio.comparability.comparable else "unlike"
    text = f"{scale * ratio.value:.{digits}f}{unit}{ratio_mark(ratio)}"
    if ratio.interval is None:
        return text
    # Intervals are often narrower than the last digit of the ratio.
    more = digits + 1 if unit == "×" else digits
    low, high = (f"{scale * bound:.{more}f}" for bound in (ratio.interval.low, ratio.interval.high))
    within = " within" if ratio.interval.covers == "iterations" else ""
    if unit == "×" and ratio.interval.low < 1 < ratio.interval.high:
        # A ratio that may be noise is no headline; JSON and CSV have it.
        text = f"no difference seen{ratio_mark(ratio)}"
    return f"{text} [{low}, {high}{within}]"


def ratio_mark(ratio: Ratio) -> str:
    if not ratio.comparability.comparable:
        return "!"
    return "*" if ratio.comparability.noted else ""


def _count(value: int | None) -> str:
    return NONE if value is None else str(value)


def _number(measure: Measure | None, digits: int) -> str:
    if measure is None:
        return NONE
    return f"{measure.median:,.{4 if abs(measure.median) < 1 else digits}f}"


def _spread(measure: Measure | None, digits: int) -> str:
    """`median ± half the interquartile range`; with repeats, half the range of the runs' medians instead."""
    if measure is None:
        return NONE
    return f"{_number(measure, digits)} ± {measure.spread:,.{digits}f}"


def _runs_text(entry: Entry) -> str:
    row = entry.row
    return row.status if row.status != "ok" else f"{len(row.good)} ok"


def _mfu_text(entry: Entry) -> str:
    if entry.mfu is None or entry.peak_tflops is None:
        return NONE
    return f"{100 * entry.mfu.median:.1f} of {entry.peak_tflops:g}"


def _memory_text(entry: Entry) -> str:
    return f"{entry.peak_memory_mib / 1024:,.1f}" if entry.peak_memory_mib else NONE


def _efficiency_text(entry: Entry) -> str:
    return ratio_text(entry.efficiency.ratio, "", 1, 100) if entry.efficiency else NONE


def _total_text(entry: Entry) -> str:
    several = (entry.row.world or 0) > 1
    return f"{entry.tokens_total:,.0f}" if entry.tokens_total and several else NONE


def _energy_text(entry: Entry) -> str:
    return f"{entry.energy_per_token * 1e3:,.2f}" if entry.energy_per_token else NONE


def _cost_text(entry: Entry) -> str:
    return NONE if entry.cost_per_million_tokens is None else f"{entry.cost_per_million_tokens:,.4g}"


def _published_text(entry: Entry) -> str:
    published = entry.published
    if published is None:
        return NONE
    ours = f" ({100 * published.ratio:.0f} %)" if published.ratio else ""
    return f"{published.tokens_per_s_per_gpu:,.0f}{ours}{'*' if published.notes else ''}"


# --- What JSON and CSV hold -----------------------------------------------------------------------------------------


def _status(entry: Entry) -> str:
    row = entry.row
    if row.status == "ok":
        return "ok"
    if row.good:
        return "partial"
    return "missing" if all(run.absent for run in row.runs) else row.runs[0].report.status


def _runs(entry: Entry) -> list[dict[str, object]]:
    runs: list[dict[str, object]] = []
    for run in entry.row.runs:
        status = "missing" if run.absent else run.report.status
        runs.append({"name": run.name, "status": status, "command": run.command})
    return runs


def _of(part: Callable[[Entry], object], *path: str) -> Callable[[Entry], object]:
    """An attribute of a part of the entry, None where the part is missing."""

    def value(entry: Entry) -> object:
        found = part(entry)
        for name in path:
            found = None if found is None else getattr(found, name)
        return found

    return value


def _joined(names: object) -> str | None:
    return "; ".join(names) if isinstance(names, tuple) else None


def _speedup(entry: Entry) -> object:
    return entry.speedup


def _step_time(entry: Entry) -> object:
    return entry.step_time


def _tokens(entry: Entry) -> object:
    return entry.tokens


LOSS = "loss"

COLUMNS: tuple[Column, ...] = (
    Column("variant", lambda e: e.row.label, "variant", lambda e: e.row.label, number=False),
    Column("nodes", lambda e: e.row.nodes, "nodes", lambda e: _count(e.row.nodes)),
    Column("gpus", lambda e: e.row.world, "GPUs", lambda e: _count(e.row.world)),
    Column("status", _status, csv={"status": lambda e: e.row.status}),
    Column("status_text", lambda e: e.row.status, csv={}),
    Column(
        "runs",
        _runs,
        "runs",
        _runs_text,
        csv={"runs_ok": lambda e: len(e.row.good), "runs": lambda e: len(e.row.runs)},
        number=False,
    ),
    Column(
        "tokens_per_s_per_gpu",
        _tokens,
        "tokens/s/GPU",
        lambda e: _spread(e.tokens, 0),
        csv={"tokens_per_s_per_gpu": _of(_tokens, "median"), "tokens_per_s_per_gpu_iqr": _of(_tokens, "iqr")},
    ),
    Column(
        "step_time_ms",
        _step_time,
        "step time (ms)",
        lambda e: _spread(e.step_time, 1),
        csv={
            "step_time_ms": _of(_step_time, "median"),
            "step_time_ms_iqr": _of(_step_time, "iqr"),
            "step_time_ms_run_min": lambda e: e.step_time and min(e.step_time.runs),
            "step_time_ms_run_max": lambda e: e.step_time and max(e.step_time.runs),
            "iteration_lines": _of(_step_time, "n"),
        },
    ),
    Column(
        "tflops_per_gpu",
        lambda e: e.tflops,
        "TFLOP/s/GPU",
        lambda e: _number(e.tflops, 1),
        csv={"tflops_per_gpu": _of(lambda e: e.tflops, "median")},
    ),
    Column("mfu", lambda e: e.mfu, "MFU (% of peak)", _mfu_text, csv={"mfu": _of(lambda e: e.mfu, "median")}),
    Column("mfu_denominator_tflops", lambda e: e.peak_tflops),
    Column("peak_memory_mib", lambda e: e.peak_memory_mib, "peak memory (GiB)", _memory_text),
    Column(
        "speedup",
        _speedup,
        "speed-up [95 % interval]",
        lambda e: ratio_text(e.speedup, "×", 2),
        csv={
            "speedup": _of(_speedup, "value"),
            "speedup_unit": _of(_speedup, "unit"),
            "speedup_low": _of(_speedup, "interval", "low"),
            "speedup_high": _of(_speedup, "interval", "high"),
            "speedup_covers": _of(_speedup, "interval", "covers"),
            "speedup_against": _of(_speedup, "against"),
            "comparable": _of(_speedup, "comparability", "comparable"),
            "unlike": lambda e: _joined(_of(_speedup, "comparability", "unlike")(e)),
            "noted": lambda e: _joined(_of(_speedup, "comparability", "noted")(e)),
        },
    ),
    Column(
        "scaling_efficiency",
        lambda e: e.efficiency,
        "scaling efficiency{modes} (%)",
        _efficiency_text,
        csv={
            "scaling": _of(lambda e: e.efficiency, "mode"),
            "scaling_efficiency": _of(lambda e: e.efficiency, "ratio", "value"),
        },
    ),
    Column("tokens_per_s", lambda e: e.tokens_total, "tokens/s in all", _total_text),
    Column("energy_j_per_token", lambda e: e.energy_per_token, "energy (mJ/token)", _energy_text),
    Column("cost_per_million_tokens", lambda e: e.cost_per_million_tokens, "cost (per million tokens)", _cost_text),
    Column(
        "published",
        lambda e: e.published,
        "published tokens/s/GPU (ours in %)",
        _published_text,
        csv={
            "published_tokens_per_s_per_gpu": _of(lambda e: e.published, "tokens_per_s_per_gpu"),
            "published_ratio": _of(lambda e: e.published, "ratio"),
        },
    ),
    Column(
        LOSS,
        lambda e: e.loss,
        "loss at the end (perplexity)",
        lambda e: NONE if e.loss is None else e.loss.text,
        csv={
            "loss_last": _of(lambda e: e.loss, "last"),
            "loss_smoothed": _of(lambda e: e.loss, "smoothed"),
            "perplexity": _of(lambda e: e.loss, "perplexity"),
        },
    ),
    Column("notes", lambda e: list(e.notes), csv={}),
)


# --- Tables ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Table:
    """A table of text; `numbers` says which columns are right-aligned."""

    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numbers: tuple[bool, ...]


def _table_columns(entries: Sequence[Entry]) -> list[Column]:
    """The columns in the order of the table: the loss comes first where the rows differ in how they learn, else not."""
    others = [column for column in COLUMNS if column.name != LOSS]
    if not compares_learning([entry.row.runs for entry in entries]):
        return others
    names = [column.name for column in others]
    at = names.index("runs") + 1
    return [*others[:at], *(column for column in COLUMNS if column.name == LOSS), *others[at:]]


def main_table(entries: Sequence[Entry]) -> Table:
    """Return the columns in which something is known. Runs without a number keep their row."""
    modes = sorted({entry.efficiency.mode for entry in entries if entry.efficiency})
    headers: list[str] = []
    cells: list[list[str]] = []
    numbers: list[bool] = []
    for column in _table_columns(entries):
        if not column.header:
            continue
        texts = [column.text(entry) for entry in entries]
        if cells and all(text == NONE for text in texts):
            continue
        headers.append(column.header.format(modes=f" ({', '.join(modes)})" if modes else ""))
        cells.append(texts)
        numbers.append(column.number)
    return Table(tuple(headers), tuple(zip(*cells, strict=True)), tuple(numbers))

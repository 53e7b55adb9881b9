"""The columns of a comparison, one list for every medium: table, Markdown, HTML, CSV and JSON.

To add a column, add an entry to COLUMNS, or to `comparison_columns` of a plugin. A dash in a cell means that the value
is unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fp8launch import plugin_registry
from fp8launch.report.differences import settings_change_speed
from fp8launch.report.rows import Ratio, Row, about_loss, in_units, scaling_modes
from fp8launch.report.run_report import Statistic, json_value
from fp8launch.report.tables import Table
from fp8launch.wording import rounded

NONE = "–"


def ratio_text(ratio: Ratio | None, unit: str, digits: int, scale: float = 1) -> str:
    """Render a ratio with its interval and mark, or say that it is not distinguishable from 1.

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


def mfu_text(row: Row) -> str:
    if row.mfu is None or row.peak_tflops is None:
        return NONE
    return f"{100 * row.mfu.median:.1f} of {row.peak_tflops:g}"


def published_text(row: Row) -> str:
    published = row.published
    if published is None:
        return NONE
    text = f"{published.tokens_per_s_per_gpu:,.0f}"
    if published.ratio:
        text += f" ({100 * published.ratio:.0f} %)"
    if published.notes:
        text += "*"
    return text


@dataclass(frozen=True)
class Column:
    """One quantity of the rows.

    `name` is its JSON field and `value` the field's content. Tables show `header`, with the unit, and `text`,
    right-aligned for a `number`; they leave out a column without a header. `csv` maps names of CSV columns to values;
    without it the CSV has `name` with `value`.

    For all rows together, `conclude` adds a sentence to the conclusion, `explain` lines to the details, and `doubt`
    lines to what makes the conclusion less certain.
    """

    name: str
    value: Callable[[Row], object]
    header: str = ""
    text: Callable[[Row], str] = lambda row: NONE
    csv: Mapping[str, Callable[[Row], object]] | None = None
    number: bool = True
    conclude: Callable[[Sequence[Row]], str] = lambda rows: ""
    explain: Callable[[Sequence[Row]], Sequence[str]] = lambda rows: ()
    doubt: Callable[[Sequence[Row]], Sequence[str]] = lambda rows: ()

    @property
    def csv_cells(self) -> Mapping[str, Callable[[Row], object]]:
        return {self.name: self.value} if self.csv is None else self.csv


def row_json(row: Row) -> dict[str, object]:
    """Return a row as the JSON report has it."""
    found: dict[str, object] = dict.fromkeys(plugin_registry.absent("comparison_columns"))
    for column in all_columns():
        found[column.name] = json_value(column.value(row))
    return found


def csv_names() -> list[str]:
    """Return the header of the CSV file."""
    return [name for column in all_columns() for name in column.csv_cells]


def csv_row(row: Row) -> list[object]:
    """Return the cells of one line of the CSV file, numbers unrounded, None for unknown values."""
    return [value(row) for column in all_columns() for value in column.csv_cells.values()]


# --- What tables show -----------------------------------------------------------------------------------------------


def _number(measure: Statistic | None, digits: int) -> str:
    return NONE if measure is None else rounded(measure.median, digits)


def _spread(measure: Statistic | None, digits: int) -> str:
    """Return the median with its spread: see `Statistic.spread`."""
    if measure is None:
        return NONE
    return f"{_number(measure, digits)} ± {measure.spread:,.{digits}f}"


def _runs_text(row: Row) -> str:
    if row.status == "ok":
        unhealthy = sum(run.status == "unhealthy" for run in row.runs)
        counts = ((len(row.good) - unhealthy, "ok"), (unhealthy, "unhealthy"))
        return ", ".join(f"{count} {state}" for count, state in counts if count)
    return row.status


# --- What JSON and CSV hold -----------------------------------------------------------------------------------------


def _status(row: Row) -> str:
    if row.status == "ok":
        return "unhealthy" if any(run.status == "unhealthy" for run in row.runs) else "ok"
    if row.good:
        return "partial"
    if all(run.absent for run in row.runs):
        return "missing"
    return row.runs[0].status


def _runs(row: Row) -> list[dict[str, object]]:
    runs: list[dict[str, object]] = []
    for run in row.runs:
        runs.append(
            {
                "name": run.name,
                "status": "missing" if run.absent else run.status,
                "command": run.command,
                "health": run.health,
                "goodput": run.goodput,
            }
        )
    return runs


def attribute(found: object, path: str) -> object:
    """Return an attribute such as `speedup.interval.low`; None if a part of the path is missing."""
    for name in path.split("."):
        if found is None:
            return None
        found = getattr(found, name)
    return found


def _of(path: str) -> Callable[[Row], object]:
    return lambda row: attribute(row, path)


def _quantity(name: str, of: str, header: str, form: str, scale: float = 1) -> Column:
    """A plain number: `of` is its attribute. Cells show `scale` times it in Python's format `form`, a dash for zero."""
    value = _of(of)

    def text(row: Row) -> str:
        number = value(row)
        if not number:
            return NONE
        assert isinstance(number, int | float)
        return format(scale * number, form)

    return Column(name, value, header, text)


# Its position in the table depends on what is compared.
_LOSS = Column(
    "loss",
    lambda row: row.loss,
    "loss at the end (perplexity)",
    lambda row: row.loss.text if row.loss else NONE,
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
    csv={"runs_ok": lambda row: len(row.good), "runs": lambda row: len(row.runs)},
    number=False,
)
_SPEEDUP = Column(
    "speedup",
    lambda row: row.speedup,
    "speed-up [95 % interval]",
    lambda row: ratio_text(row.speedup, "×", 2),
    csv={
        "speedup": _of("speedup.value"),
        "speedup_unit": _of("speedup.unit"),
        "speedup_low": _of("speedup.interval.low"),
        "speedup_high": _of("speedup.interval.high"),
        "speedup_covers": _of("speedup.interval.covers"),
        "speedup_against": _of("speedup.against"),
        "comparable": _of("speedup.comparability.comparable"),
        "unlike": lambda row: row.speedup and "; ".join(row.speedup.comparability.unlike),
        "noted": lambda row: row.speedup and "; ".join(row.speedup.comparability.noted),
    },
)
COLUMNS: tuple[Column, ...] = (
    Column("variant", lambda row: row.label, "variant", lambda row: row.label, number=False),
    _quantity("nodes", "nodes", "nodes", "d"),
    _quantity("gpus", "world", "GPUs", "d"),
    Column("status", _status, csv={"status": lambda row: row.status}),
    Column("status_text", lambda row: row.status, csv={}),
    _RUNS,
    Column(
        "tokens_per_s_per_gpu",
        lambda row: row.tokens,
        "tokens/s/GPU",
        lambda row: _spread(row.tokens, 0),
        csv={"tokens_per_s_per_gpu": _of("tokens.median"), "tokens_per_s_per_gpu_iqr": _of("tokens.iqr")},
    ),
    Column(
        "step_time_ms",
        lambda row: row.step_time,
        "step time (ms)",
        lambda row: _spread(row.step_time, 1),
        csv={
            "step_time_ms": _of("step_time.median"),
            "step_time_ms_iqr": _of("step_time.iqr"),
            "step_time_ms_run_min": lambda row: row.step_time and min(row.step_time.runs),
            "step_time_ms_run_max": lambda row: row.step_time and max(row.step_time.runs),
            "iteration_lines": _of("step_time.n"),
        },
    ),
    Column(
        "tflops_per_gpu",
        lambda row: row.tflops,
        "TFLOP/s/GPU",
        lambda row: _number(row.tflops, 1),
        csv={"tflops_per_gpu": _of("tflops.median")},
    ),
    Column("mfu", lambda row: row.mfu, "MFU (% of peak)", mfu_text, csv={"mfu": _of("mfu.median")}),
    Column("mfu_denominator_tflops", lambda row: row.peak_tflops),
    _quantity("peak_memory_mib", "peak_memory_mib", "peak memory (GiB)", ",.1f", scale=1 / 1024),
    _SPEEDUP,
    Column(
        "scaling_efficiency",
        lambda row: row.efficiency,
        "scaling efficiency{modes} (%)",
        lambda row: ratio_text(row.efficiency.ratio, "", 1, 100) if row.efficiency else NONE,
        csv={
            "scaling": _of("efficiency.mode"),
            "scaling_efficiency": _of("efficiency.ratio.value"),
        },
    ),
    _quantity("goodput", "goodput", "goodput (%)", ".0f", scale=100),
    _quantity("tokens_per_s", "tokens_total", "tokens/s in all", ",.0f"),
    _quantity("energy_j_per_token", "energy_per_token", "energy (mJ/token)", ",.2f", scale=1e3),
    _quantity("cost_per_million_tokens", "cost_per_million_tokens", "cost (per million tokens)", ",.4g"),
    Column(
        "published",
        lambda row: row.published,
        "published tokens/s/GPU (ours in %)",
        published_text,
        csv={
            "published_tokens_per_s_per_gpu": _of("published.tokens_per_s_per_gpu"),
            "published_ratio": _of("published.ratio"),
        },
    ),
    _LOSS,
    Column("notes", lambda row: list(row.notes), csv={}),
)


def all_columns() -> list[Column]:
    """Return all columns, including the columns of plugins, before the notes."""
    return [*COLUMNS[:-1], *(column for _, column in plugin_registry.loaded("comparison_columns")), COLUMNS[-1]]


# --- Tables ---------------------------------------------------------------------------------------------------------


def shows_speedup(rows: Sequence[Row]) -> bool:
    """Return whether the speed-up is a result: between rows that differ only in how they learn it is noise."""
    return not about_loss(rows) or settings_change_speed(rows)


def _table_columns(rows: Sequence[Row]) -> list[Column]:
    """Return the columns in the table's order. The loss comes first if the rows are about it, else it is left out."""
    ordered = all_columns()
    ordered.remove(_LOSS)
    if about_loss(rows):
        ordered.insert(ordered.index(_RUNS) + 1, _LOSS)
    if not shows_speedup(rows):
        ordered.remove(_SPEEDUP)
    return ordered


def main_table(rows: Sequence[Row]) -> Table:
    """Return the columns with at least one known value. Runs without a number keep their row."""
    modes = ", ".join(scaling_modes(rows))
    if modes:
        modes = f" ({modes})"
    headers: list[str] = []
    cells: list[list[str]] = []
    numbers: list[bool] = []
    for column in _table_columns(rows):
        if not column.header:
            continue
        texts = list(map(column.text, rows))
        if cells and set(texts) <= {NONE}:
            continue
        if column.name == "tokens_per_s" and all((row.world or 1) == 1 for row in rows):
            continue  # the same as tokens/s/GPU
        headers.append(in_units(rows, column.header.format(modes=modes)))
        cells.append(texts)
        numbers.append(column.number)
    return Table(tuple(headers), tuple(zip(*cells, strict=True)), tuple(numbers))

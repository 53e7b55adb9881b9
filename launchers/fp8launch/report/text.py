"""The report of a run for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fp8launch.report.goodput import Goodput, goodput_line, goodput_rows
from fp8launch.report.machines import compressed
from fp8launch.report.phases import PHASE_COLUMNS, phase_cells
from fp8launch.report.run_report import RunReport, Statistic
from fp8launch.report.steady_state import RULE_NOTE, ranges
from fp8launch.report.step_parts import StepPart, step_parts
from fp8launch.report.tensor_stats import tensor_lines
from fp8launch.wording import counted

# More ranges of iterations than these are counted instead.
_MOST_RANGES = 8
_STYLE = {"ok": "green", "unhealthy": "bold red", "incomplete": "yellow", "failed": "bold red", "no_data": "yellow"}


def render_text(report: RunReport) -> RenderableType:
    """Render units, spread, the peak that MFU divides by and the lines that were left out, on one screen."""
    parts: list[RenderableType] = [_headline(report)]
    if report.failure and report.status == "failed":
        place = report.failure.code
        if report.failure.line:
            place += f", line {report.failure.line}"
        parts.append(Text(f"{place}: {report.failure.message}", style="red"))
        parts.append(Text(f"advice: {report.failure.advice}"))
    for problem in report.health:
        style = "red" if problem.severity == "error" else "yellow"
        parts.append(Text(problem.sentence, style=style))
    if report.step_time_ms:
        parts.append(_table(report))
    if report.phases:
        parts.append(_phases(report))
    if timed := list(step_parts(report)):
        parts.append(_step_table(timed))
    if report.goodput and report.goodput.attempts > 1:
        parts.append(_goodput_table(report.goodput))
    parts += list(map(Text, _facts(report)))
    for note in report.notes:
        parts.append(Text(f"note: {note}", style="yellow"))
    if report.step_time_ms:
        parts.append(Text(RULE_NOTE, style="dim"))
    return Group(*parts)


def _headline(report: RunReport) -> Text:
    where = f"iteration {report.iteration_last or 0}"
    if report.iterations_planned:
        where += f" of {report.iterations_planned}"
    if len(report.attempts) > 1:
        where += f", {len(report.attempts)} attempts"
    text = Text(report.status.replace("_", " "), style=_STYLE[report.status])
    return text.append(f"  {where}", style="default")


def _table(report: RunReport) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    for name in ("median", "mean", "min", "max", "IQR", "n"):
        table.add_column(name, justify="right")
    _row(table, "step time, ms", report.step_time_ms, 1)
    _row(table, "tokens/s/GPU", report.tokens_per_s_per_gpu, 1)
    digits = 1
    if report.tflops_per_gpu is not None and report.tflops_per_gpu.median < 1:
        digits = 4
    if report.tflops_source == "logged":
        _row(table, "model TFLOP/s/GPU", report.tflops_per_gpu, digits)
        _row(table, "  recomputed", report.tflops_per_gpu_recomputed, 1)
    else:
        _row(table, "model TFLOP/s/GPU (recomputed)", report.tflops_per_gpu, digits)
    if report.mfu and report.mfu_denominator:
        peak = report.mfu_denominator
        label = f"MFU, % of {peak['peak_tflops']:g} TFLOP/s ({str(peak['gpu']).upper()} {peak['dtype']} dense)"
        _row(table, label, report.mfu, 1, scale=100)
    _row(table, "energy, J/iteration/GPU", report.energy_j_per_gpu, 1)
    return table


def _step_table(parts: Sequence[StepPart]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("of a step, by Megatron's timers")
    table.add_column("ms", justify="right")
    table.add_column("share", justify="right")
    for part in parts:
        table.add_row(part.name, f"{part.ms:,.1f}", f"{part.share:.1%}")
    return table


def _goodput_table(goodput: Goodput) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("of the allocated time")
    table.add_column("s", justify="right")
    table.add_column("share", justify="right")
    for name, seconds in goodput_rows(goodput):
        table.add_row(name, f"{seconds:,.1f}", f"{seconds / goodput.parts.total:.1%}")
    return table


def _phases(report: RunReport) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name, number in PHASE_COLUMNS.items():
        add_column(table, name, number)
    for row in phase_cells(report):
        table.add_row(*map(Text, row))
    return table


def add_column(table: Table, header: str, number: bool, **options: Any) -> None:
    """Add a column to a table, right-aligned if it holds numbers."""
    if number:
        table.add_column(header, justify="right", **options)
    else:
        table.add_column(header, **options)


def _row(table: Table, label: str, value: Statistic | None, digits: int, scale: float = 1) -> None:
    if value is None:
        return
    cells = [label]
    for number in (value.median, value.mean, value.min, value.max, value.iqr):
        cells.append(f"{scale * number:,.{digits}f}")
    table.add_row(*cells, str(value.n))


def _facts(report: RunReport) -> list[str]:
    facts = []
    if report.peak_memory_mib:
        facts.append(f"peak memory {report.peak_memory_mib:,.0f} MiB (allocated by PyTorch)")
    if report.lines:
        facts.append(_loss(report))
    for validation in report.validations[-1:]:
        facts.append(_validation(validation))
    if report.fp8:
        facts += _fp8(report.fp8)
    facts += tensor_lines(report.tensor_stats)
    facts += filter(None, (_sizes_and_versions(report), _machines(report)))
    if report.goodput and report.goodput.attempts > 1:
        facts.append(goodput_line(report.goodput))
    for reason, numbers in report.dropped.items():
        facts.append(f"excluded, {reason}: {_iterations(numbers)}")
    return facts


def _iterations(numbers: Sequence[int]) -> str:
    """Name iterations by their ranges; many ranges by their count and ends."""
    text = ranges(numbers)
    if text.count(",") < _MOST_RANGES:
        return f"iteration {text}"
    return f"{counted(len(numbers), 'iteration')} from {min(numbers)} to {max(numbers)}"


def _loss(report: RunReport) -> str:
    missing = "NaN" if report.nan_iterations else "missing"
    text = f"loss {_loss_value(report.loss_first, missing)} to {_loss_value(report.loss_last, missing)}"
    if report.grad_norm_last is not None:
        text += f", last grad norm {report.grad_norm_last:.3f}"
    return f"{text}; {report.nan_iterations} NaN and {report.skipped_iterations} skipped iterations"


def _loss_value(loss: float | None, missing: str) -> str:
    if loss is None:
        return missing
    return f"{loss:.4f}"


def _validation(validation: Mapping[str, Any]) -> str:
    losses = ", ".join(f"{name} {value:.4f}" for name, value in validation["losses"].items())
    where = "" if validation["iteration"] is None else f", iteration {validation['iteration']}"
    return f"last validation{where}: {losses}"


def _sizes_and_versions(report: RunReport) -> str:
    sizes = (
        ("world size", report.world_size),
        ("sequence", report.seq_length),
        ("global batch", report.global_batch_size),
    )
    parts = [f"{name} {size}" for name, size in sizes if size]
    if report.versions:
        parts.append(", ".join(map(" ".join, report.versions.items())))
    return "; ".join(parts)


def _machines(report: RunReport) -> str:
    machines = report.machines
    if not machines.nodes:
        return ""
    text = f"on {compressed(machines.nodes)}"
    if machines.gpus:
        text += f": {', '.join(machines.gpus)}"
        if machines.drivers:
            text += f", driver {', '.join(machines.drivers)}"
    return text


def _fp8(fp8: Mapping[str, Any]) -> list[str]:
    """The requested precision, whether it ran, and the strongest evidence."""
    requested = bool(fp8["requested"])
    text = "FP8: not asked for"
    if requested:
        text = f"FP8: {fp8['recipe']}, {fp8['format']}"
        if fp8["verdict"] in ("requested only", "no evidence"):
            return [f"{text}; {fp8['verdict']}: the log contains no proof that it ran"]
    if fp8["evidence"] != "arguments":
        text += f"; {_whether_it_ran(requested, fp8['verified'])}: {_proof(fp8)}"
    lines = [text]
    for warning in fp8["warnings"]:
        lines.append(f"FP8 warning: {warning}")
    return lines


def _proof(fp8: Mapping[str, Any]) -> str:
    """The text of the strongest evidence."""
    for finding in fp8["findings"]:
        if finding["kind"] == fp8["evidence"]:
            return str(finding["text"])
    return ""


def _whether_it_ran(requested: bool, verified: bool) -> str:
    if not requested:
        return "none ran"
    if verified:
        return "verified"
    return "did not run"

"""Render the report of a run as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rich.console import Group, RenderableType
from rich.text import Text

from fp8launch.report.goodput import goodput_line, goodput_rows
from fp8launch.report.machines import compressed
from fp8launch.report.phases import PHASE_COLUMNS, phase_cells
from fp8launch.report.run_report import RunReport, Statistic, Training
from fp8launch.report.steady_state import RULE_NOTE, ranges
from fp8launch.report.tables import Table, fitted_table, rich_table
from fp8launch.wording import counted, for_hardware

# If there are more ranges of iterations than this, only their total is shown.
_MOST_RANGES = 8
_STYLE = {"ok": "green", "unhealthy": "bold red", "incomplete": "yellow", "failed": "bold red", "no_data": "yellow"}


def render_text(report: RunReport, width: int) -> RenderableType:
    """Render the report: units, spread, the peak that MFU refers to, excluded lines, and phases in `width` columns."""
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
    if report.speed.step_time_ms:
        parts.append(rich_table(_speed_table(report)))
    if report.phases:
        headers = tuple(for_hardware(header, [report.setup.gpu]) for header in PHASE_COLUMNS)
        parts.append(fitted_table(Table(headers, tuple(phase_cells(report)), tuple(PHASE_COLUMNS.values())), width))
    if timed := list(step_parts(report)):
        parts.append(rich_table(_shares("of a step, by Megatron's timers", "ms", timed)))
    if report.goodput and report.goodput.attempts > 1:
        total = report.goodput.parts.total
        spent = [(name, seconds, seconds / total) for name, seconds in goodput_rows(report.goodput)]
        parts.append(rich_table(_shares("of the allocated time", "s", spent)))
    parts += list(map(Text, _facts(report)))
    for note in report.notes:
        parts.append(Text(f"note: {note}", style="yellow"))
    if report.speed.step_time_ms:
        parts.append(Text(RULE_NOTE, style="dim"))
    return Group(*parts)


def _headline(report: RunReport) -> Text:
    where = f"iteration {report.training.iteration_last or 0}"
    if report.training.iterations_planned:
        where += f" of {report.training.iterations_planned}"
    if len(report.attempts) > 1:
        where += f", {len(report.attempts)} attempts"
    text = Text(report.status.replace("_", " "), style=_STYLE[report.status])
    return text.append(f"  {where}", style="default")


def _speed_table(report: RunReport) -> Table:
    speed = report.speed
    unit = for_hardware("/s/GPU", [report.setup.gpu])
    form = ",.1f"
    if speed.tflops_per_gpu is not None and speed.tflops_per_gpu.median < 1:
        form = "#.3g"
    rows = _row("step time, ms", speed.step_time_ms) + _row(f"tokens{unit}", speed.tokens_per_s_per_gpu)
    if speed.tflops_source == "logged":
        rows += _row(f"model TFLOP{unit}", speed.tflops_per_gpu, form)
        rows += _row("  recomputed", speed.tflops_per_gpu_recomputed)
    else:
        rows += _row(f"model TFLOP{unit} (recomputed)", speed.tflops_per_gpu, form)
    if speed.mfu and speed.mfu_denominator:
        peak = speed.mfu_denominator
        label = f"MFU, % of {peak['peak_tflops']:g} TFLOP/s ({str(peak['gpu']).upper()} {peak['dtype']} dense)"
        rows += _row(label, speed.mfu, scale=100)
    rows += _row("energy, J/iteration/GPU", speed.energy_j_per_gpu)
    return Table(("", "median", "mean", "min", "max", "IQR", "n"), tuple(rows), (False, *[True] * 6))


def _row(label: str, value: Statistic | None, form: str = ",.1f", scale: float = 1) -> list[tuple[str, ...]]:
    """Return a table row for a statistic, or no row if it is unknown."""
    if value is None:
        return []
    numbers = (value.median, value.mean, value.min, value.max, value.iqr)
    return [(label, *(f"{scale * number:{form}}" for number in numbers), str(value.n))]


def _shares(title: str, unit: str, parts: Sequence[tuple[str, float, float]]) -> Table:
    """Return a table with the name, amount and share of each part of a whole."""
    rows = [(name, f"{amount:,.1f}", f"{share:.1%}") for name, amount, share in parts]
    return Table((title, unit, "share"), tuple(rows), (False, True, True))


def _facts(report: RunReport) -> list[str]:
    facts = []
    if report.peak_memory_mib:
        facts.append(f"peak memory {report.peak_memory_mib:,.0f} MiB (allocated by PyTorch)")
    if report.training.lines:
        facts.append(_loss(report.training))
    evaluated = {
        "test" if one["name"].endswith("on test set") else "validation": one for one in report.training.validations
    }
    for kind, one in evaluated.items():
        where = "" if one["iteration"] is None else f", iteration {one['iteration']}"
        losses = ", ".join(f"{name} {value:.4f}" for name, value in one["losses"].items())
        facts.append(f"last {kind}{where}: {losses}")
    if report.fp8:
        facts += _fp8(report.fp8)
    for more in filter(None, report.more.values()):
        facts += more.lines
    facts += filter(None, (_sizes_and_versions(report), _machines(report)))
    if report.goodput and report.goodput.attempts > 1:
        facts.append(goodput_line(report.goodput))
    for reason, numbers in report.steady_state.dropped.items():
        facts.append(f"excluded, {reason}: {_iterations(numbers)}")
    return facts


def _iterations(numbers: Sequence[int]) -> str:
    """List iterations as ranges. If there are many ranges, give the number of iterations, the first and the last."""
    text = ranges(numbers)
    if text.count(",") < _MOST_RANGES:
        return f"{'iteration' if len(numbers) == 1 else 'iterations'} {text}"
    return f"{counted(len(numbers), 'iteration')} from {min(numbers)} to {max(numbers)}"


def _loss(training: Training) -> str:
    missing = "NaN" if training.nan_iterations else "missing"
    first, last = (missing if loss is None else f"{loss:.4f}" for loss in (training.loss_first, training.loss_last))
    text = f"loss {first} to {last}"
    if training.grad_norm_last is not None:
        text += f", last grad norm {training.grad_norm_last:.3f}"
    return f"{text}; {training.nan_iterations} NaN and {training.skipped_iterations} skipped iterations"


def _sizes_and_versions(report: RunReport) -> str:
    sizes = (
        ("world size", report.setup.world_size),
        ("sequence", report.setup.seq_length),
        ("global batch", report.setup.global_batch_size),
    )
    parts = [f"{name} {size}" for name, size in sizes if size]
    if report.setup.versions:
        parts.append(", ".join(map(" ".join, report.setup.versions.items())))
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
    """Describe the requested precision, whether it ran, and the strongest evidence for that."""
    if not fp8["requested"]:
        text = "FP8: not requested"
        if fp8["evidence"] != "arguments":
            text += ", but it ran" if fp8["verified"] else ", not used"
    else:
        text = f"FP8: {fp8['recipe']}, {fp8['format']}"
        if fp8["verdict"] in ("requested only", "no evidence"):
            return [f"{text}; {fp8['verdict']}: the log contains no proof that it ran"]
        text += "; verified" if fp8["verified"] else "; did not run"
    proofs = [finding["text"] for finding in fp8["findings"] if finding["kind"] == fp8["evidence"]]
    if proofs and fp8["evidence"] != "arguments":
        text += f": {proofs[0]}"
    return [text, *(f"FP8 warning: {warning}" for warning in fp8["warnings"])]


_PIPELINE = (
    "forward-recv",
    "forward-send",
    "backward-recv",
    "backward-send",
    "forward-send-forward-recv",
    "forward-send-backward-recv",
    "backward-send-forward-recv",
    "backward-send-backward-recv",
    "forward-backward-send-forward-backward-recv",
)
_GRADIENTS = ("all-grads-sync", "embedding-grads-all-reduce", "non-tensor-parallel-grads-all-reduce")


class StepPart(NamedTuple):
    """`ms` is the median over the iterations that count, on the slowest rank. `share` is a fraction of the step."""

    name: str
    ms: float
    share: float


def step_parts(report: RunReport) -> Iterator[StepPart]:
    """Yield the parts of a step. There are none unless the run had Megatron's timers at level 2."""
    timers, step = report.speed.timers_ms, report.speed.step_time_ms
    if step is None or "forward-compute" not in timers or "backward-compute" not in timers:
        return
    loading = _sum(timers, ("batch-generator",))
    parts = {
        "data loading": loading,
        # Megatron's timer of the forward pass includes loading the batch.
        "forward": _sum(timers, ("forward-compute",)) - loading,
        "backward": _sum(timers, ("backward-compute",)),
        "pipeline communication": _sum(timers, _PIPELINE),
        "exposed gradient communication": _sum(timers, _GRADIENTS),
        "optimizer": _sum(timers, ("optimizer",)),
    }
    parts["rest"] = max(0.0, step.median - sum(parts.values()))
    for name, ms in parts.items():
        if ms > 0:
            yield StepPart(name, ms, ms / step.median)


def _sum(timers: Mapping[str, Statistic], names: tuple[str, ...]) -> float:
    return sum(timers[name].median for name in names if name in timers)

"""A comparison as Markdown for a pull request, as CSV for everything else, and for the terminal."""

from __future__ import annotations

import csv
import io

from rich.console import Group, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from fp8launch.problems import printable
from fp8launch.report.comparison import Comparison
from fp8launch.report.table import Table, differences_table, main_table, phases_table, remarks

_CSV = (
    "variant", "nodes", "gpus", "status", "runs_ok", "runs", "tokens_per_s_per_gpu", "tokens_per_s_per_gpu_iqr",
    "step_time_ms", "step_time_ms_iqr", "step_time_ms_run_min", "step_time_ms_run_max", "iteration_lines",
    "tflops_per_gpu", "mfu", "mfu_denominator_tflops", "peak_memory_mib", "speedup", "speedup_low", "speedup_high",
    "speedup_covers", "speedup_against", "comparable", "unlike", "noted", "scaling", "scaling_efficiency",
    "tokens_per_s", "energy_j_per_token", "cost_per_million_tokens", "published_tokens_per_s_per_gpu",
    "published_ratio",
)  # fmt: skip


def to_markdown(comparison: Comparison) -> str:
    """GitHub's Markdown: the table, what was compared, what differs, parity, the rule."""
    parts = [_markdown_table(main_table(comparison))]
    lines = [*(f"**not valid**: {_escaped(p)}" for p in comparison.problems), *map(_escaped, remarks(comparison))]
    parts.append("\n".join(f"- {line}" for line in lines))
    if phases := phases_table(comparison):
        parts.append("### Phases\n\n" + _markdown_table(phases))
    if comparison.differences:
        parts.append("### What differs\n\n" + _markdown_table(differences_table(comparison)))
    if comparison.parities:
        parts.append("### Loss parity\n\n" + "\n".join(f"- {_escaped(p.says())}" for p in comparison.parities))
    commands = dict.fromkeys(run.command for e in comparison.entries for run in e.row.runs if run.command)
    if commands:
        parts.append(
            "### Commands\n\n```\n" + "\n".join(printable(c).replace("```", "` ` `") for c in commands) + "\n```"
        )
    parts.append(f"Warm-up rule: {_escaped(comparison.rule)}.")
    return "\n\n".join(part for part in parts if part) + "\n"


def _markdown_table(table: Table) -> str:
    rule = ["---:" if number else "---" for number in table.numbers]
    rows = [table.headers, rule, *table.rows]
    return "\n".join("| " + " | ".join(_escaped(cell) for cell in row) + " |" for row in rows)


def _escaped(text: str) -> str:
    """A bar would end a cell, a star begin italics; a newline would end the table."""
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("*", "\\*").replace("\n", " ")


def to_csv(comparison: Comparison) -> str:
    """One line for each row, numbers unrounded, an empty cell where nothing is known."""
    out = io.StringIO()
    writer = csv.DictWriter(out, _CSV, lineterminator="\n")
    writer.writeheader()
    for e in comparison.entries:
        row, speedup, efficiency = e.row, e.speedup, e.efficiency
        interval = speedup.interval if speedup else None
        step = e.step_time
        cells: dict[str, object] = {
            "variant": row.label,
            "nodes": row.nodes,
            "gpus": row.world,
            "status": row.status,
            "runs_ok": len(row.good),
            "runs": len(row.runs),
            "tokens_per_s_per_gpu": e.tokens and e.tokens.median,
            "tokens_per_s_per_gpu_iqr": e.tokens and e.tokens.iqr,
            "step_time_ms": step and step.median,
            "step_time_ms_iqr": step and step.iqr,
            "step_time_ms_run_min": step and min(step.runs),
            "step_time_ms_run_max": step and max(step.runs),
            "iteration_lines": step and step.n,
            "tflops_per_gpu": e.tflops and e.tflops.median,
            "mfu": e.mfu and e.mfu.median,
            "mfu_denominator_tflops": e.peak_tflops,
            "peak_memory_mib": e.peak_memory_mib,
            "speedup": speedup and speedup.value,
            "speedup_low": interval and interval.low,
            "speedup_high": interval and interval.high,
            "speedup_covers": interval and interval.covers,
            "speedup_against": speedup and speedup.against,
            "comparable": speedup and speedup.verdict.comparable,
            "unlike": speedup and "; ".join(speedup.verdict.unlike),
            "noted": speedup and "; ".join(speedup.verdict.noted),
            "scaling": efficiency and efficiency.mode,
            "scaling_efficiency": efficiency and efficiency.ratio.value,
            "tokens_per_s": e.tokens_total,
            "energy_j_per_token": e.energy_per_token,
            "cost_per_million_tokens": e.cost_per_million_tokens,
            "published_tokens_per_s_per_gpu": e.published and e.published.tokens_per_s_per_gpu,
            "published_ratio": e.published and e.published.ratio,
        }
        writer.writerow({name: _cell(value) for name, value in cells.items()})
    return out.getvalue()


def _cell(value: object) -> object:
    """A spreadsheet takes a text that begins so for a formula, and some formulas run programs."""
    return f"'{value}" if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")) else value


def to_terminal(comparison: Comparison) -> RenderableType:
    """The table and what must be known of it; the differences by name only, the other formats have their values."""
    parts: list[RenderableType] = [_rich_table(main_table(comparison)), Text("")]
    if phases := phases_table(comparison):
        parts += [_rich_table(phases), Text("")]
    parts += [Text(f"not valid: {problem}", style="bold red") for problem in comparison.problems]
    parts += map(Text, remarks(comparison))
    if comparison.differences:
        parts.append(Text("differs: " + ", ".join(d.name for d in comparison.differences)))
    parts += [Text(f"parity: {parity.says()}") for parity in comparison.parities]
    parts.append(Text(f"rule: {comparison.rule}", style="dim"))
    return Group(*parts)


def _rich_table(table: Table) -> RichTable:
    made = RichTable(box=None, pad_edge=False, header_style="bold")
    for header, number in zip(table.headers, table.numbers, strict=True):
        made.add_column(header, justify="right" if number else "left", overflow="fold")
    for row in table.rows:
        made.add_row(*(Text(cell) for cell in row))
    return made

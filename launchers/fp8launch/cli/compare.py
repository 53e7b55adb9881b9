"""`fp8launch compare`: compare runs, studies and logs side by side."""

from __future__ import annotations

from pathlib import Path

import click

from fp8launch.cli.output import FiniteRange, console, eprint, json_option, logs_argument, show_json, with_options
from fp8launch.cli.plugin_options import file_options
from fp8launch.diagnostics import exit_code
from fp8launch.hardware.gpus import GPUS
from fp8launch.report.comparison import compare as side_by_side
from fp8launch.report.comparison_files import comparison_files, write_comparison
from fp8launch.report.conclusion import conclusion
from fp8launch.report.named_runs import read_runs
from fp8launch.report.parity import TOLERANCE

# Width in columns when the output is piped.
_WIDTH = 120
gpu_option = click.option("--gpu", type=click.Choice(list(GPUS)), help="GPU model for MFU, for logs without a run.")
_options = (
    click.option("--baseline", metavar="X", help="Baseline for speed-ups: a variant, precision, key=value or run."),
    *file_options(),
    gpu_option,
    click.option(
        "--price-per-gpu-hour", type=FiniteRange(min=0), metavar="P",
        help="Price of a GPU-hour; adds the cost per token.",
    ),
    click.option(
        "--tolerance", type=FiniteRange(0, 1), default=TOLERANCE, show_default=True,
        help="Largest relative loss difference that counts as parity.",
    ),
    click.option("--force", is_flag=True, help="Print ratios between runs that cannot be compared, marked with '!'."),
    click.option("--details", is_flag=True, help="Also explain the numbers, and list differences, parity and repeats."),
    json_option,
)  # fmt: skip


@click.command()
@logs_argument
@with_options(*_options)
def compare(
    names: tuple[str, ...],
    baseline: str | None,
    gpu: str | None,
    price_per_gpu_hour: float | None,
    tolerance: float,
    force: bool,
    details: bool,
    as_json: bool,
    **files: Path | None,
) -> int:
    """Compare variants and node counts side by side.

    \b
    fp8launch compare STUDY
    fp8launch compare logs/bf16.log logs/fp8.log --baseline bf16

    Each log counts as a separate run. Name a folder to compare all logs in it (its TensorBoard event files count as
    one run), or a recipe to compare all its runs.
    """
    comparison = side_by_side(
        read_runs(names, gpu, eprint), baseline, price_per_gpu_hour=price_per_gpu_hour, tolerance=tolerance, force=force
    )
    if as_json:
        show_json({**comparison.as_json(), "conclusion": conclusion(comparison)})
    else:
        from fp8launch.report.export import to_terminal

        shown = console(width=_WIDTH)
        shown.print(to_terminal(comparison, shown.width, details))
    for option in comparison_files():
        if path := files[option.replace("-", "_")]:
            for message in write_comparison(comparison, option, path):
                eprint(message)
    return exit_code(comparison.valid or (force and any(row.good for row in comparison.rows)))

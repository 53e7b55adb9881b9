"""`fp8launch compare`: runs, studies and logs side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from fp8launch.cli.output import console, json_option, say, show_json, with_options
from fp8launch.hardware.gpus import GPUS
from fp8launch.problems import ANSWER_IS_NO, error
from fp8launch.recipe.source import is_file
from fp8launch.report.compare import compare as side_by_side
from fp8launch.report.comparison import Comparison
from fp8launch.report.measured import Measured, from_events, from_logs, from_run, from_study
from fp8launch.report.parity import TOLERANCE
from fp8launch.report.tensorboard import event_files
from fp8launch.runs.folder import MANIFEST, STUDY
from fp8launch.runs.store import find_run, find_study

_FILE = click.Path(dir_okay=False, path_type=Path)
_options = (
    click.option("--baseline", metavar="X", help="Variant, precision, key=value or run that speed-ups are over."),
    click.option("--html", type=_FILE, metavar="F", help="Write a report that needs no network."),
    click.option("--csv", type=_FILE, metavar="F", help="Write one line per row."),
    click.option("--md", type=_FILE, metavar="F", help="Write Markdown for a pull request."),
    click.option("--plot", type=click.Path(path_type=Path), metavar="F", help="Pictures: .png, .svg or .pdf."),
    click.option("--gpu", type=click.Choice(list(GPUS)), help="GPU model of logs, for MFU; a run knows its own."),
    click.option("--price-per-gpu-hour", type=click.FloatRange(min=0), metavar="P", help="Adds cost per token."),
    click.option(
        "--tolerance", type=click.FloatRange(0, 1), default=TOLERANCE, show_default=True,
        help="Relative difference of the loss that parity allows.",
    ),
    click.option("--force", is_flag=True, help="Give ratios between unlike runs too, marked."),
    json_option,
)  # fmt: skip


@click.command()
@click.argument("names", nargs=-1, required=True, metavar="RUN|STUDY|LOG...")
@with_options(*_options)
def compare(
    names: tuple[str, ...],
    baseline: str | None,
    html: Path | None,
    csv: Path | None,
    md: Path | None,
    plot: Path | None,
    gpu: str | None,
    price_per_gpu_hour: float | None,
    tolerance: float,
    force: bool,
    as_json: bool,
) -> int:
    """Variants and node counts side by side. Each log is a run of its own; a folder stands for its logs, or for a
    run by its TensorBoard event files.
    """
    comparison = side_by_side(
        measure_all(names, gpu), baseline, price_per_gpu_hour=price_per_gpu_hour, tolerance=tolerance, force=force
    )
    if as_json:
        show_json(comparison.as_json())
    else:
        _show(comparison)
    _write_files(comparison, html, csv, md, plot)
    return 0 if comparison.valid or (force and any(e.row.good for e in comparison.entries)) else ANSWER_IS_NO


def measure_all(names: Sequence[str], gpu: str | None = None) -> list[Measured]:
    """Every run that the names mean, each once, in their order. Raises UserError for a name that means nothing."""
    found: dict[str, Measured] = {}
    for name in names:
        for run in _measure(name, gpu):
            found.setdefault(run.sources[0] if run.sources else run.name, run)
    return list(found.values())


def _measure(name: str, gpu: str | None) -> list[Measured]:
    path = Path(name)
    if events := event_files(path):
        return [from_events(path.name, events, gpu)]
    if is_file(path):
        return [from_logs(path.stem, [path], gpu)]
    if path.is_dir() and not any(is_file(path / name) for name in (MANIFEST, STUDY)):
        logs = sorted(path.glob("*.log"))
        if not logs:
            raise error("no-log", "is neither a run nor a study and holds no *.log", name)
        return [from_logs(log.stem, [log], gpu) for log in logs]
    study = find_study(name)
    return from_study(study, gpu) if study else [from_run(find_run(name), gpu)]


def _show(comparison: Comparison) -> None:
    from fp8launch.report.export import to_terminal

    console(width=260, soft_wrap=True).print(to_terminal(comparison))


def _write_files(
    comparison: Comparison, html: Path | None, csv: Path | None, md: Path | None, plot: Path | None
) -> None:
    """The files that were asked for. A machine without a plotting library still gets everything but pictures."""
    from fp8launch.report.export import to_csv, to_markdown
    from fp8launch.report.html import to_html
    from fp8launch.report.plots import available, write_plots

    if csv:
        csv.write_text(to_csv(comparison), encoding="utf-8")
    if md:
        md.write_text(to_markdown(comparison), encoding="utf-8")
    if html:
        html.write_text(to_html(comparison), encoding="utf-8")
        if not available():
            say("no pictures in the HTML report: they need matplotlib (pip install 'fp8launch[plots]')")
    for file in [f for f in (csv, md, html) if f]:
        say(f"wrote {file}")
    if plot:
        for file in write_plots(comparison, plot):
            say(f"wrote {file}")

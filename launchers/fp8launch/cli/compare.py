"""`fp8launch compare`: runs, studies and logs side by side."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import click

from fp8launch.cli.names import is_own_folder, is_recipe_file, runs_named, study_named
from fp8launch.cli.output import console, eprint, json_option, logs_argument, show_json, with_options
from fp8launch.diagnostics import error, exit_code
from fp8launch.hardware.gpus import GPUS
from fp8launch.logs.open_log import log_name, logs_in
from fp8launch.recipe.yaml_source import is_file
from fp8launch.report.comparison import Comparison
from fp8launch.report.comparison import compare as side_by_side
from fp8launch.report.conclusion import conclusion
from fp8launch.report.parity import TOLERANCE
from fp8launch.report.run_data import RunData, run_from_events, run_from_folder, run_from_logs, runs_from_study
from fp8launch.report.tensorboard import event_files
from fp8launch.rundir.atomic_io import as_utf8, write_atomically

# Columns of the output in a pipe.
_WIDTH = 120
_FILE = click.Path(dir_okay=False, path_type=Path)
gpu_option = click.option("--gpu", type=click.Choice(list(GPUS)), help="GPU model for MFU, for logs without a run.")
_options = (
    click.option("--baseline", metavar="X", help="Baseline of speed-ups: a variant, precision, key=value or run."),
    click.option("--html", type=_FILE, metavar="F", help="Write an HTML report to this file."),
    click.option("--csv", type=_FILE, metavar="F", help="Write a CSV file with one line per row."),
    click.option("--md", type=_FILE, metavar="F", help="Write a Markdown table to this file."),
    click.option(
        "--plot", type=click.Path(path_type=Path), metavar="F",
        help="Write plots to a .png, .svg or .pdf file, or PNGs to a folder.",
    ),
    gpu_option,
    click.option(
        "--price-per-gpu-hour", type=click.FloatRange(min=0), metavar="P",
        help="Price of a GPU-hour; adds the cost per token.",
    ),
    click.option(
        "--tolerance", type=click.FloatRange(0, 1), default=TOLERANCE, show_default=True,
        help="Largest relative loss difference that is still parity.",
    ),
    click.option("--force", is_flag=True, help="Print ratios between runs that cannot be compared, marked with '!'."),
    json_option,
)  # fmt: skip


@click.command()
@logs_argument
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
    """Compare variants and node counts side by side. Each log is a run of its own; a folder stands for its logs, or
    for a run by its TensorBoard event files; a recipe stands for all its runs.
    """
    comparison = side_by_side(
        read_runs(names, gpu), baseline, price_per_gpu_hour=price_per_gpu_hour, tolerance=tolerance, force=force
    )
    if as_json:
        show_json({**comparison.as_json(), "conclusion": conclusion(comparison)})
    else:
        _show(comparison)
    _write_files(comparison, html, csv, md, plot)
    return exit_code(comparison.valid or (force and any(entry.row.good for entry in comparison.entries)))


def read_runs(names: Sequence[str], gpu: str | None = None) -> list[RunData]:
    """Read every run that the names mean, each once, in their order. Raises UserError for a name that means nothing."""
    found: dict[str, RunData] = {}
    for name in names:
        for run in _read(name, gpu):
            key = run.sources[0] if run.sources else run.name
            found.setdefault(key, run)
    return _told_apart(list(found.values()))


def _told_apart(runs: list[RunData]) -> list[RunData]:
    """Give logs of the same file name in different folders the name of their folder too: they are no repeats."""
    counts = Counter(run.name for run in runs)
    renamed = []
    for run in runs:
        if counts[run.name] > 1 and run.study is None and run.sources:
            parent = Path(run.sources[0]).absolute().parent.name
            run = replace(run, name=f"{parent}/{run.name}")
        renamed.append(run)
    again = Counter(run.name for run in renamed)
    found = []
    for run in renamed:
        if again[run.name] > 1 and run.sources:
            run = replace(run, name=run.sources[0])
        found.append(run)
    return found


def _read(name: str, gpu: str | None) -> list[RunData]:
    path = Path(name)
    if events := event_files(path):
        return [run_from_events(path.name, events, gpu)]
    if is_file(path) and not is_recipe_file(name):
        return [run_from_logs(log_name(path), [path], gpu)]
    if path.is_dir() and not is_own_folder(name):
        logs = logs_in(path)
        if not logs:
            raise error("no-log", "is not a run or a study and contains no *.log", name)
        return [run_from_logs(log_name(log), [log], gpu) for log in logs]
    study = study_named(name)
    if study:
        return runs_from_study(study, gpu)
    return [run_from_folder(run, gpu) for run in runs_named(name)]


def _show(comparison: Comparison) -> None:
    from fp8launch.report.export import to_terminal

    shown = console(width=_WIDTH)
    shown.print(to_terminal(comparison, shown.width))


def _write_files(
    comparison: Comparison, html: Path | None, csv: Path | None, md: Path | None, plot: Path | None
) -> None:
    """Write the files that were asked for. Without a plotting library that is everything but pictures."""
    from fp8launch.report.export import to_csv, to_markdown
    from fp8launch.report.html import to_html
    from fp8launch.report.plots import available, write_plots

    if csv:
        _write(csv, "--csv", to_csv(comparison))
    if md:
        _write(md, "--md", to_markdown(comparison))
    if html:
        _write(html, "--html", to_html(comparison))
        if not available():
            eprint("the HTML report has no plots, because matplotlib is not installed (pip install 'fp8launch[plots]')")
    if plot:
        _refuse_link(plot, "--plot")
        for file in write_plots(comparison, plot):
            eprint(f"wrote {file}")


def _write(path: Path, option: str, text: str) -> None:
    if not path.parent.is_dir():
        raise error("no-such-folder", f"there is no folder {path.parent}", option, "make it first, or name another")
    _refuse_link(path, option)
    if path.exists() and not is_file(path):
        path.write_bytes(as_utf8(text))  # a pipe or a device
    else:
        write_atomically(path, text)
    eprint(f"wrote {path}")


def _refuse_link(path: Path, option: str) -> None:
    """In a folder that others may write to, a link could lead the report over any file of mine."""
    if path.is_symlink() and path.parent != Path("/dev"):
        target = path.readlink()
        raise error(
            "output-is-a-link",
            f"{path} is a link to {target}",
            option,
            "write the path of the file itself, or of another file",
        )

"""`fp8launch parse`: report the throughput of runs or of any Megatron log."""

from __future__ import annotations

from collections.abc import Sequence

import click

from fp8launch.cli.output import console, echo, eprint, json_option, logs_argument, show_json
from fp8launch.diagnostics import exit_code
from fp8launch.hardware.gpus import GPUS
from fp8launch.logs.event_files import read_events
from fp8launch.report.named_runs import event_files_named, logs_named, report_of, runs_with_logs
from fp8launch.report.run_report import RunReport
from fp8launch.report.throughput import read_logs, summarise, summarise_run
from fp8launch.rundir.run_dir import RunFolder


@click.command()
@logs_argument
@click.option("--gpu", type=click.Choice(list(GPUS)), help="GPU model for MFU, for logs without a run.")
@click.option("--world-size", type=click.IntRange(min=1), help="Number of GPUs, if the log does not contain it.")
@click.option(
    "--seq-length", type=click.IntRange(min=1), help="Sequence length in tokens, if the log does not contain it."
)
@json_option
def parse(
    names: tuple[str, ...], gpu: str | None, world_size: int | None, seq_length: int | None, as_json: bool
) -> int:
    """Report the throughput of runs, of all runs of a study, or of the newest run of a recipe.

    Several logs are read as the attempts of one run, oldest first. Logs may be compressed with gzip, xz or bzip2. If
    the log is gone, LOG may be a TensorBoard event file or a folder of event files.
    """
    stated = None
    if seq_length:
        stated = {"seq_length": seq_length}
    if events := event_files_named(names):
        report = summarise(read_events(events), gpu=gpu, world_size=world_size, arguments=stated)
    elif logs := logs_named(names):
        report = summarise_run(read_logs(logs), gpu=gpu, world_size=world_size, arguments=stated)
    else:
        return _parse_runs(runs_with_logs(names, eprint), gpu, as_json)
    if as_json:
        show_json(report.as_json())
    else:
        _show(report)
    return _exit_code(report)


def _parse_runs(runs: Sequence[RunFolder], gpu: str | None, as_json: bool) -> int:
    reports = [report_of(run, gpu) for run in runs]
    if as_json:
        each = []
        for run, one in zip(runs, reports, strict=True):
            each.append({"run": run.run_id, "folder": str(run.path), **one.as_json()})
        show_json(each[0] if len(each) == 1 else each)
    else:
        _show_runs(runs, reports)
    return max(map(_exit_code, reports))


def _exit_code(report: RunReport) -> int:
    return exit_code(report.status not in ("failed", "unhealthy", "no_data"))


def _show_runs(runs: Sequence[RunFolder], reports: Sequence[RunReport]) -> None:
    for position, (run, report) in enumerate(zip(runs, reports, strict=True)):
        if position:
            echo()
        if len(runs) > 1:
            echo(f"{run.run_id}:", bold=True)
        _show(report)


def _show(report: RunReport) -> None:
    from fp8launch.report.text import render_text

    shown = console(width=120, soft_wrap=True)
    shown.print(render_text(report, shown.width))

"""`fp8launch parse`: the throughput of a run, or of any Megatron log."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from fp8launch.cli import complete
from fp8launch.cli.output import console, json_option, show_json
from fp8launch.diagnostics import ANSWER_IS_NO, error
from fp8launch.hardware.gpus import GPUS
from fp8launch.report.phases import spans_of
from fp8launch.report.run_facts import stated_arguments
from fp8launch.report.run_report import RunReport
from fp8launch.report.run_status import with_batch_output
from fp8launch.report.tensorboard import event_files, read_events
from fp8launch.report.throughput import read_logs, summarise, summarise_run
from fp8launch.rundir.registry import find_run
from fp8launch.rundir.run_dir import MANIFEST, RunFolder


@click.command()
@click.argument("names", nargs=-1, required=True, metavar="RUN|LOG|EVENTS...", shell_complete=complete.runs)
@click.option("--gpu", type=click.Choice(list(GPUS)), help="GPU model for MFU, for logs without a run.")
@click.option("--world-size", type=click.IntRange(min=1), help="Number of GPUs, if the log does not contain it.")
@click.option(
    "--seq-length", type=click.IntRange(min=1), help="Sequence length in tokens, if the log does not contain it."
)
@json_option
def parse(
    names: tuple[str, ...], gpu: str | None, world_size: int | None, seq_length: int | None, as_json: bool
) -> int:
    """Report throughput. Several logs are the attempts of one run, oldest first.

    A log may be compressed by gzip, xz or bzip2. EVENTS is a TensorBoard event file or a folder of them, for runs
    whose log is gone.
    """
    stated = {"seq_length": seq_length} if seq_length else None
    events = [file for name in names for file in event_files(Path(name))]
    if events and not (Path(names[0]) / MANIFEST).is_file():
        run, report = None, summarise(read_events(events), gpu=gpu, world_size=world_size, arguments=stated)
    elif all(Path(name).is_file() for name in names):
        logs = read_logs([Path(name) for name in names])
        run, report = None, summarise_run(logs, gpu=gpu, world_size=world_size, arguments=stated)
    elif len(names) == 1:
        run = find_run(names[0])
        report = report_of(run, gpu)
    else:
        missing = next(name for name in names if not Path(name).is_file())
        raise error("file-not-found", "no such log", missing, "pass one run, or logs of one run")
    if as_json:
        extra: dict[str, Any] = {"run": run.run_id, "folder": str(run.path)} if run else {}
        show_json({**extra, **report.as_json()})
    else:
        _show(report)
    return ANSWER_IS_NO if report.status in ("failed", "no_data") else 0


def report_of(run: RunFolder, gpu: str | None = None) -> RunReport:
    """The report of a run, from the logs of all its attempts and what its manifest says of it."""
    manifest = run.manifest()
    report = summarise_run(
        read_logs(logs_of(run)),
        spans_of(manifest),
        gpu=gpu or str(manifest.get("gpu", "")) or None,
        world_size=manifest.get("layout", {}).get("world"),
        arguments=stated_arguments(manifest),
    )
    return with_batch_output(report, run)


def logs_of(run: RunFolder) -> list[Path]:
    """The logs of a run's attempts, oldest first. Exit code 1 where it has none yet."""
    logs = [attempt.log for attempt in run.attempts()]
    # A job that died before its first process still left the batch script's words.
    logs = logs or run.batch_output()
    if not logs:
        place = str(run.path / MANIFEST)
        raise error("no-log", f"{run.run_id} has no log yet", place, "`fp8launch runs` shows its state", ANSWER_IS_NO)
    return logs


def _show(report: RunReport) -> None:
    from fp8launch.report.text import render_text

    console(width=120, soft_wrap=True).print(render_text(report))

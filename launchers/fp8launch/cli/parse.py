"""`fp8launch parse`: the throughput of a run, or of any Megatron log."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import click

from fp8launch.cli.names import is_recipe_file, runs_named
from fp8launch.cli.output import console, echo, eprint, json_option, logs_argument, show_json
from fp8launch.diagnostics import ANSWER_IS_NO, error, exit_code
from fp8launch.hardware.gpus import GPUS
from fp8launch.recipe.yaml_source import is_file
from fp8launch.report.goodput import goodput_of_run
from fp8launch.report.health import limits_of
from fp8launch.report.phases import spans_of
from fp8launch.report.run_facts import stated_arguments
from fp8launch.report.run_report import RunReport
from fp8launch.report.run_status import with_batch_output
from fp8launch.report.tensorboard import event_files, read_events
from fp8launch.report.throughput import read_logs, summarise, summarise_run
from fp8launch.rundir.attempts import health_actions
from fp8launch.rundir.run_dir import MANIFEST, RunFolder


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
    """Report throughput of runs, of all runs of a study, or of the newest one of a recipe. Several logs are the
    attempts of one run, oldest first.

    A log may be compressed by gzip, xz or bzip2. For runs whose log is gone, LOG may also be a TensorBoard event file
    or a folder of them.
    """
    stated = None
    if seq_length:
        stated = {"seq_length": seq_length}
    events: list[Path] = []
    for name in names:
        events += event_files(Path(name))
    if events and not (Path(names[0]) / MANIFEST).is_file():
        report = summarise(read_events(events), gpu=gpu, world_size=world_size, arguments=stated)
    elif logs := logs_named(names):
        report = summarise_run(read_logs(logs), gpu=gpu, world_size=world_size, arguments=stated)
    else:
        return _parse_runs(each_run(names), gpu, as_json)
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


def logs_named(names: Sequence[str]) -> list[Path]:
    """Return the paths if the names are files, which are logs of one run; none for runs.

    Raises UserError for logs beside names of other kinds.
    """
    files: list[Path] = []
    others: list[str] = []
    for name in names:
        if is_file(Path(name)) and not is_recipe_file(name):
            files.append(Path(name))
        else:
            others.append(name)
    if files and others:
        raise error("file-not-found", "no such log", others[0], "pass runs, or logs of one run")
    return files


def _exit_code(report: RunReport) -> int:
    return exit_code(report.status not in ("failed", "unhealthy", "no_data"))


def each_run(names: Sequence[str]) -> list[RunFolder]:
    """Return each run that the names mean once. Of several, those that have no log yet are named and left out."""
    named: list[RunFolder] = []
    for name in names:
        named += runs_named(name, newest=True)
    found = list(dict.fromkeys(named))
    with_log = [run for run in found if run.attempts() or run.batch_output()]
    if not with_log and found:
        return found[:1]  # whose error says that it has no log
    for run in found:
        if run not in with_log:
            eprint(f"{run.run_id} has no log yet")
    if not found:
        raise error("no-runs", "the study has no runs yet", names[0], "repeat its submit command", ANSWER_IS_NO)
    return with_log


def _show_runs(runs: Sequence[RunFolder], reports: Sequence[RunReport]) -> None:
    for position, (run, report) in enumerate(zip(runs, reports, strict=True)):
        if position:
            echo()
        if len(runs) > 1:
            echo(f"{run.run_id}:", bold=True)
        _show(report)


def report_of(run: RunFolder, gpu: str | None = None) -> RunReport:
    """The report of a run, from the logs of all its attempts and what its manifest says of it."""
    manifest = run.manifest()
    logs = read_logs(logs_of(run))
    report = summarise_run(
        logs,
        spans_of(manifest),
        gpu=gpu or str(manifest.get("gpu", "")) or None,
        world_size=manifest.get("layout", {}).get("world"),
        arguments=stated_arguments(manifest),
        limits=limits_of(manifest),
        actions=health_actions(run),
    )
    report = replace(report, goodput=goodput_of_run(run, logs, report.world_size))
    return with_batch_output(report, run)


def logs_of(run: RunFolder) -> list[Path]:
    """The logs of a run's attempts, oldest first. Exit code 1 where it has none yet."""
    # A job that died before its first process still left the batch script's words.
    logs = run.logs() or run.batch_output()
    if not logs:
        place = str(run.path / MANIFEST)
        raise error("no-log", f"{run.run_id} has no log yet", place, "`fp8launch runs` shows its state", ANSWER_IS_NO)
    return logs


def _show(report: RunReport) -> None:
    from fp8launch.report.text import render_text

    console(width=120, soft_wrap=True).print(render_text(report))

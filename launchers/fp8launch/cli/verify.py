"""`fp8launch verify`: did FP8 run? From what the job itself said of it in its log."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import click

from fp8launch.cli import complete
from fp8launch.cli.output import echo, eprint, json_option, show_json
from fp8launch.cli.parse import logs_of
from fp8launch.diagnostics import ANSWER_IS_NO, error
from fp8launch.recipe.yaml_source import is_file
from fp8launch.report.phases import PhaseSpan, by_phase, spans_of
from fp8launch.report.run_facts import stated_arguments
from fp8launch.report.throughput import read_logs
from fp8launch.report.verify import Verification, verify_logs
from fp8launch.rundir.registry import find_run

_COLOUR = {"verified": "green", "requested only": "yellow", "no evidence": "yellow"}


@click.command()
@click.argument("names", nargs=-1, required=True, metavar="RUN|LOG...", shell_complete=complete.runs)
@json_option
def verify(names: tuple[str, ...], as_json: bool) -> int:
    """Report whether FP8 ran: `verified`, `requested only` (nothing shows it), `not FP8` or `no evidence`.

    Exits with 1 without evidence, and if FP8 was asked for and is not shown to have run. Several logs are the attempts
    of one run. Each phase of a run has its own verdict.
    """
    spans: tuple[PhaseSpan, ...] = ()
    stated: dict[str, object] = {}
    if all(is_file(Path(name)) for name in names):
        logs = [Path(name) for name in names]
    elif len(names) == 1:
        run = find_run(names[0])
        manifest = run.manifest()
        logs, spans, stated = logs_of(run), spans_of(manifest), stated_arguments(manifest)
    else:
        missing = next(name for name in names if not is_file(Path(name)))
        raise error("file-not-found", "no such log", missing, "pass one run, or logs of one run")
    read = read_logs(logs)
    phases = {span.name: verify_logs(mine, span.arguments) for span, mine in by_phase(read, spans)}
    found = _decisive(phases) if phases else verify_logs(read, stated)
    if as_json:
        each = {name: one.as_json() for name, one in phases.items()}
        show_json({**found.as_json(), **({"phases": each} if each else {})})
    elif phases:
        for name, one in phases.items():
            echo(f"phase {name}: ", nl=False)
            _show(one)
    else:
        _show(found)
    return 0 if found.ok else ANSWER_IS_NO


def _decisive(phases: Mapping[str, Verification]) -> Verification:
    """The phase that decides for the run: one that fails, else one that asked for FP8."""
    return min(phases.values(), key=lambda one: (one.ok, not one.asked))


def _show(found: Verification) -> None:
    colour = "red" if found.refuted else _COLOUR.get(found.verdict)
    echo(found.verdict, nl=False, fg=colour, bold=True)
    if found.verdict == "no evidence":
        echo("  the log contains neither Megatron's arguments nor a probe")
        return
    echo(f"  {found.recipe} was requested" if found.asked else "  FP8 was not requested")
    for finding in found.findings:
        echo(f"  {finding.kind:<10} {finding.text}")
    for warning in found.warnings:
        echo(f"  warning: {warning}", fg="yellow")
    if found.verdict == "requested only":
        eprint(
            "the log contains no probe or profile that proves FP8: add `launch: {probe: true, profile_iteration: 5}`"
        )

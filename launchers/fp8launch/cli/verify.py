"""`fp8launch verify`: did FP8 run? From what the job itself said of it in its log."""

from __future__ import annotations

from pathlib import Path

import click

from fp8launch.cli.output import json_option, say, show_json
from fp8launch.cli.parse import logs_of
from fp8launch.problems import ANSWER_IS_NO, error, printable
from fp8launch.recipe.source import is_file
from fp8launch.report.phases import Span, by_phase, spans_of
from fp8launch.report.throughput import read_logs
from fp8launch.report.verify import Verification, verify_logs
from fp8launch.runs.store import find_run

_STYLE = {"verified": "green", "requested only": "yellow", "not FP8": "default"}


@click.command()
@click.argument("names", nargs=-1, required=True, metavar="RUN|LOG...")
@json_option
def verify(names: tuple[str, ...], as_json: bool) -> int:
    """Did FP8 run? `verified`, `requested only` (nothing shows it), or `not FP8`, with the evidence.

    Exits with 1 where FP8 was asked for and is not shown to have run. Several logs are the attempts of one run. Of a
    run in phases each has its own verdict.
    """
    spans: tuple[Span, ...] = ()
    if all(is_file(Path(name)) for name in names):
        logs = [Path(name) for name in names]
    elif len(names) == 1:
        run = find_run(names[0])
        logs, spans = logs_of(run), spans_of(run.manifest())
    else:
        missing = next(name for name in names if not is_file(Path(name)))
        raise error("file-not-found", "no such log", missing, "give logs of one run, or a single run")
    read = read_logs(logs)
    phases = {span.name: verify_logs(mine) for span, mine in by_phase(read, spans)}
    # A phase that fails is what there is to say of the run, else one that asked for FP8.
    found = min(phases.values(), key=lambda one: (one.ok, not one.asked)) if phases else verify_logs(read)
    if as_json:
        each = {name: one.as_json() for name, one in phases.items()}
        show_json({**found.as_json(), **({"phases": each} if each else {})})
    elif phases:
        for name, one in phases.items():
            click.echo(f"phase {name}: ", nl=False)
            _show(one)
    else:
        _show(found)
    return 0 if found.ok else ANSWER_IS_NO


def _show(found: Verification) -> None:
    colour = "red" if found.refuted else _STYLE[found.verdict]
    asked = f"  {found.recipe} was asked for" if found.asked else "  FP8 was not asked for"
    click.echo(click.style(found.verdict, fg=None if colour == "default" else colour, bold=True) + asked)
    for finding in found.findings:
        click.echo(f"  {finding.kind:<10} {printable(finding.text)}")
    for warning in found.warnings:
        click.echo(click.style(f"  warning: {printable(warning)}", fg="yellow"))
    if found.verdict == "requested only":
        say(
            "the log holds no probe or profile that shows it: run it with `launch: {probe: true, profile_iteration: 5}`"
        )

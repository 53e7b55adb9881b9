"""`fp8launch verify`: did FP8 run? From what the job itself said of it in its log."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import click

from fp8launch.cli import complete
from fp8launch.cli.output import echo, eprint, json_option, show_json
from fp8launch.cli.parse import each_run, logs_named, logs_of
from fp8launch.diagnostics import ANSWER_IS_NO
from fp8launch.report.phases import by_phase, spans_of
from fp8launch.report.run_facts import stated_arguments
from fp8launch.report.throughput import read_logs
from fp8launch.report.verify import Verification, verify_logs
from fp8launch.rundir.run_dir import RunFolder

_COLOUR = {"verified": "green", "requested only": "yellow", "no evidence": "yellow"}


@click.command()
@click.argument("names", nargs=-1, required=True, metavar="RUN|STUDY|RECIPE|LOG...", shell_complete=complete.runs)
@json_option
def verify(names: tuple[str, ...], as_json: bool) -> int:
    """Report whether FP8 ran: `verified`, `requested only` (nothing shows it), `not FP8` or `no evidence`.

    Exits with 1 without evidence, and if FP8 was asked for and is not shown to have run. Several logs are the attempts
    of one run. Each phase of a run has its own verdict.
    """
    logs = logs_named(names)
    runs = [] if logs else each_run(names)
    found = [_of_run(run) for run in runs] or [_Verified(verify_logs(read_logs(logs), {}), {})]
    if as_json:
        each = [one.as_json() for one in found]
        if len(runs) > 1:
            each = [{"run": run.run_id, **one} for run, one in zip(runs, each, strict=True)]
        show_json(each if len(each) > 1 else each[0])
    else:
        for position, one in enumerate(found):
            if len(runs) > 1:
                echo(f"{runs[position].run_id}: ", nl=False)
            _show_all(one)
    return 0 if all(one.whole.ok for one in found) else ANSWER_IS_NO


@dataclass(frozen=True)
class _Verified:
    """What is known of a run as a whole, and of each of its phases."""

    whole: Verification
    phases: Mapping[str, Verification]

    def as_json(self) -> dict[str, Any]:
        each = {name: one.as_json() for name, one in self.phases.items()}
        return {**self.whole.as_json(), **({"phases": each} if each else {})}


def _of_run(run: RunFolder) -> _Verified:
    manifest = run.manifest()
    read = read_logs(logs_of(run))
    phases = {span.name: verify_logs(mine, span.arguments) for span, mine in by_phase(read, spans_of(manifest))}
    return _Verified(_decisive(phases) if phases else verify_logs(read, stated_arguments(manifest)), phases)


def _show_all(found: _Verified) -> None:
    for name, one in found.phases.items():
        echo(f"phase {name}: ", nl=False)
        _show(one)
    if not found.phases:
        _show(found.whole)


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

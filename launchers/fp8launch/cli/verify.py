"""`fp8launch verify`: did FP8 run? From what the job itself said of it in its log."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import click

from fp8launch.check.advisories import AdvisedRun
from fp8launch.cli.output import advisory_text, echo, eprint, json_option, logs_argument, show_json
from fp8launch.cli.parse import each_run, logs_named, logs_of
from fp8launch.diagnostics import exit_code
from fp8launch.logs import attempts_of
from fp8launch.report.json_values import json_list
from fp8launch.report.known_bugs import known_bugs
from fp8launch.report.phases import by_phase, spans_of
from fp8launch.report.run_facts import stated_arguments
from fp8launch.report.throughput import read_logs
from fp8launch.report.verify import Verification, verify_logs
from fp8launch.rundir.run_dir import RunFolder

_COLOUR = {"verified": "green", "requested only": "yellow", "no evidence": "yellow"}


@click.command()
@logs_argument
@json_option
def verify(names: tuple[str, ...], as_json: bool) -> int:
    """Report whether FP8 ran: `verified`, `requested only` (nothing shows it), `not FP8` or `no evidence`.

    Exits with 1 without evidence, if FP8 was asked for and is not shown to have run, and if ranks hold whole what ZeRO
    or FSDP was to divide. Several logs are the attempts of one run. Each phase of a run has its own verdict. Known bugs
    of the versions that ran are named after it; they do not change the exit code.
    """
    logs = logs_named(names)
    if logs:
        read = read_logs(logs)
        found = [("logs", _Verified(verify_logs(read, {}), {}, known_bugs(attempts_of(read), {}, {})))]
    else:
        found = [(run.run_id, _of_run(run)) for run in each_run(names)]
    several = len(found) > 1
    if as_json and several:
        show_json([{"run": run, **one.as_json()} for run, one in found])
    elif as_json:
        show_json(found[0][1].as_json())
    else:
        for run, one in found:
            if several:
                echo(f"{run}: ", nl=False)
            _show_all(one)
    return exit_code(all(one.whole.ok for _, one in found))


@dataclass(frozen=True)
class _Verified:
    """What is known of a run as a whole, and of each of its phases. `advisories` are the known bugs that it has."""

    whole: Verification
    phases: Mapping[str, Verification]
    advisories: tuple[AdvisedRun, ...]

    def as_json(self) -> dict[str, Any]:
        found = self.whole.as_json()
        found["advisories"] = json_list(self.advisories)
        if self.phases:
            found["phases"] = {name: one.as_json() for name, one in self.phases.items()}
        return found


def _of_run(run: RunFolder) -> _Verified:
    manifest = run.manifest()
    read = read_logs(logs_of(run))
    phases = {}
    bugs: dict[str, AdvisedRun] = {}
    for span, mine in by_phase(read, spans_of(manifest)):
        phases[span.name] = verify_logs(mine, span.arguments)
        for bug in known_bugs(attempts_of(mine), span.arguments, manifest):
            bugs.setdefault(bug.advisory.id, bug)
    if phases:
        return _Verified(_decisive(phases), phases, tuple(bugs.values()))
    stated = stated_arguments(manifest)
    return _Verified(verify_logs(read, stated), {}, known_bugs(attempts_of(read), stated, manifest))


def _show_all(found: _Verified) -> None:
    _show_verdicts(found)
    for bug in found.advisories:
        echo(advisory_text(bug.as_problem()))


def _show_verdicts(found: _Verified) -> None:
    for name, one in found.phases.items():
        echo(f"phase {name}: ", nl=False)
        _show(one)
    if not found.phases:
        _show(found.whole)


def _decisive(phases: Mapping[str, Verification]) -> Verification:
    """The phase that decides for the run: one that fails, else one that asked for FP8."""
    return min(phases.values(), key=lambda one: (one.ok, not one.asked))


def _show(found: Verification) -> None:
    colour = _COLOUR.get(found.verdict)
    if found.refuted:
        colour = "red"
    echo(found.verdict, nl=False, fg=colour, bold=True)
    if found.verdict == "no evidence":
        echo("  the log contains neither Megatron's arguments of the precision nor a probe")
        return
    if found.asked:
        echo(f"  {found.recipe} was requested")
    else:
        echo("  FP8 was not requested")
    for finding in found.findings:
        echo(f"  {finding.kind:<10} {finding.text}", fg="red" if finding == found.not_partitioned else None)
    for warning in found.warnings:
        echo(f"  warning: {warning}", fg="yellow")
    if found.verdict == "requested only":
        eprint(
            "the log contains no probe or profile that proves FP8: add `launch: {probe: true, profile_iteration: 5}`"
        )

"""`fp8launch verify`: report whether FP8 ran, from evidence that the job wrote to its log."""

from __future__ import annotations

import click

from fp8launch.cli.output import echo, eprint, folded, json_option, logs_argument, print_problems, show_json
from fp8launch.diagnostics import exit_code
from fp8launch.report.named_runs import logs_named, runs_with_logs
from fp8launch.report.run_verification import RunVerification, verify_log_files, verify_run
from fp8launch.report.verify import Verification

_COLOUR = {"verified": "green", "requested only": "yellow", "no evidence": "yellow"}


@click.command()
@logs_argument
@json_option
def verify(names: tuple[str, ...], as_json: bool) -> int:
    """Report whether FP8 ran: `verified`, `requested only` (nothing shows it), `not FP8` or `no evidence`.

    The exit code is 1 if there is no evidence, if FP8 was requested but nothing shows that it ran, or if ranks hold
    full tensors that ZeRO or FSDP should have sharded. Several logs are the attempts of one run. Each phase of a run
    gets its own verdict. Known bugs of the versions that ran are listed, but do not affect the exit code.
    """
    logs = logs_named(names)
    if logs:
        found = [("logs", verify_log_files(logs))]
    else:
        found = [(run.run_id, verify_run(run)) for run in runs_with_logs(names, eprint)]
    several = len(found) > 1
    if as_json and several:
        show_json([{"run": run, **one.as_json()} for run, one in found])
    elif as_json:
        show_json(found[0][1].as_json())
    else:
        for run, one in found:
            if several:
                echo(f"{run}: ", nl=False)
            _show_verdicts(one)
            for problems in one.problems.values():
                print_problems(problems or [], err=False)
    return exit_code(all(one.whole.ok for _, one in found))


def _show_verdicts(found: RunVerification) -> None:
    for name, one in found.phases.items():
        echo(f"phase {name}: ", nl=False)
        _show(one)
    if not found.phases:
        _show(found.whole)


def _show(found: Verification) -> None:
    colour = _COLOUR.get(found.verdict)
    if found.refuted:
        colour = "red"
    echo(found.verdict, nl=False, fg=colour, bold=True)
    if found.verdict == "no evidence":
        echo("\n  the log contains neither Megatron's precision arguments nor a probe")
        return
    if found.asked:
        echo(f"  {found.recipe} was requested")
    else:
        echo("  FP8 was not requested")
    for finding in found.findings:
        colour = "red" if finding == found.not_partitioned else None
        for line in folded(f"  {finding.kind:<10} {finding.text}", " " * 13):
            echo(line, fg=colour)
    for warning in found.warnings:
        for line in folded(f"  warning: {warning}", " " * 4):
            echo(line, fg="yellow")
    if found.verdict == "requested only":
        eprint("nothing in the log proves FP8; to record evidence, add to the recipe:")
        eprint("    launch: {probe: true, profile_iteration: 5}")

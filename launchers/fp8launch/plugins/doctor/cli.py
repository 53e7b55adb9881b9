"""`fp8launch doctor`: what this machine and cluster provide and lack."""

from __future__ import annotations

from collections.abc import Sequence

import click

from fp8launch.cli import complete
from fp8launch.cli.output import console, eprint, json_option, print_problems, show_json, show_table
from fp8launch.diagnostics import MACHINE_LACKS, Problem
from fp8launch.plugins.doctor.examine import examine
from fp8launch.plugins.doctor.finding import Finding

# In a narrower terminal the advice goes below the finding: next to it, each column would be a few words wide.
WIDE = 120


@click.command()
@click.option(
    "--cluster", metavar="PROFILE", shell_complete=complete.clusters, help="Cluster profile: a name or a file."
)
@json_option
def doctor(cluster: str | None, as_json: bool) -> int:
    """Show what this machine and its cluster provide and lack, and what to do about it.

    The exit code is 3 if no run can be started from here, neither on a cluster nor on this machine.
    """
    found = examine(cluster)
    if as_json:
        show_json(
            {
                "ok": found.ok,
                "findings": list(map(Finding.as_json, found.findings)),
                "problems": list(map(Problem.as_json, found.problems)),
            }
        )
    else:
        _show(found.findings)
        print_problems(found.problems)
        if not found.ok:
            eprint("No run can be started from here. The missing parts are listed above.")
    return 0 if found.ok else MACHINE_LACKS


def _show(findings: Sequence[Finding]) -> None:
    if console().width >= WIDE:
        rows = [(one.state, one.what, one.found, one.advice or "") for one in findings]
        show_table(["", "what", "found", "what to do"], rows)
        return
    narrow = []
    for one in findings:
        text = f"{one.found}\n-> {one.advice}" if one.advice else one.found
        narrow.append((one.state, one.what, text))
    show_table(["", "what", "found, and what to do"], narrow, unbroken=("", "what"))

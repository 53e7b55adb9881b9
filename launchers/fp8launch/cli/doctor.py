"""`fp8launch doctor`: what this machine and cluster offer and lack."""

from __future__ import annotations

from collections.abc import Sequence

import click

from fp8launch.cli import complete
from fp8launch.cli.output import eprint, json_option, print_problems, show_json, show_table, terminal_width
from fp8launch.diagnostics import MACHINE_LACKS, Problem
from fp8launch.schedulers.base import Finding


@click.command()
@click.option(
    "--cluster", metavar="PROFILE", shell_complete=complete.clusters, help="Cluster profile: a name or a file."
)
@json_option
def doctor(cluster: str | None, as_json: bool) -> int:
    """Show what this machine and its cluster offer and lack, and what to do about it.

    Exit code 0, or 3 when no run can be started here, on a cluster or on this machine.
    """
    from fp8launch.check.doctor import examine

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
            eprint("No run can be started from here: see what is missing above.")
    return 0 if found.ok else MACHINE_LACKS


# In a narrower terminal the advice goes below what was found, which would be a few words wide beside it.
WIDE = 120


def _show(findings: Sequence[Finding]) -> None:
    if terminal_width() >= WIDE:
        rows = [(one.state, one.what, one.found, one.advice or "") for one in findings]
        show_table(["", "what", "found", "what to do"], rows)
        return
    narrow = []
    for one in findings:
        text = f"{one.found}\n-> {one.advice}" if one.advice else one.found
        narrow.append((one.state, one.what, text))
    show_table(["", "what", "found, and what to do"], narrow, unbroken=("", "what"))

"""`fp8launch doctor`: what this machine and cluster offer and lack."""

from __future__ import annotations

import click

from fp8launch.cli.output import complain, json_option, say, show_json, show_table
from fp8launch.problems import MACHINE_LACKS


@click.command()
@click.option("--cluster", metavar="PROFILE", help="Cluster profile: a name or a file.")
@json_option
def doctor(cluster: str | None, as_json: bool) -> int:
    """Show what this machine and its cluster offer and lack, and what to do about it.

    Exit code 0, or 3 when no run can be started here, on a cluster or on this machine.
    """
    from fp8launch.check.offers import examine

    found = examine(cluster)
    if as_json:
        show_json(
            {
                "ok": found.ok,
                "findings": [finding.as_json() for finding in found.findings],
                "problems": [problem.as_json() for problem in found.problems],
            }
        )
    else:
        show_table(
            ["", "what", "found", "what to do"], [(f.state, f.what, f.found, f.advice or "") for f in found.findings]
        )
        complain(found.problems)
        if not found.ok:
            say("No run can be started from here: see what is missing above.")
    return 0 if found.ok else MACHINE_LACKS

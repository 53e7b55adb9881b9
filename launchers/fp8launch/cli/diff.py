"""`fp8launch diff`: two resolved recipes side by side."""

from __future__ import annotations

import click

from fp8launch.cli.output import json_option, recipe_options, say, show_json, show_table, with_options
from fp8launch.job.cluster import load_cluster
from fp8launch.recipe.difference import differences
from fp8launch.runs.submit import prepare

EFFECTS = ("numerics", "speed", "neutral")


@click.command()
@click.argument("a")
@click.argument("b")
@with_options(*recipe_options)
@click.option("--cluster", help="Cluster profile: a name or a file.")
@json_option
def diff(a: str, b: str, overrides: tuple[str, ...], nodes: int | None, cluster: str | None, as_json: bool) -> None:
    """Show in what two recipes differ, and whether it touches numerics, speed or neither.

    `--set` and `--nodes` apply to both.
    """
    found = differences(prepare(a, overrides, nodes), prepare(b, overrides, nodes), load_cluster(cluster))
    if as_json:
        show_json([one.as_json() for one in found])
    elif not found:
        say("no difference")
    else:
        rows = [(one.effect, one.part, one.name, _shown(one.a), _shown(one.b)) for one in found]
        show_table(["touches", "in", "what", a, b], sorted(rows, key=lambda row: EFFECTS.index(row[0])))
        counts = {effect: sum(one.effect == effect for one in found) for effect in EFFECTS}
        say(", ".join(f"{count} {effect}" for effect, count in counts.items() if count))


def _shown(value: object) -> str:
    return "-" if value is None else "yes" if value is True else str(value)

"""`fp8launch diff`: two resolved recipes side by side."""

from __future__ import annotations

from collections.abc import Sequence

import click

from fp8launch.cli import complete
from fp8launch.cli.output import (
    cluster_option,
    echo,
    eprint,
    json_option,
    recipe_options,
    show_json,
    show_table,
    with_options,
)
from fp8launch.cluster.profile import load_cluster
from fp8launch.job.prepared import prepare
from fp8launch.plugins.diff.differences import Difference, differences
from fp8launch.rundir.names import recipe_named

# Longer names would be broken as column titles, so the columns become A and B.
SHORT = 24
EFFECTS = ("numerics", "speed", "neutral")


@click.command()
@click.argument("a", metavar="RECIPE|RUN", shell_complete=complete.recipes)
@click.argument("b", metavar="RECIPE|RUN", shell_complete=complete.recipes)
@with_options(*recipe_options)
@cluster_option
@json_option
def diff(a: str, b: str, overrides: tuple[str, ...], nodes: int | None, cluster: str | None, as_json: bool) -> None:
    """List the differences between two recipes or runs, and whether each affects numerics, speed or neither.

    Name a run id or run folder to use the recipe of that run. `--set` and `--nodes` apply to both recipes.
    """
    profile = load_cluster(cluster)
    first, second = (prepare(recipe_named(name, say=eprint), overrides, nodes, profile) for name in (a, b))
    found = differences(first, second, profile)
    if as_json:
        show_json(list(map(Difference.as_json, found)))
    elif not found:
        eprint("no difference")
    else:
        _show(a, b, found)


def _show(a: str, b: str, found: Sequence[Difference]) -> None:
    names = (a, b)
    if a == b or max(len(a), len(b)) > SHORT:
        names = ("A", "B")
        echo(f"A: {a}\nB: {b}\n")
    rows, counts = [], []
    for effect in EFFECTS:
        touching = [one for one in found if one.effect == effect]
        for one in touching:
            rows.append((effect, one.part, one.name, _shown(one.a), _shown(one.b)))
        if touching:
            counts.append(f"{len(touching)} {effect}")
    show_table(["touches", "in", "what", *names], rows)
    eprint(", ".join(counts))


def _shown(value: object) -> str:
    if value is None:
        return "-"
    if value is True:
        return "yes"
    return str(value)

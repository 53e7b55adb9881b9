"""`fp8launch init`: a first cluster profile, a first recipe."""

from __future__ import annotations

import click

from fp8launch.plugins.init.cluster import cluster
from fp8launch.plugins.init.recipe import recipe


@click.group()
def init() -> None:
    """Write a first cluster profile or a first recipe.

    On a terminal, `init` asks what it needs to know; every question can be answered by an option instead.
    """


init.add_command(cluster)
init.add_command(recipe)

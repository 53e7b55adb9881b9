"""`fp8launch init`: a first cluster profile, a first recipe."""

from __future__ import annotations

import click

from fp8launch.cli.subcommands import Subcommands

COMMANDS = {
    "cluster": "write a cluster profile from what Slurm says",
    "recipe": "write a recipe from a model, a GPU and your data",
}


@click.group(cls=Subcommands, texts=COMMANDS)
def init() -> None:
    """Write a first cluster profile or a first recipe. Questions are asked on a terminal; each has an option."""

"""`fp8launch init`: a first cluster profile, a first recipe."""

from __future__ import annotations

import importlib

import click

COMMANDS = {
    "cluster": "write a cluster profile from what Slurm says",
    "recipe": "write a recipe from a model, a GPU and your data",
}


class InitCommands(click.Group):
    """Loads a command's module when the command is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"fp8launch.cli.init_{cmd_name}")
        command: click.Command = getattr(module, cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=InitCommands)
def init() -> None:
    """Write a first cluster profile or a first recipe. Questions are asked on a terminal; each has an option."""

"""Commands of a command, such as `fp8launch data build`."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import click


class Subcommands(click.Group):
    """Loads the module of a command, such as `data_build`, when the command is called.

    `texts` has the commands in the order of `--help`, with what it says of each; `hidden_command` is one that it does
    not list.
    """

    def __init__(
        self, *arguments: Any, texts: Mapping[str, str], hidden_command: str | None = None, **options: Any
    ) -> None:
        super().__init__(*arguments, **options)
        self.texts = texts
        self.hidden_command = hidden_command

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.texts)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in (*self.texts, self.hidden_command):
            return None
        name = cmd_name.replace("-", "_")
        command: click.Command = getattr(importlib.import_module(f"fp8launch.cli.{self.name}_{name}"), name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(self.texts.items()))

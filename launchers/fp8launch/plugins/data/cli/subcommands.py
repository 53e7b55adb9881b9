"""Commands of a command, such as `fp8launch data build`."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import click


class Subcommands(click.Group):
    """A group that imports a command when it is called: `build-part` from the module PREFIX + `build_part`.

    `texts` has the help line of each command, in the order of `--help`, which does not list `hidden_command`.
    """

    def __init__(
        self, *arguments: Any, prefix: str, texts: Mapping[str, str], hidden_command: str | None = None, **options: Any
    ) -> None:
        super().__init__(*arguments, **options)
        self.prefix = prefix
        self.texts = texts
        self.hidden_command = hidden_command

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.texts)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in (*self.texts, self.hidden_command):
            return None
        name = cmd_name.replace("-", "_")
        command: click.Command = getattr(importlib.import_module(self.prefix + name), name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(self.texts.items()))

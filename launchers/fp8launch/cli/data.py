"""`fp8launch data`: datasets from text, for training with Megatron."""

from __future__ import annotations

import importlib

import click

COMMANDS = {
    "build": "tokenize text into a dataset that Megatron reads",
    "tokenizer": "train a small tokenizer on text",
    "inspect": "show what a dataset holds, and verify its files",
    "split": "divide a dataset by documents, for training and validation",
    "sample": "continue a text with a trained model",
    "blend": "print the weights and epochs of several datasets in one run",
}


class DataCommands(click.Group):
    """Loads a command's module when the command is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS and cmd_name != "build-part":
            return None
        module = importlib.import_module(f"fp8launch.cli.data_{cmd_name.replace('-', '_')}")
        command: click.Command = getattr(module, cmd_name.replace("-", "_"))
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=DataCommands)
def data() -> None:
    """Build Megatron's indexed datasets from text; inspect, split and blend them."""

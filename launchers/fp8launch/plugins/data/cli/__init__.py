"""The command group `fp8launch data`."""

from __future__ import annotations

import click

from fp8launch.plugins.data.cli.subcommands import Subcommands

COMMANDS = {
    "build": "tokenize text, or conversations, into a dataset that Megatron reads",
    "tokenizer": "train a small tokenizer on text",
    "inspect": "show a dataset's contents, and verify its files",
    "split": "divide a dataset by documents, for training and validation",
    "sample": "continue a text with a trained model",
    "blend": "print the weights and epochs of several datasets in one run",
}


@click.group(cls=Subcommands, prefix="fp8launch.plugins.data.cli.", texts=COMMANDS, hidden_command="build-part")
def data() -> None:
    """Build Megatron's indexed datasets from text; inspect, split and blend them."""

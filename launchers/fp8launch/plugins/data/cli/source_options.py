"""Options of commands that read text from files."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from fp8launch.plugins.data.sources import FORMATS

_OPTIONS = (
    click.option("--field", default="text", help="Field or column with the text (default: text)."),
    click.option(
        "--format",
        "form",
        type=click.Choice(FORMATS),
        help="Input format (default: from the file name). lines: one document per line.",
    ),
    click.option("--glob", "patterns", multiple=True, metavar="PATTERN", help="Files to use in a folder; repeatable."),
)


def source_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--field`, `--format` and `--glob`, passed as `field`, `form` and `patterns`."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command

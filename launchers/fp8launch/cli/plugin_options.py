"""Options that plugins add to core commands.

If a plugin is not active, its options are hidden, and using one reports which plugin it needs. Imports are local to
each function so that `check` does not import the reports.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import click

from fp8launch import plugin_registry
from fp8launch.plugin_registry import option_of

Decorator = Callable[[Any], Any]


def layer_options(command: Literal["check", "submit"]) -> list[Decorator]:
    """Return the options with which `check` or `submit` request additional check layers."""
    from fp8launch.check.extra_layers import extra_layers

    options: list[Decorator] = []
    for name, layer in extra_layers().items():
        option = option_of(name)
        if command == "check":
            options.append(click.option(option, is_flag=True, help=layer.check_help))
        else:
            refusal = option.replace("--", "--no-", 1)
            options.append(click.option(f"{option}/{refusal}", default=None, help=layer.submit_help))
    return options + _absent_options("check_layers", is_flag=True)


def file_options() -> list[Decorator]:
    """Return the options with which `compare` writes files."""
    from fp8launch.report.comparison_files import comparison_files

    options: list[Decorator] = []
    for name, file in comparison_files().items():
        path = click.Path(dir_okay=file.may_be_folder, path_type=Path)
        options.append(click.option(f"--{name}", type=path, metavar="F", help=file.help))
    return options + _absent_options("comparison_files")


def _absent_options(kind: str, **settings: Any) -> list[Decorator]:
    options: list[Decorator] = []
    for name, plugin in plugin_registry.absent(kind).items():
        refuse = _refusal(name, plugin)
        options.append(click.option(option_of(name), hidden=True, expose_value=False, callback=refuse, **settings))
    return options


def _refusal(name: str, plugin: str) -> Callable[[click.Context, click.Parameter, object], None]:
    def refuse(context: click.Context, parameter: click.Parameter, value: object) -> None:
        if value:
            message = plugin_registry.needs(option_of(name), plugin)
            raise click.UsageError(f"{message}: {plugin_registry.how_to_activate(plugin)}")

    return refuse

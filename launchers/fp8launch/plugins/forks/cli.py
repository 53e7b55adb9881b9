"""`fp8launch schema`: let `check` know the flags of a fork or a source checkout."""

from __future__ import annotations

from pathlib import Path

import click

from fp8launch.cli.output import echo
from fp8launch.megatron.schema import FlagSchema, by_name, load_schema


@click.group()
def schema() -> None:
    """Let `check` know the flags of a fork or a source checkout of Megatron-LM."""


@schema.command(short_help="read the flags of a source checkout")
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--name", help="Name of the fork in recipes (default: the folder's name).")
def build(path: Path, name: str | None) -> int:
    """Read the flags of the Megatron-LM checkout PATH, with types, choices and defaults.

    No code of the checkout is run. Recipes then name the fork in software.megatron, such as 0.19+NAME.
    """
    from fp8launch.plugins.forks.build import build_schema

    version, in_source, found, root, file = build_schema(path, name)
    base = version.partition("+")[0]
    upstream = load_schema(base)
    fork = FlagSchema(in_source or base, (), {}, by_name(found.flags.values()))
    own = [flag.options[0] for flag in fork.flags() if upstream.find(flag.options[0]) is None]
    absent = [flag.options[0] for flag in upstream.flags() if fork.find(flag.options[0]) is None]
    echo(f"{len(found.flags)} flags of {root}")
    echo(f"  Megatron-Core {in_source or 'of an unknown version'}; checked as {base}, the nearest supported version")
    echo(f"  {len(own)} flags that {base} lacks: {', '.join(own[:8])}{', ...' if len(own) > 8 else ''}")
    echo(f"  {len(absent)} flags of {base} that it lacks")
    uncertain = sum("unread" in entry for entry in found.flags.values())
    if uncertain:
        echo(f"  {uncertain} flags with a computed default or choices, which are not checked")
    if found.unread:
        echo(f"  not read, because their flags are computed: {', '.join(found.unread[:8])}")
    echo(f"Written to {file}. In a recipe: software: {{megatron: {version}}}")
    return 0

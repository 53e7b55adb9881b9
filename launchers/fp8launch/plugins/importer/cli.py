"""`fp8launch import`: turn an argument list or a launch script into a recipe."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import click

from fp8launch.cli.output import echo, print_problems
from fp8launch.diagnostics import error, errors_in, exit_code
from fp8launch.recipe.yaml_source import MAX_BYTES


@click.command(name="import")
@click.argument("file", metavar="FILE|-")
@click.argument("arguments", metavar="[-- ARG...]", nargs=-1)
@click.option(
    "--megatron",
    metavar="VERSION|PATH",
    help="Megatron-Core version, a fork that `schema build` has read, or the fork's folder (default: the newest).",
)
@click.option("--env", metavar="NAME=VALUE", multiple=True, help="Variable with which the script is started.")
def import_(file: str, arguments: tuple[str, ...], megatron: str | None, env: tuple[str, ...]) -> int:
    """Turn a Megatron argument list, or a launch script that contains one, into a recipe on stdout.

    Nothing in it is executed. Whatever cannot be imported is reported on stderr and noted in the recipe. ARGs are the
    script's own arguments, its $1, $2 and so on.
    """
    from fp8launch.plugins.forks.build import version_of
    from fp8launch.plugins.importer.from_argv import import_text
    from fp8launch.plugins.importer.launch_script import ScriptStart

    for text in env:
        if not re.fullmatch(r"[A-Za-z_]\w*=.*", text, re.DOTALL):
            raise error("env-value", f"{text!r} is not NAME=VALUE", "--env", "write --env NAME=VALUE")
    start = ScriptStart(arguments or None, dict(text.split("=", 1) for text in env))
    name = "<stdin>" if file == "-" else file
    try:
        raw = _read(file)
    except OSError as exc:
        raise error("unreadable-file", f"cannot be read: {exc.strerror}", name) from None
    if len(raw) > MAX_BYTES:
        raise error("file-too-large", f"is larger than {MAX_BYTES >> 20} MiB, so it cannot be a launch script", name)
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise error("not-utf8", "is not UTF-8 text", name) from None
    recipe, problems = import_text(text, name, None if megatron is None else version_of(megatron), start)
    print_problems(problems)
    echo(recipe, nl=False)
    return exit_code(not errors_in(problems))


def _read(file: str) -> bytes:
    """Read a file or pipe up to the size limit, because a device may have no end."""
    if file == "-":
        return sys.stdin.buffer.read(MAX_BYTES + 1)
    with Path(file).open("rb") as stream:
        return stream.read(MAX_BYTES + 1)

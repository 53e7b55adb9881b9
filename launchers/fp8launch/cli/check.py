"""`fp8launch check`: what would stop or spoil a run."""

from __future__ import annotations

import click

from fp8launch.cli.output import complain, json_option, recipe_options, say, show_json, with_options
from fp8launch.problems import Problem, UserError
from fp8launch.runs.submit import prepare


@click.command()
@click.argument("recipes", nargs=-1, required=True, metavar="RECIPE...")
@with_options(*recipe_options)
@json_option
def check(recipes: tuple[str, ...], overrides: tuple[str, ...], nodes: int | None, as_json: bool) -> int:
    """Find what is wrong with recipes: format, flags of the Megatron version, sizes that do not divide."""
    problems: list[Problem] = []
    status = 0
    for recipe in recipes:
        try:
            prepare(recipe, overrides, nodes)
        except UserError as exc:
            problems += exc.problems
            status = max(status, exc.exit_code)
    ok = not any(p.severity == "error" for p in problems)
    if as_json:
        show_json({"ok": ok, "problems": [p.as_json() for p in problems]})
    else:
        complain(problems)
        if ok:
            say(f"{len(recipes)} recipe{'s' * (len(recipes) > 1)} checked, nothing wrong")
    return status

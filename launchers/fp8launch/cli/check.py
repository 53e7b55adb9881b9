"""`fp8launch check`: what would stop or spoil a run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import get_args

import click

from fp8launch.check.run import CheckResult, check_all, schema_result
from fp8launch.cli.output import complain, json_option, recipe_options, say, show_json, with_bar, with_options
from fp8launch.job.cluster import Cluster, load_cluster
from fp8launch.problems import ANSWER_IS_NO, UserError
from fp8launch.recipe.schema import Gpu
from fp8launch.runs.submit import Prepared, prepare


@click.command()
@click.argument("recipes", nargs=-1, required=True, metavar="RECIPE...")
@with_options(*recipe_options)
@click.option("--gpu", type=click.Choice(get_args(Gpu)), help="What if it ran on this GPU?")
@click.option("--cluster", help="Cluster profile: a name or a file.")
@json_option
def check(
    recipes: tuple[str, ...],
    overrides: tuple[str, ...],
    nodes: int | None,
    gpu: str | None,
    cluster: str | None,
    as_json: bool,
) -> int:
    """Find what would stop or silently spoil runs: format, flags, Megatron's own checks, rules, memory, machine.

    A folder stands for the recipes in it. Exit code 0: no errors; 1: errors; 2: a recipe that does not parse.
    """
    profile = load_cluster(cluster)
    names = list(_expanded(recipes))
    what_if = (*overrides, *([f"resources.gpu={gpu}"] if gpu else []))
    results = dict(zip(names, _results(names, what_if, nodes, profile), strict=True))
    if as_json:
        show_json(_as_json(results))
    else:
        _show(results)
    failed = [result.exit_code or ANSWER_IS_NO for result in results.values() if not result.ok]
    return max(failed, default=0)


def refuse_errors(prepared: Sequence[Prepared], cluster: Cluster, skip: bool = False) -> list[CheckResult]:
    """Check runs that are to be submitted: warnings are shown, errors raise UserError unless they are to be skipped."""
    results = check_all(prepared, cluster, say=say)
    problems = list(dict.fromkeys(p for result in results for p in result.problems))
    if not skip and any(p.severity == "error" for p in problems):
        raise UserError(problems, ANSWER_IS_NO)
    complain(p for p in problems if p.severity == "warning")
    return results


def _expanded(recipes: Sequence[str]) -> Iterator[str]:
    """Recipes by name, each once; a folder is the recipes at its top."""
    seen = set()
    for name in recipes:
        folder = Path(name)
        files = sorted(str(file) for file in folder.glob("*.yaml")) if folder.is_dir() else [name]
        if not files:
            raise click.UsageError(f"no *.yaml in {name}")
        yield from (file for file in files if file not in seen)
        seen.update(files)


def _results(
    names: Sequence[str], overrides: Sequence[str], nodes: int | None, cluster: Cluster
) -> Iterator[CheckResult]:
    prepared: dict[str, Prepared] = {}
    refused: dict[str, CheckResult] = {}
    for name in with_bar(names, "reading recipes"):
        try:
            prepared[name] = prepare(name, overrides, nodes)
        except UserError as exc:
            refused[name] = schema_result(exc)
    checked = dict(zip(prepared, check_all(list(prepared.values()), cluster, say=say), strict=True))
    return (refused[name] if name in refused else checked[name] for name in names)


def _as_json(results: dict[str, CheckResult]) -> dict[str, object]:
    """One recipe's result as it is; of several the problems together, and each by itself under `recipes`."""
    if len(results) == 1:
        return next(iter(results.values())).as_json()
    each = {name: result.as_json() for name, result in results.items()}
    return {
        "ok": all(result.ok for result in results.values()),
        "problems": [problem for one in each.values() for problem in one["problems"]],
        "layers": _layers(results.values()),
        "silenced": [problem for one in each.values() for problem in one["silenced"]],
        "recipes": each,
    }


def _layers(results: Iterable[CheckResult]) -> dict[str, str]:
    """For each layer "ran" where it looked at every recipe, else the first reason why it did not."""
    layers: dict[str, str] = {}
    for result in results:
        for name, state in result.layers.items():
            if layers.setdefault(name, "ran") == "ran":
                layers[name] = state
    return layers


def _show(results: dict[str, CheckResult]) -> None:
    for name, result in results.items():
        if len(results) > 1 and result.problems:
            say(f"{name}:")
        complain(result.problems)
    silent = dict.fromkeys(f"{layer} {state}" for r in results.values() if r.ok for layer, state in r.layers.items())
    for line in silent:
        if not line.endswith(" ran"):
            say(f"note: layer {line}")
    errors = sum(not result.ok for result in results.values())
    warned = sum(result.ok and bool(result.problems) for result in results.values())
    silenced = sum(len(result.silenced) for result in results.values())
    verdict = ", ".join(
        (
            f"{len(results)} recipe{'s' * (len(results) > 1)} checked",
            f"{errors} with errors" if errors else "nothing that would stop a run",
            *([f"{warned} with warnings"] if warned else []),
            *([f"{silenced} warning{'s' * (silenced > 1)} silenced"] if silenced else []),
        )
    )
    say(verdict)

"""`fp8launch check`: find what would stop or spoil a run."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import click

from fp8launch.check.before_submission import check_before_submission
from fp8launch.check.check_recipes import CheckedRecipes, check_recipes
from fp8launch.check.checker import CheckResult
from fp8launch.check.extra_layers import extra_layers
from fp8launch.check.summary import summary
from fp8launch.cli import complete
from fp8launch.cli.output import (
    cluster_option,
    counting_bar,
    echo,
    eprint,
    json_option,
    print_problems,
    recipe_options,
    show_json,
    with_bar,
    with_gpu,
    with_options,
)
from fp8launch.cli.plugin_options import layer_options
from fp8launch.cluster.profile import Cluster, load_cluster
from fp8launch.diagnostics import exit_code
from fp8launch.hardware.gpus import GPUS
from fp8launch.job.prepared import Prepared
from fp8launch.schedulers.base import Scheduler
from fp8launch.submit.recipe_kinds import Part
from fp8launch.wording import counted


@click.command()
@click.argument("recipes", nargs=-1, required=True, metavar="RECIPE|RUN|STUDY...", shell_complete=complete.recipes)
@with_options(*recipe_options)
@click.option("--gpu", type=click.Choice(tuple(GPUS)), help="Check for this GPU model instead of the recipe's.")
@cluster_option
@with_options(*layer_options("check"))
@click.option("-v", "--verbose", is_flag=True, help="With --rehearse: show the traceback of each refusal.")
@json_option
def check(
    recipes: tuple[str, ...],
    overrides: tuple[str, ...],
    nodes: int | None,
    gpu: str | None,
    cluster: str | None,
    verbose: bool,
    as_json: bool,
    **asked: bool,
) -> int:
    """Find what would stop or silently spoil a run: syntax, flags, Megatron's validators, rules, memory, machine.

    Name a folder to check all recipes in it, or a run or study to check the recipes of its runs. Exit code 0: no
    errors; 1: errors; 2: a recipe cannot be parsed; 3: Megatron's validators, a rehearsal or a proof could not run.
    """
    profile = load_cluster(cluster)
    checked = check_recipes(
        recipes, with_gpu(overrides, gpu), nodes, profile, asked, say=eprint, bar=counting_bar, progress=with_bar
    )
    if as_json:
        show_json(checked.as_json())
    else:
        _show(checked, verbose)
    return max(result.exit_code or exit_code(result.ok) for result in checked.results.values())


def refuse_errors(
    runs: Sequence[Prepared],
    cluster: Cluster,
    scheduler: Scheduler,
    skip: bool = False,
    asked: Mapping[str, bool | None] | None = None,
    parts: Sequence[Part] = (),
) -> list[CheckResult]:
    """Check runs as `check_before_submission` does, and print warnings."""
    checked = check_before_submission(runs, cluster, scheduler, eprint, counting_bar, skip, asked, parts)
    print_problems(checked.warnings)
    for note in checked.notes:
        eprint(f"warning: {note}")
    return checked.results


def _show(checked: CheckedRecipes, verbose: bool) -> None:
    """Print problems on stdout; print the layers that did not run and the verdict on stderr."""
    results = checked.results
    for name, result in results.items():
        if len(results) > 1 and result.problems:
            echo(f"{name}:")
        print_problems(result.problems, err=False)
        if verbose:
            for report in result.extra.values():
                if report.details:
                    echo(report.details)
    for line, names in checked.not_run.items():
        if len(names) < len(results):
            line += f" ({', '.join(names)})"
        eprint(f"note: layer {line}")
    verdicts = []
    for layer in extra_layers().values():
        reports = [result.extra[layer.name] for result in results.values() if layer.name in result.extra]
        for note in layer.notes(reports):
            eprint(f"note: {note}")
        verdicts.append(layer.verdict(reports))
    eprint(_verdict(results.values(), verdicts))
    if len(results) == 1 and all(result.ok for result in results.values()):
        echo("\n".join(summary(next(iter(checked.prepared.values())))))


def _verdict(results: Collection[CheckResult], verdicts: Iterable[str]) -> str:
    """Summarize the results of all recipes in one line."""
    parts = [f"{counted(len(results), 'recipe')} checked"]
    errors = unknown = warned = silenced = 0
    for result in results:
        silenced += len(result.silenced)
        if not result.ok:
            errors += 1
            continue
        unknown += bool(result.exit_code)
        warned += bool(result.problems)
    if errors:
        parts.append(f"{errors} with errors")
    elif unknown:
        parts.append(f"{unknown} without a verdict")
    else:
        parts.append("no errors found")
    parts += filter(None, verdicts)
    if warned:
        parts.append(f"{warned} with warnings")
    if silenced:
        parts.append(f"{counted(silenced, 'warning')} silenced")
    return ", ".join(parts)

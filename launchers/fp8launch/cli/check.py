"""`fp8launch check`: what would stop or spoil a run."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import click

from fp8launch.check.checker import CheckResult, check_all, schema_result
from fp8launch.check.rehearsal_report import RehearsalReport
from fp8launch.cli import complete
from fp8launch.cli.check_summary import summary
from fp8launch.cli.names import is_own_folder, recipes_named
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
from fp8launch.cluster.profile import Cluster, load_cluster
from fp8launch.diagnostics import ANSWER_IS_NO, UserError, error, errors_in, exit_code, problems_of
from fp8launch.hardware.gpus import GPUS
from fp8launch.injob.ownership import foreign_owner
from fp8launch.job.prepared import Prepared, prepare
from fp8launch.schedulers.base import Scheduler
from fp8launch.wording import counted


@click.command()
@click.argument("recipes", nargs=-1, required=True, metavar="RECIPE|RUN|STUDY...", shell_complete=complete.recipes)
@with_options(*recipe_options)
@click.option("--gpu", type=click.Choice(tuple(GPUS)), help="Check for this GPU model instead of the recipe's.")
@cluster_option
@click.option(
    "--rehearse", is_flag=True, help="Also run two steps of Megatron's own code for each role, without a GPU."
)
@click.option("--count", is_flag=True, help="With --rehearse --json: traffic and GEMMs of a step of each role.")
@click.option("-v", "--verbose", is_flag=True, help="With --rehearse: show the tracebacks of what is refused.")
@json_option
def check(
    recipes: tuple[str, ...],
    overrides: tuple[str, ...],
    nodes: int | None,
    gpu: str | None,
    cluster: str | None,
    rehearse: bool,
    count: bool,
    verbose: bool,
    as_json: bool,
) -> int:
    """Find what would stop or silently spoil runs: format, flags, Megatron's own checks, rules, memory, machine.

    A folder stands for the recipes in it, a run or a study for what it ran with. Exit code 0: no errors; 1: errors;
    2: a recipe that does not parse; 3: Megatron's own validators, or a rehearsal, could not answer.
    """
    if count and not (rehearse and as_json):
        raise click.UsageError("--count belongs to --rehearse --json")
    profile = load_cluster(cluster)
    refused: dict[str, UserError] = {}
    names = _expanded(recipes, refused, rehearse)
    prepared: dict[str, Prepared] = {}
    found = _results(names, with_gpu(overrides, gpu), nodes, profile, rehearse, count, prepared, refused)
    results = dict(zip(names, found, strict=True))
    if as_json:
        show_json(_as_json(results))
    else:
        _show(results, verbose)
        if len(results) == 1 and results[names[0]].ok:
            echo("\n".join(summary(prepared[names[0]])))
    return max(result.exit_code or exit_code(result.ok) for result in results.values())


def refuse_errors(
    prepared: Sequence[Prepared],
    cluster: Cluster,
    scheduler: Scheduler,
    skip: bool = False,
    rehearse: bool | None = None,
) -> list[CheckResult]:
    """Check runs that `scheduler` is to get: warnings are shown, errors raise UserError unless they are skipped."""
    results = check_all(prepared, cluster, say=eprint, scheduler=scheduler)
    results = _rehearse_some(prepared, results, cluster, rehearse)
    problems = problems_of(results)
    if errors_in(problems) and not skip:
        raise UserError(problems, ANSWER_IS_NO)
    print_problems(problem for problem in problems if problem.severity == "warning")
    notes: dict[str, None] = {}
    for result in results:
        state = result.layers["megatron"]
        if result.exit_code and state != "ran":
            notes[f"Megatron's own validators did not check this run: {state}"] = None
    for result in results:
        state = result.layers.get("rehearsal", "ran")
        if result.ok and state != "ran":
            notes[f"rehearsal {state}"] = None
    for note in notes:
        eprint(f"warning: {note}")
    return results


def _rehearse_some(
    prepared: Sequence[Prepared], results: Sequence[CheckResult], cluster: Cluster, asked: bool | None
) -> list[CheckResult]:
    """Rehearse all runs or none, as asked for; where nothing is, those that the cluster profile wants rehearsed."""
    found = list(results)
    places, runs, before = [], [], []
    for place, (run, result) in enumerate(zip(prepared, results, strict=True)):
        if _is_rehearsed(run, cluster, asked):
            places.append(place)
            runs.append(run)
            before.append(result)
    if not places:
        return found
    field = "--rehearse"
    if asked is None:
        field = f"cluster profile {cluster.name}: rehearse.from_gpu_hours"
    for place, result in zip(places, rehearsed(runs, before, cluster, field), strict=True):
        found[place] = result
    return found


def _is_rehearsed(run: Prepared, cluster: Cluster, asked: bool | None) -> bool:
    if asked is not None or cluster.rehearse is None:
        return bool(asked)
    return run.gpu_hours_at_most >= cluster.rehearse.from_gpu_hours


def rehearsed(
    runs: Sequence[Prepared],
    results: Sequence[CheckResult],
    cluster: Cluster,
    asked_by: str = "--rehearse",
    count: bool = False,
) -> list[CheckResult]:
    """Return the results with those of a rehearsal; a bar shows the roles that are done."""
    from fp8launch.check.rehearsal import with_rehearsal

    bar = functools.partial(counting_bar, "rehearsing roles")
    return with_rehearsal(runs, results, cluster, eprint, bar, asked_by=asked_by, count=count)


def _expanded(names: Sequence[str], refused: dict[str, UserError], to_run: bool) -> list[str]:
    """Recipes by name, each once; names that mean none, and with `to_run` others' files, are added to `refused`."""
    found: list[str] = []
    for name in names:
        files = _meant(name, refused, to_run)
        if not files:
            raise click.UsageError(f"no *.yaml in {name}")
        found += files
    return list(dict.fromkeys(found))


def _meant(name: str, refused: dict[str, UserError], to_run: bool) -> list[str]:
    """The recipes at the top of a folder; those that a run or a study ran with; else a recipe."""
    folder = Path(name)
    if folder.is_dir() and not is_own_folder(name):
        files = sorted(map(str, folder.glob("*.yaml")))
        if to_run:
            refused |= {file: refusal for file in files if (refusal := _foreign(file))}
        return files
    try:
        return recipes_named(name, to_run)
    except UserError as exc:
        refused[name] = exc
        return [name]


def _foreign(file: str) -> UserError | None:
    """The refusal to run what a recipe of another user names: only its own path would be the user's choice."""
    try:
        owner = foreign_owner(Path(file))
    except OSError:
        return None  # loading it fails too
    if owner is None:
        return None
    message = f"belongs to {owner}, and a rehearsal runs the script that a recipe names"
    return error("foreign-recipe", message, file, "read it, then name this file instead of its folder")


def _results(
    names: Sequence[str],
    overrides: Sequence[str],
    nodes: int | None,
    cluster: Cluster,
    rehearse: bool,
    count: bool,
    prepared: dict[str, Prepared],
    unknown: dict[str, UserError],
) -> Iterator[CheckResult]:
    """The result of each recipe; those that parse are added to `prepared`. `unknown` are no recipes."""
    refused = dict(unknown)
    for name in with_bar([name for name in names if name not in unknown], "reading recipes"):
        try:
            prepared[name] = prepare(name, overrides, nodes, cluster)
        except UserError as exc:
            refused[name] = exc
    runs = list(prepared.values())
    found = check_all(runs, cluster, say=eprint)
    if rehearse:
        found = rehearsed(runs, found, cluster, count=count)
    checked = dict(zip(prepared, found, strict=True))
    for name in names:
        if name in refused:
            yield schema_result(refused[name])
        else:
            yield checked[name]


def _as_json(results: dict[str, CheckResult]) -> dict[str, object]:
    """One recipe's result as it is; of several the problems together, and each by itself under `recipes`."""
    if len(results) == 1:
        return next(iter(results.values())).as_json()
    each = {name: result.as_json() for name, result in results.items()}
    problems: list[object] = []
    silenced: list[object] = []
    for one in each.values():
        problems += one["problems"]
        silenced += one["silenced"]
    return {
        "ok": all(result.ok for result in results.values()),
        "problems": problems,
        "layers": _layers(results.values()),
        "silenced": silenced,
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


def _show(results: dict[str, CheckResult], verbose: bool) -> None:
    """Print the findings on stdout, and on stderr what was not looked at and the verdict."""
    for name, result in results.items():
        if len(results) > 1 and result.problems:
            echo(f"{name}:")
        print_problems(result.problems, err=False)
        if verbose and result.rehearsal is not None:
            _show_tracebacks(result.rehearsal)
    for line, names in _not_run(results).items():
        if len(names) < len(results):
            line += f" ({', '.join(names)})"
        eprint(f"note: layer {line}")
    rehearsals = [result.rehearsal for result in results.values() if result.rehearsal]
    programs: dict[str | None, None] = {}
    left_out: dict[str, None] = {}
    for one in rehearsals:
        programs[one.program] = None
        left_out |= dict.fromkeys(one.not_rehearsed)
    for program in filter(None, programs):
        eprint(f"note: rehearsed: {program}'s own code")
    if left_out:
        eprint(f"note: not rehearsed: {', '.join(left_out)}")
    eprint(_verdict(results.values(), rehearsals))


def _verdict(results: Collection[CheckResult], rehearsals: Sequence[RehearsalReport]) -> str:
    """How many recipes are good, in one line."""
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
    ends: list[str] = []
    for rehearsal in rehearsals:
        ends += [role.result for role in rehearsal.roles]
    if ends:
        parts.append(f"{ends.count('passed')} of {counted(len(ends), 'role')} rehearsed without an error")
    if warned:
        parts.append(f"{warned} with warnings")
    if silenced:
        parts.append(f"{counted(silenced, 'warning')} silenced")
    return ", ".join(parts)


def _not_run(results: Mapping[str, CheckResult]) -> dict[str, list[str]]:
    """Layers that did not run and why, each with the recipes without errors of which that holds."""
    found: dict[str, list[str]] = {}
    for name, result in results.items():
        for layer, state in result.layers.items():
            if result.ok and state != "ran":
                found.setdefault(f"{layer} {state}", []).append(name)
    return found


def _show_tracebacks(report: RehearsalReport) -> None:
    """Print each traceback of a rehearsal once, with the roles that ended so."""
    roles: dict[str, list[str]] = {}
    for role in report.roles:
        if role.traceback:
            roles.setdefault(role.traceback, []).append(f"{role.role} (rank {role.rank})")
    for text, names in roles.items():
        echo(f"{', '.join(names)}:\n{text.rstrip()}")

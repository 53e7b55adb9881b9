"""What a name on the command line means: a run, a study, the folder of either, or a recipe.

A command that reads recipes takes a run or a study for the recipe that it ran with. A command that reads runs takes a
recipe for its runs. Commands that act on jobs (`cancel`, `resume`) do not guess: they look names up in the registry.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fp8launch.cli.output import eprint
from fp8launch.diagnostics import ANSWER_IS_NO, UserError, error
from fp8launch.recipe.load import find_recipe, load_recipe, pack_names, read_recipe
from fp8launch.recipe.yaml_source import is_file
from fp8launch.rundir.registry import all_runs, all_studies, find_run, find_runs, find_study, need_mine
from fp8launch.rundir.run_dir import MANIFEST, STUDY, RunFolder
from fp8launch.rundir.study import StudyFolder
from fp8launch.wording import and_more

RESOLVED = "recipe.yaml"
AMBIGUOUS = ("ambiguous-run", "ambiguous-study")


def recipe_named(name: str, to_run: bool = False) -> str:
    """Return the recipe that a name means: a recipe, or the one that a run, or all of a study, ran with.

    With `to_run` only a run of this user stands for its recipe. Raises UserError for a study of several recipes.
    """
    found = recipes_named(name, to_run)
    if len(found) > 1:
        raise _several(name, [Path(recipe).parent.name for recipe in found])
    return found[0]


def recipes_named(name: str, to_run: bool = False) -> list[str]:
    """Return the recipes that a name means: of a study those of its runs, else one.

    A run or a study is named by its folder, its whole id or `latest`: the start of an id may be a misspelt recipe.
    """
    if is_own_folder(name):
        return _recipes_of(find_runs(name), to_run)
    try:
        find_recipe(name)
    except UserError as unknown:
        try:
            runs = find_runs(name)
        except UserError as other:
            if other.problems[0].code not in AMBIGUOUS or any(one.startswith(name) for one in pack_names()):
                raise unknown from None
            raise
        _need_whole_id(name, runs)
        return _recipes_of(runs, to_run)
    return [name]


def _need_whole_id(name: str, runs: Sequence[RunFolder]) -> None:
    """Raise UserError for the start of an id, which may be a misspelt recipe."""
    known = {"latest"}
    for run in runs:
        known |= {run.run_id, run.path.parent.name}
    if not runs or name in known:
        return
    whole = runs[0].path.parent.name
    if len(runs) == 1:
        whole = runs[0].run_id
    fix = f"write the whole id {whole} to mean that"
    raise error("recipe-not-found", "no such recipe", name, fix) from None


def _recipes_of(runs: list[RunFolder], to_run: bool) -> list[str]:
    if not runs:
        raise error("no-runs", "the study has no runs yet", fix="repeat its submit command", exit_code=ANSWER_IS_NO)
    if to_run:
        need_mine(*runs)
    for run in runs:
        if not is_file(run.path / RESOLVED) and run.is_plain_job:
            name = run.manifest().get("name")
            message = f"{run.run_id} was started by sbatch, so its folder has no {RESOLVED}"
            raise error("plain-sbatch", message, str(run.path), f"name the recipe instead, which was '{name}'")
    return [str(run.path / RESOLVED) for run in runs]


def run_named(name: str) -> RunFolder:
    """Return the run that a name means: a run, the only one of a study, or the newest one of a recipe."""
    found = runs_named(name, newest=True)
    if len(found) != 1:
        raise _several(name, [run.run_id for run in found])
    return found[0]


def runs_named(name: str, newest: bool = False) -> list[RunFolder]:
    """Return the runs that a name means: a run, those of a study, or of a recipe all, or the newest with `newest`."""
    recipe = _recipe_name(name)
    if recipe is None:
        return find_runs(name)
    file = Path(name)
    if file.name == RESOLVED and is_file(file.parent / MANIFEST):
        return [find_run(str(file.parent))]
    found = _runs_of_recipe(recipe)
    if not found:
        try:
            return find_runs(name)
        except UserError as other:
            if other.problems[0].code in AMBIGUOUS:
                raise
        raise error("no-run-yet", f"no run of the recipe '{recipe}' yet", name, f"fp8launch submit {name}")
    if newest and len(found) > 1:
        eprint(f"{name}: the newest of its {len(found)} runs, {found[-1].run_id}")
        return found[-1:]
    return found


def study_named(name: str) -> StudyFolder | None:
    """Return the study that a name means, None for another name. A recipe stands for a study that has all its runs."""
    recipe = _recipe_name(name)
    if recipe is None:
        return find_study(name)
    places = {run.path.parent for run in _runs_of_recipe(recipe)}
    if len(places) != 1:
        return None
    place = places.pop()
    if not is_file(place / STUDY):
        return None
    return StudyFolder(place)


def is_own_folder(name: str) -> bool:
    """Return whether a name is the path of a run folder or of a study's."""
    return is_file(Path(name) / MANIFEST) or is_file(Path(name) / STUDY)


def is_recipe_file(name: str) -> bool:
    """Return whether a path is that of a recipe, and not of a log."""
    return name.endswith((".yaml", ".yml"))


def _recipe_name(name: str) -> str | None:
    """The `name` of the recipe that this is; None for another name, first of all those of runs and studies."""
    if name == "latest" or is_own_folder(name) or any(study.study_id == name for study in all_studies()):
        return None
    try:
        if ":" in name:
            return load_recipe(name).recipe.name
        path = find_recipe(name)
        if not is_recipe_file(path.name):
            return None
        stated = read_recipe(name).tree.plain().get("name")
    except UserError:
        return None
    return str(stated or path.stem)


def _runs_of_recipe(recipe: str) -> list[RunFolder]:
    return [run for run in all_runs() if run.manifest().get("name") == recipe]


def _several(name: str, runs: list[str]) -> UserError:
    what, study = f"'{name}'", find_study(name)
    if study:
        what = f"the study {study.study_id}"
    fix = None
    if runs:
        fix = f"name one of its runs: {and_more(runs, 5)}"
    return error("several-runs", f"{what} has {len(runs)} runs, and this command takes one", name, fix)

"""Resolve names on the command line: a run, a study, the folder of either, or a recipe.

If a recipe is expected, a run or study resolves to the recipe of its runs. If runs are expected, a recipe resolves to
its runs. Names mean the same in every working folder: something is a path if it is written as one, or if nothing has
that name. Commands that act on jobs (`cancel`, `resume`) do not guess: they look names up in the registry.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from fp8launch.diagnostics import ANSWER_IS_NO, UserError, error
from fp8launch.injob.ownership import foreign_owner
from fp8launch.recipe.load import find_recipe, load_recipe, pack_names, read_recipe
from fp8launch.recipe.yaml_source import RECIPE_SUFFIXES, is_file
from fp8launch.rundir.registry import (
    all_runs,
    all_studies,
    find_run,
    find_runs,
    find_study,
    is_written_as_path,
    job_ids,
    known_roots,
    need_mine,
)
from fp8launch.rundir.run_dir import MANIFEST, STUDY, RunFolder, run_folders
from fp8launch.rundir.study import StudyFolder
from fp8launch.wording import and_more, counted

RESOLVED = "recipe.yaml"
AMBIGUOUS = ("ambiguous-run", "ambiguous-study")


def _ignore(note: str) -> None:
    pass


def recipe_named(name: str, to_run: bool = False, say: Callable[[str], object] = _ignore) -> str:
    """Return the recipe that a name means, directly or as the recipe of a run or of a study.

    With `to_run`, only this user's runs stand for their recipes. Raises UserError for a study with several recipes.
    """
    found = recipes_named(name, to_run, say)
    if len(found) > 1:
        raise _several(name, [Path(recipe).parent.name for recipe in found])
    return found[0]


def recipes_named(name: str, to_run: bool = False, say: Callable[[str], object] = _ignore) -> list[str]:
    """Return the recipes that a name means: one, or for a study the recipes of its runs.

    A run or a study is named by its folder, its whole id or `latest`. The start of an id may be a misspelt recipe.
    `say` gets a note if the runs of a recipe show which recipe has this name.
    """
    if is_written_as_path(name) and is_own_folder(name):
        return _recipes_of(find_runs(name), to_run)
    try:
        find_recipe(name)
    except UserError as unknown:
        if name not in _ids() and (runs := _runs_of_recipe(name)):
            return [_recipe_behind(name, runs, to_run, say)]
        try:
            runs = find_runs(name)
        except UserError as other:
            if other.problems[0].code not in AMBIGUOUS or any(one.startswith(name) for one in pack_names()):
                raise unknown from None
            raise
        if not is_own_folder(name):
            _need_whole_id(name, runs)
        return _recipes_of(runs, to_run)
    return [name]


def _ids() -> set[str]:
    """Return the ids of all runs and studies, which come before names of recipes where runs are expected."""
    folders = [run.path for root in known_roots() for run in run_folders(root)]
    folders += [study.path for study in all_studies()]
    return {"latest", *(folder.name for folder in folders)}


def has_runs(name: str) -> bool:
    """Return whether this is the whole id of a run, study or job, or the name of a recipe that has runs."""
    if name in _ids() or any(name in job_ids(run) for run in all_runs()):
        return True
    recipe = _recipe_name(name)
    return recipe is not None and bool(_runs_of_recipe(recipe))


def ids_that_begin(name: str) -> list[str]:
    """Return the ids of runs and studies that begin with a text."""
    return sorted(known for known in _ids() - {"latest"} if known.startswith(name))


def _recipe_behind(name: str, runs: Sequence[RunFolder], to_run: bool, say: Callable[[str], object]) -> str:
    """Return the file that runs of a recipe were submitted from, or else the recipe of the newest run.

    Raises UserError if they come from several files, or if a job would repeat a run that the name does not select.
    """
    own = [run for run in runs if run.is_mine]
    files = list(dict.fromkeys(file for run in own if (file := _submitted_file(run, name))))
    if len(files) == 1:
        say(f"{name}: {files[0]}")
        return files[0]
    if files:
        message = f"'{name}' is the name of {len(files)} recipes: {', '.join(files)}"
        raise error("ambiguous-recipe", message, fix="write the path of the recipe that you mean")
    newest, number = (own or runs)[-1], counted(len(runs), "run")
    if to_run:
        message = f"no such recipe here, only {number} of a recipe with this name"
        fix = f"write the path of the recipe; {newest.run_id} would repeat the newest run"
        raise error("recipe-not-found", message, name, fix)
    say(f"{name}: the recipe of the newest of {number}, {newest.run_id}")
    return _recipes_of([newest], to_run)[0]


def _submitted_file(run: RunFolder, name: str) -> str | None:
    """Return the recipe that a run was submitted from, if that file still has this name and is the user's own.

    The recipe of the run itself would include the values that the command line changed.
    """
    stated = run.manifest().get("recipe_files") or [""]
    file = Path(str(stated[-1]))
    if not file.is_absolute() or not is_file(file) or is_file(file.parent / MANIFEST) or foreign_owner(file):
        return None
    return str(file) if _name_in(str(file)) == name else None


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
    fix = f"to name that run or study, write its whole id {whole}"
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


def run_named(name: str, say: Callable[[str], object] = _ignore) -> RunFolder:
    """Return the run that a name means: a run, the only run of a study, or the newest run of a recipe."""
    found = runs_named(name, newest=True, say=say)
    if len(found) != 1:
        raise _several(name, [run.run_id for run in found])
    return found[0]


def runs_named(name: str, newest: bool = False, say: Callable[[str], object] = _ignore) -> list[RunFolder]:
    """Return the runs that a name means: a run, the runs of a study, or the runs of a recipe.

    With `newest` a recipe resolves to its newest run only, and `say` gets a note if it has others.
    """
    file = Path(name)
    if file.name == RESOLVED and is_file(file.parent / MANIFEST):
        return [find_run(str(file.parent.absolute()))]
    recipe = _recipe_name(name)
    if recipe is None:
        found = find_runs(name)
        _say_what_else(name, found, say)
        return found
    found = _runs_of_recipe(recipe)
    if not found:
        try:
            return find_runs(name)
        except UserError as other:
            if other.problems[0].code in AMBIGUOUS:
                raise
        raise error("no-run-yet", f"no run of the recipe '{recipe}' yet", name, f"fp8launch submit {name}")
    if newest and len(found) > 1:
        say(f"{name}: the newest of its {len(found)} runs, {found[-1].run_id}")
        return found[-1:]
    return found


def _say_what_else(name: str, found: Sequence[RunFolder], say: Callable[[str], object]) -> None:
    """Add a note if a recipe with the name of a study has other runs, too."""
    others = [run for run in _runs_of_recipe(name) if run not in found]
    if others:
        say(f"{name}: the study, without {counted(len(others), 'other run')} of the recipe {name}")


def study_named(name: str, say: Callable[[str], object] = _ignore) -> StudyFolder | None:
    """Return the study that a name means, if any. A recipe means the study that has all its runs.

    `say` gets a note if a recipe has the same name and other runs.
    """
    recipe = _recipe_name(name)
    if recipe is None:
        study = find_study(name)
        if study is not None:
            _say_what_else(name, study.runs(), say)
        return study
    places = {run.path.parent for run in _runs_of_recipe(recipe)}
    if len(places) != 1:
        return None
    place = places.pop()
    if not is_file(place / STUDY):
        return None
    return StudyFolder(place)


def is_own_folder(name: str) -> bool:
    """Return whether a name is the path of a run folder or study folder."""
    return is_file(Path(name) / MANIFEST) or is_file(Path(name) / STUDY)


def is_recipe_file(name: str) -> bool:
    """Return whether a path names a recipe, and not a log."""
    return name.endswith(RECIPE_SUFFIXES)


def _recipe_name(name: str) -> str | None:
    """Return the `name` field of the recipe that a name means. None for other names; runs and studies come first."""
    if (is_written_as_path(name) and is_own_folder(name)) or name in _ids():
        return None
    found = _name_in(name)
    if found is None and _runs_of_recipe(name):
        return name
    return found


def _name_in(recipe: str) -> str | None:
    """Return the `name` field of a recipe; None if there is no such recipe or it cannot be read."""
    try:
        if ":" in recipe:
            return load_recipe(recipe).recipe.name
        path = find_recipe(recipe)
        if not is_recipe_file(path.name):
            return None
        stated = read_recipe(recipe).tree.plain().get("name")
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

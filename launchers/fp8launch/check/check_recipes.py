"""Check the recipes named on the command line, and collect the results for `check`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fp8launch.check.checker import CheckResult, check_all, schema_result
from fp8launch.check.extra_layers import Bar, extra_layers, with_extra_layers
from fp8launch.cluster.profile import Cluster
from fp8launch.diagnostics import Problem, UserError, error
from fp8launch.injob.ownership import foreign_owner
from fp8launch.job.prepared import Prepared, prepare
from fp8launch.recipe.load import read_recipe
from fp8launch.recipe.yaml_source import is_folder
from fp8launch.rundir.names import is_own_folder, recipes_named
from fp8launch.rundir.registry import is_written_as_path, run_root
from fp8launch.submit.recipe_kinds import kind_of_recipe, recipe_kind


@dataclass(frozen=True)
class CheckedRecipes:
    """The result of each recipe, and the recipes that could be prepared."""

    results: Mapping[str, CheckResult]
    prepared: Mapping[str, Prepared]

    @property
    def not_run(self) -> dict[str, list[str]]:
        """Layers that did not run, with the reason. Each maps to the error-free recipes that it would have checked."""
        found: dict[str, list[str]] = {}
        for name, result in self.results.items():
            for layer, state in result.layers.items():
                if result.ok and state != "ran":
                    found.setdefault(f"{layer} {state}", []).append(name)
        return found

    def as_json(self) -> dict[str, object]:
        """Return the result of a single recipe. For several, return all problems, and each result in `recipes`."""
        if len(self.results) == 1:
            return next(iter(self.results.values())).as_json()
        each = {name: result.as_json() for name, result in self.results.items()}
        return {
            "ok": all(result.ok for result in self.results.values()),
            "problems": [problem for one in each.values() for problem in one["problems"]],
            "layers": _layers(self.results.values()),
            "silenced": [silenced for one in each.values() for silenced in one["silenced"]],
            "recipes": each,
        }


def check_recipes(
    names: Sequence[str],
    overrides: Sequence[str],
    nodes: int | None,
    cluster: Cluster,
    asked: Mapping[str, bool],
    say: Callable[[str], None],
    bar: Bar,
    progress: Callable[[Sequence[str], str], Iterable[str]] = lambda names, title: names,
) -> CheckedRecipes:
    """Check recipes, including those of folders, runs and studies. `asked` has the plugin layers to run, by option.

    An error in a name or recipe becomes its result. Raises UserError for a folder without recipes.
    """
    refused: dict[str, UserError] = {}
    runs_scripts = any(asked[option] and layer.runs_scripts for option, layer in extra_layers().items())
    files: list[str] = []
    for name in names:
        files += _recipe_files(name, refused, runs_scripts, say)
    files = list(dict.fromkeys(files))
    prepared: dict[str, Prepared] = {}
    between: dict[str, tuple[Problem, ...]] = {}
    for file in progress([file for file in files if file not in refused], "reading recipes"):
        try:
            source = read_recipe(file)
            if kind := kind_of_recipe(source):
                parts = recipe_kind(kind).prepare(source, overrides, cluster, run_root(cluster, None), None).parts
                between |= {f"{file}: {part.name}": part.problems for part in parts}
                prepared |= {f"{file}: {part.name}": part.prepared for part in parts}
            else:
                prepared[file] = prepare(source, overrides, nodes, cluster)
        except UserError as exc:
            refused[file] = exc
    runs = list(prepared.values())
    results = with_extra_layers(runs, check_all(runs, cluster, say=say), cluster, asked, say, bar)
    checked = dict(zip(prepared, results, strict=True))
    for name, problems in between.items():
        checked[name] = replace(checked[name], problems=(*problems, *checked[name].problems))
    checked |= {file: schema_result(refusal) for file, refusal in refused.items()}
    return CheckedRecipes({name: checked[name] for file in files for name in _results_of(file, checked)}, prepared)


def _results_of(file: str, checked: Mapping[str, CheckResult]) -> list[str]:
    """Return the names of a recipe's results: the recipe's name, or the names of the runs in its sequence."""
    return [name for name in checked if name == file or name.startswith(f"{file}: ")]


def _recipe_files(name: str, refused: dict[str, UserError], to_run: bool, say: Callable[[str], None]) -> list[str]:
    """Return the recipes at the top of a folder, the recipes of a run or study, or a single recipe.

    Names without a recipe are added to `refused`. With `to_run`, files of other users are added as well.
    """
    folder = is_folder(Path(name)) and not is_own_folder(name)
    if folder and is_written_as_path(name):
        return _recipes_in(name, refused, to_run)
    try:
        return recipes_named(name, to_run, say)
    except UserError as exc:
        if folder and exc.problems[0].code == "recipe-not-found":
            return _recipes_in(name, refused, to_run)
        refused[name] = exc
        return [name]


def _recipes_in(folder: str, refused: dict[str, UserError], to_run: bool) -> list[str]:
    files = sorted(map(str, Path(folder).glob("*.yaml")))
    if not files:
        raise error("usage", f"no *.yaml in {folder}", folder)
    if to_run:
        refused |= {file: refusal for file in files if (refusal := _foreign(file))}
    return files


def _foreign(file: str) -> UserError | None:
    """Return the error for another user's recipe that was found in a folder, or None if the recipe is safe."""
    try:
        owner = foreign_owner(Path(file))
    except OSError:
        return None  # loading the file will fail as well
    if owner is None:
        return None
    message = f"belongs to {owner}, and a rehearsal runs the script that a recipe names"
    return error("foreign-recipe", message, file, "read it, then name this file instead of its folder")


def _layers(results: Iterable[CheckResult]) -> dict[str, str]:
    """Return the state of each layer: "ran" if it checked every recipe, else the first reason why it did not."""
    layers: dict[str, str] = {}
    for result in results:
        for name, state in result.layers.items():
            if layers.setdefault(name, "ran") == "ran":
                layers[name] = state
    return layers

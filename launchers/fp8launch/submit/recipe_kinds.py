"""Recipes that describe a sequence of runs: kinds of plugins, each marked by a top-level key."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from fp8launch import plugin_registry
from fp8launch.cluster.profile import Cluster
from fp8launch.diagnostics import Problem, UserError, error
from fp8launch.job.prepared import Prepared
from fp8launch.recipe.load import RecipeSource
from fp8launch.rundir.run_dir import RunFolder
from fp8launch.rundir.study import StudyFolder
from fp8launch.schedulers.base import JobState


@dataclass(frozen=True)
class Part:
    """One run of a sequence.

    Messages refer to it by `name`. `problems` lists what is wrong with the results that it takes over from earlier
    runs. Comparisons label it with `values`, such as `{"stage": "anneal"}`.
    """

    name: str
    run_id: str
    prepared: Prepared
    problems: tuple[Problem, ...] = ()
    values: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class RunSequence:
    """The runs of a recipe in order, and the id of the study that holds them."""

    study: str
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class RecipeKind:
    """A kind of recipe that describes a sequence of runs.

    prepare   returns the sequence of a recipe: called with the recipe, overrides, the cluster profile, the run root and
              the requested name of the study. Raises UserError
    resume    continues a sequence that has stopped: called with its study, the number of attempts and a function for
              messages. Returns the run that continues. Raises UserError
    position  returns the run of a sequence that a listing shows, and where it is: called with all runs and their states
    """

    prepare: Callable[[RecipeSource, Sequence[str], Cluster, Path, str | None], RunSequence]
    resume: Callable[[StudyFolder, int, Callable[[str], None]], RunFolder]
    position: Callable[[Sequence[RunFolder], Sequence[JobState]], tuple[RunFolder, str]]


def kind_of_recipe(source: RecipeSource) -> str | None:
    """Return the kind of a recipe; None for an ordinary one. Raises UserError if its plugin is not active."""
    for key, node in source.tree.entries().items():
        if key in plugin_registry.offered("recipe_kinds"):
            return key
        if absent := plugin_registry.absent_error("recipe_kinds", key, f"the recipe key '{key}'", node.where):
            raise absent
    return None


def kind_of_study(study: StudyFolder) -> RecipeKind | None:
    """Return the kind of the recipe behind a study; None for a grid or no study, or if its plugin is not active."""
    try:
        kind = str(study.record().get("kind"))
    except UserError:
        return None
    return recipe_kind(kind) if kind in plugin_registry.offered("recipe_kinds") else None


def recipe_kind(name: str) -> RecipeKind:
    found: RecipeKind = plugin_registry.load(plugin_registry.offered("recipe_kinds")[name])
    return found


def only_kind(sources: Mapping[str, RecipeSource], options: Mapping[str, object]) -> str | None:
    """Return the kind of the recipes of a submission; None for ordinary ones.

    `options` are those that make a grid of runs. Raises UserError if they, or further recipes, are combined with one
    that describes a sequence.
    """
    for name, source in sources.items():
        kind = kind_of_recipe(source)
        if kind is None:
            continue
        given = [option for option, value in options.items() if value]
        if len(sources) > 1:
            raise error(f"{kind}-alone", f"{name} has `{kind}`, so it is submitted alone", name, "name one recipe")
        if given:
            message = f"{given[0]} makes a grid of runs, and {name} has `{kind}`"
            raise error(f"{kind}-grid", message, given[0], f"leave out {given[0]}")
        return kind
    return None


def named(part: str, problems: Iterable[Problem]) -> tuple[Problem, ...]:
    """Return problems whose messages name the part of the sequence."""
    return tuple(replace(problem, message=f"{part}: {problem.message}") for problem in problems)

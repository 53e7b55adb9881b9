"""Load a recipe, translate it to the engine's arguments, and lay it out over its GPUs."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from fp8launch.cluster.storage import data_place
from fp8launch.diagnostics import Problem, UserError, error
from fp8launch.engines import engine_of
from fp8launch.engines.base import Engine, EngineArguments, Layout
from fp8launch.job.job import Job
from fp8launch.recipe.load import LoadedRecipe, RecipeSource, load_recipe
from fp8launch.recipe.phases import PhaseRecipe, merge_phase_problems, phase_recipes
from fp8launch.recipe.quoted_speed import as_quoted
from fp8launch.recipe.stored_data import has_relative_data, with_data_below
from fp8launch.recipe.write_yaml import write_yaml

if TYPE_CHECKING:
    from fp8launch.cluster.profile import Cluster


@dataclass(frozen=True)
class Phase(PhaseRecipe):
    """A phase of a training, translated and laid out."""

    args: EngineArguments
    layout: Layout

    @property
    def span(self) -> str:
        """The range of iterations as shown to users, such as `101-900`."""
        return f"{self.begin + 1}-{self.end}"


@dataclass(frozen=True)
class Prepared:
    """A recipe that is ready to be planned: loaded, translated, and divisible over its GPUs.

    If the recipe has phases, `args` and `layout` belong to the first one.
    """

    loaded: LoadedRecipe
    args: EngineArguments
    layout: Layout
    phases: tuple[Phase, ...] = ()

    @property
    def engine(self) -> Engine:
        """The engine that trains the recipe."""
        return engine_of(self.loaded)

    @property
    def parts(self) -> tuple[Prepared, ...]:
        """The parts that are checked and estimated separately: each phase, or the whole run."""
        return tuple(Prepared(one.loaded, one.args, one.layout) for one in self.phases) or (self,)

    @property
    def jobs_at_most(self) -> int:
        """The maximum number of jobs with a full time limit: one per attempt, and one per phase after the first."""
        return self.loaded.recipe.survive.attempts + len(self.parts) - 1

    @property
    def gpu_hours_at_most(self) -> float:
        """GPU-hours if every attempt uses its whole time limit. Attempts that do not count are not included."""
        return self.loaded.recipe.resources.gpu_hours * self.jobs_at_most


def prepare(
    recipe: str | RecipeSource,
    overrides: Sequence[str] = (),
    nodes: int | None = None,
    cluster: Cluster | None = None,
) -> Prepared:
    """Load and translate a recipe, optionally for another number of nodes. Raises UserError with all problems.

    If `cluster` is given, relative data paths are resolved against its `storage.data`.
    """
    return prepare_loaded(load_recipe(recipe, overrides, nodes), cluster)


def prepare_loaded(loaded: LoadedRecipe, cluster: Cluster | None = None) -> Prepared:
    """Translate a loaded recipe as `prepare` does. Raises UserError with all problems."""
    if cluster is not None and has_relative_data(loaded):
        place = data_place(cluster)
        if place is not None:
            loaded = with_data_below(loaded, place)
    phases = _phases_of(loaded)
    if phases:
        return Prepared(loaded, phases[0].args, phases[0].layout, phases)
    engine = engine_of(loaded)
    args = engine.translate(loaded)
    return Prepared(loaded, args, engine.layout(args, loaded))


def _phases_of(loaded: LoadedRecipe) -> tuple[Phase, ...]:
    """Return the phases of a recipe in order, if it has any. Raises UserError with the problems of all phases."""
    found: list[Phase] = []
    problems: list[tuple[str, Sequence[Problem]]] = []
    code = 0
    recipes = phase_recipes(loaded)
    engine = engine_of(loaded)
    for one in recipes:
        try:
            args = engine.translate(one.loaded)
            found.append(Phase(**vars(one), args=args, layout=engine.layout(args, one.loaded)))
        except UserError as exc:
            problems.append((one.name, exc.problems))
            code = max(code, exc.exit_code)
    if problems:
        raise UserError(merge_phase_problems(problems, len(recipes)), code)
    return tuple(found)


def resolved_yaml(prepared: Prepared) -> str:
    """Return the recipe, merged with everything it extends, as YAML."""
    return write_yaml(resolved_recipe(prepared))


def recipe_digest(prepared: Prepared) -> str:
    """Return the SHA-256 of the resolved recipe's text, in hex."""
    return hashlib.sha256(resolved_yaml(prepared).encode()).hexdigest()


def resolved_recipe(prepared: Prepared) -> dict[str, Any]:
    """Return the recipe, merged with everything it extends, with name and description first.

    Without a published speed that belongs to other settings.
    """
    plain: dict[str, Any] = prepared.loaded.tree.plain()
    # A run is a single point. Resubmitting its recipe must not start the whole study again.
    left_out = {"axes", "nodes"}
    if "reference" in plain and not as_quoted(prepared.loaded):
        left_out.add("reference")
    order = dict.fromkeys(("name", "description", *plain))
    return {key: plain[key] for key in order if key in plain and key not in left_out}


def engine_record(prepared: Prepared, job: Job) -> dict[str, Any]:
    """Return the engine's entry in manifests: its name, its training loop, and the format of its logs."""
    record = {"name": prepared.engine.name, "entry": job.entry.title, **asdict(prepared.engine.description)}
    if bridge := prepared.engine.bridge_release(prepared.args):
        record["bridge_release"] = bridge
    return record


def phase_entry(one: Phase) -> dict[str, Any]:
    """Return a phase's complete entry in manifests."""
    return {
        "name": one.name,
        "begin": one.begin,
        "end": one.end,
        "environment": one.loaded.recipe.environment,
        "argv": list(one.args.argv),
        "arguments": one.args.recorded,
        "layout": asdict(one.layout),
    }


def phase_of(prepared: Prepared, name: str) -> Prepared:
    """Return one phase of a recipe. Raises UserError for an unknown name."""
    names = [phase.name for phase in prepared.phases]
    if name not in names:
        fix = f"phases: {', '.join(names)}" if names else "the recipe has no phases"
        raise error("no-phase", f"'{name}' is not a phase of this recipe", "--phase", fix)
    return prepared.parts[names.index(name)]

"""A recipe that is ready to be planned: loaded, translated, and divided over its GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fp8launch.engines import engine_of
from fp8launch.engines.base import Engine, EngineArguments, Layout
from fp8launch.job.phases import Phase, phases_of
from fp8launch.recipe.load import LoadedRecipe, RecipeSource, load_recipe
from fp8launch.recipe.stored_data import has_relative_data, with_data_below

if TYPE_CHECKING:
    from fp8launch.cluster.profile import Cluster


@dataclass(frozen=True)
class Prepared:
    """A recipe that is ready to be planned: loaded, translated, and found to divide.

    Of a recipe with phases, arguments and layout are those of the first.
    """

    loaded: LoadedRecipe
    args: EngineArguments
    layout: Layout
    phases: tuple[Phase, ...] = ()

    @property
    def engine(self) -> Engine:
        """The engine that trains it."""
        return engine_of(self.loaded)

    @property
    def parts(self) -> tuple[Prepared, ...]:
        """The parts that are checked and estimated separately: each phase, or the whole run."""
        return tuple(Prepared(one.loaded, one.args, one.layout) for one in self.phases) or (self,)

    @property
    def jobs_at_most(self) -> int:
        """Time limits that the run may use: its attempts, and one more for each phase after the first."""
        return self.loaded.recipe.survive.attempts + len(self.parts) - 1

    @property
    def gpu_hours_at_most(self) -> float:
        """GPU-hours if every attempt uses its whole time limit; attempts that the limit does not count are left out."""
        return self.loaded.recipe.resources.gpu_hours * self.jobs_at_most


def prepare(
    recipe: str | RecipeSource,
    overrides: Sequence[str] = (),
    nodes: int | None = None,
    cluster: Cluster | None = None,
) -> Prepared:
    """Load and translate a recipe, for another number of nodes if given. Raises UserError with every problem.

    With a `cluster`, data paths that are not absolute are below its `storage.data`.
    """
    return prepare_loaded(load_recipe(recipe, overrides, nodes), cluster)


def prepare_loaded(loaded: LoadedRecipe, cluster: Cluster | None = None) -> Prepared:
    """Translate a loaded recipe, as `prepare` does. Raises UserError with every problem."""
    if cluster is not None and has_relative_data(loaded):
        from fp8launch.cluster.storage import data_place

        place = data_place(cluster)
        if place is not None:
            loaded = with_data_below(loaded, place)
    phases = phases_of(loaded)
    if phases:
        return Prepared(loaded, phases[0].args, phases[0].layout, phases)
    engine = engine_of(loaded)
    args = engine.translate(loaded)
    return Prepared(loaded, args, engine.layout(args, loaded))

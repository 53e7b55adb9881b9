"""Does a published speed belong to a run?"""

from __future__ import annotations

from fp8launch.diagnostics import UserError
from fp8launch.recipe.load import LoadedRecipe, load_recipe
from fp8launch.recipe.schema import Recipe


def as_quoted(loaded: LoadedRecipe) -> bool:
    """Return whether a run has the settings of the recipe whose published speed it quotes, except for size and length.

    Overrides, phases and recipes that extend the quoting one inherit its `reference`.
    """
    try:
        quoting = load_recipe(loaded.where("reference").rpartition(":")[0]).recipe
    except UserError:
        return True  # an override quotes the figure, or a file that is no recipe on its own
    return _decisive(loaded.recipe) == _decisive(quoting)


def _decisive(recipe: Recipe) -> tuple[object, ...]:
    """Return the settings that decide the speed of a GPU. Weak scaling keeps the sequences for each GPU."""
    batch, resources = recipe.batch, recipe.resources
    sections = (recipe.engine, recipe.model, recipe.precision, recipe.parallel, recipe.optimizer, recipe.megatron)
    return (*sections, batch.micro, batch.sequence, (batch.global_ or 0) / resources.world_size, resources.gpu)

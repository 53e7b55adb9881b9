"""The phases of a recipe, each with the complete argument list of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fp8launch.diagnostics import Problem, UserError
from fp8launch.engines import engine_of
from fp8launch.engines.base import EngineArguments, Layout
from fp8launch.recipe.load import LoadedRecipe
from fp8launch.recipe.phases import phase_recipes, told_by_phase


@dataclass(frozen=True)
class Phase:
    """Iterations `begin` + 1 to `end` of a training, and what holds for them."""

    name: str
    begin: int
    end: int
    loaded: LoadedRecipe
    args: EngineArguments
    layout: Layout

    @property
    def span(self) -> str:
        """`101-900`, as it is shown everywhere."""
        return f"{self.begin + 1}-{self.end}"


def phases_of(loaded: LoadedRecipe) -> tuple[Phase, ...]:
    """The phases of a recipe in order, empty where it has none. Raises UserError with the problems of all."""
    found: list[Phase] = []
    problems: list[tuple[str, Sequence[Problem]]] = []
    code = 0
    recipes = phase_recipes(loaded)
    engine = engine_of(loaded)
    for one in recipes:
        try:
            args = engine.translate(one.loaded)
            found.append(Phase(one.name, one.begin, one.end, one.loaded, args, engine.layout(args, one.loaded)))
        except UserError as exc:
            problems.append((one.name, exc.problems))
            code = max(code, exc.exit_code)
    if problems:
        raise UserError(told_by_phase(problems, len(recipes)), code)
    return tuple(found)

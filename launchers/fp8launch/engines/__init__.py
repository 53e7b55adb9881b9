"""Training engines, which define what runs in a job. `engine_of` returns the engine of a recipe."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from fp8launch import plugin_registry
from fp8launch.diagnostics import Problem, UserError, did_you_mean, error
from fp8launch.engines.base import Engine
from fp8launch.recipe.load import LoadedRecipe
from fp8launch.recipe.schema import Recipe


def names() -> tuple[str, ...]:
    """Return the values that `engine` of a recipe accepts."""
    return tuple(plugin_registry.offered("engines"))


def by_name(name: str) -> Engine:
    """Return the engine of that name, one of `names()`. Raises UserError if its plugin is broken."""
    return _made(plugin_registry.load(plugin_registry.offered("engines")[name]))


def default() -> Engine:
    """Return the engine of recipes that state neither an engine nor an engine's key: Megatron-LM's command line."""
    return by_name(names()[0])


def engine_of(loaded: LoadedRecipe) -> Engine:
    """Return the engine of a recipe. Raises UserError for an unknown engine and for settings that it cannot use."""
    engine = _stated_or_meant(loaded)
    problems = [*_foreign_keys(engine, loaded), *_missing_evidence(engine, loaded), *engine.problems(loaded)]
    if problems:
        raise UserError(problems)
    return engine


@functools.cache
def _made(engine: type[Engine]) -> Engine:
    return engine()


def all_engines() -> Iterator[Engine]:
    """Yield every engine whose plugin is not broken."""
    for _, engine in plugin_registry.loaded("engines"):
        yield _made(engine)


def _stated_or_meant(loaded: LoadedRecipe) -> Engine:
    """Return the recipe's `engine`. Without one, its keys determine the engine; the first is the default."""
    stated = loaded.recipe.engine
    if stated is None:
        for engine in all_engines():
            if any(_states(loaded.recipe, key) for key in engine.own_keys):
                return engine
        return default()
    if stated not in names():
        where = loaded.where("engine")
        if absent := plugin_registry.absent_error("engines", stated, f"the engine '{stated}'", where):
            raise absent
        fix = did_you_mean(stated, names(), f"use one of {', '.join(names())}")
        raise error("unknown-engine", f"there is no engine '{stated}'", where, fix)
    return by_name(stated)


def _foreign_keys(engine: Engine, loaded: LoadedRecipe) -> Iterator[Problem]:
    for other in all_engines():
        for key in other.own_keys:
            if key not in engine.own_keys and _states(loaded.recipe, key):
                message = f"`{key}` needs `engine: {other.name}`, but the engine is {engine.name}"
                where = loaded.where(*key.split("."))
                yield Problem("error", "key-of-other-engine", message, where, "remove one of them")


def _missing_evidence(engine: Engine, loaded: LoadedRecipe) -> Iterator[Problem]:
    """Return problems of requested measurements whose plugin is absent or that the engine's processes do not print."""
    for key in plugin_registry.absent("measurements"):
        where = loaded.where(*key.split("."))
        absent = plugin_registry.absent_error("measurements", key, f"`{key}`", where)
        if absent is not None and _states(loaded.recipe, key):
            yield from absent.problems
    for key, offer in plugin_registry.offered("measurements").items():
        if _states(loaded.recipe, key) and offer.value not in engine.description.evidence:
            message = f"`{key}` requests a {offer.value}, which the engine {engine.name} does not print"
            yield Problem("error", "no-such-evidence", message, loaded.where(*key.split(".")), "remove it")


def _states(recipe: Recipe, key: str) -> bool:
    """Return whether a recipe states a value for a key such as `launch.script`."""
    value: object = recipe
    for name in key.split("."):
        value = getattr(value, name)
    return bool(value)

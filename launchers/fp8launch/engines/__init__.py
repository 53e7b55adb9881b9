"""Training engines: what runs in the job. `engine_of` gives the engine that a recipe is for."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping

from fp8launch import plugin_registry
from fp8launch.diagnostics import Problem, UserError, did_you_mean, error
from fp8launch.engines.base import Engine, EvidenceSource
from fp8launch.recipe.load import LoadedRecipe
from fp8launch.recipe.schema import Recipe

# Recipe keys that ask for a measurement, and the evidence that it leaves.
_MEASUREMENTS: Mapping[str, EvidenceSource] = {
    "launch.profile_iteration": "kernel profile",
    "launch.tensor_stats": "tensor statistics",
}


def names() -> tuple[str, ...]:
    """Return the names that a recipe's `engine` takes."""
    return tuple(plugin_registry.offered("engines"))


def by_name(name: str) -> Engine:
    """Return the engine of that name, one of `names()`. Raises UserError if its plugin is broken."""
    return _made(plugin_registry.load(plugin_registry.offered("engines")[name]))


def default() -> Engine:
    """Return the engine of recipes that state neither an engine nor a key of one: Megatron-LM's command line."""
    return by_name(names()[0])


def engine_of(loaded: LoadedRecipe) -> Engine:
    """Return the engine that a recipe is for. Raises UserError for an unknown one, or for what it cannot use."""
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
    """The engine that the recipe states, else the one that a key of its own means, else the first."""
    stated = loaded.recipe.engine
    if stated is None:
        for engine in all_engines():
            if any(_states(loaded.recipe, key) for key in engine.own_keys):
                return engine
        return default()
    if stated not in names():
        if plugin := plugin_registry.absent_plugin("engines", stated):
            fix = f"add {plugin} to {plugin_registry.SELECTION}, or unset it"
            message = f"the engine '{stated}' needs the plugin {plugin}, which is not active"
            raise error("absent-plugin", message, loaded.where("engine"), fix)
        fix = did_you_mean(stated, names(), f"use one of {', '.join(names())}")
        raise error("unknown-engine", f"there is no engine '{stated}'", loaded.where("engine"), fix)
    return by_name(stated)


def _foreign_keys(engine: Engine, loaded: LoadedRecipe) -> Iterator[Problem]:
    for other in all_engines():
        for key in other.own_keys:
            if key not in engine.own_keys and _states(loaded.recipe, key):
                message = f"`{key}` needs `engine: {other.name}`, but the engine is {engine.name}"
                where = loaded.where(*key.split("."))
                yield Problem("error", "key-of-other-engine", message, where, "remove one of them")


def _missing_evidence(engine: Engine, loaded: LoadedRecipe) -> Iterator[Problem]:
    """Measurements that the recipe asks for and the engine's processes do not print."""
    for key, source in _MEASUREMENTS.items():
        if _states(loaded.recipe, key) and source not in engine.description.evidence:
            message = f"`{key}` asks for a {source}, which the engine {engine.name} does not print"
            yield Problem("error", "no-such-evidence", message, loaded.where(*key.split(".")), "remove it")


def _states(recipe: Recipe, key: str) -> bool:
    """Whether a recipe gives a key, such as `launch.script`, a value."""
    value: object = recipe
    for name in key.split("."):
        value = getattr(value, name)
    return bool(value)

"""The Bridge fields that a run sets in addition to its Bridge recipe, and the line that each comes from."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fp8launch.diagnostics import Problem, UserError, nearest
from fp8launch.plugins.bridge.fields import (
    OWN_KEYS,
    PIPELINE_LAYERS,
    SECTIONS,
    are_stages,
    blend_prefixes,
    fields_of,
    flat,
    refused_value,
)
from fp8launch.plugins.bridge.index import BridgeRecipe
from fp8launch.plugins.bridge.section import bridge_of
from fp8launch.recipe.load import LoadedRecipe
from fp8launch.untyped import as_int

_BATCH = "train.global_batch_size"
_VIRTUAL = "model.virtual_pipeline_model_parallel_size"
_AXES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")


@dataclass(frozen=True)
class Setting:
    """A value for a field, and `file:line` of it."""

    value: Any
    where: str


def settings(loaded: LoadedRecipe, recipe: BridgeRecipe) -> dict[str, Setting]:
    """Return the fields that the run sets. Raises UserError for unknown sections and values that contradict."""
    found = dict(_own(loaded))
    problems: list[Problem] = []
    for field, path, value in flat(bridge_of(loaded.recipe).overrides):
        where = loaded.where("bridge", "overrides", *path)
        problems += _not_of_bridge(field, value, recipe, where)
        before = found.get(field)
        if before is not None and before.value != value:
            key = ".".join(OWN_KEYS[field])
            message = f"'{field}: {value}' contradicts '{key}: {before.value}' at {before.where}"
            problems.append(Problem("error", "flag-set-twice", message, where, f"keep {key}, and drop the other"))
        found[field] = Setting(value, where)
    if problems:
        raise UserError(dict.fromkeys(problems))
    # Bridge's runner scales the batch of performance recipes only.
    scales = not recipe.library or loaded.tree.at(("batch", "scaling")) is not None
    if scales and _BATCH not in found and loaded.recipe.batch.scaling == "weak":
        scaled = _scaled_batch(found, loaded, recipe)
        if scaled.value != recipe.global_batch:
            found[_BATCH] = scaled
    return found


def size(field: str, found: dict[str, Setting], recipe: BridgeRecipe) -> int:
    """Return the size of an axis of parallelism in a run."""
    value: Any = None
    if field in found:
        value = found[field].value
    elif field in OWN_KEYS and OWN_KEYS[field][0] == "parallel":
        value = recipe.layout.get(OWN_KEYS[field][1])
    return max(as_int(value) or 1, 1)


def _own(loaded: LoadedRecipe) -> Iterator[tuple[str, Setting]]:
    """Yield the fields that the recipe sets by its own keys."""
    for field, (section, key) in OWN_KEYS.items():
        value = getattr(loaded.recipe, section).field(key)
        # Without virtual stages, where the recipe of Bridge has some.
        taken_away = field == _VIRTUAL and value is None and loaded.tree.at((section, key)) is not None
        if taken_away or (value is not None and value != "auto"):
            yield field, Setting(value, loaded.where(section, key))


def _not_of_bridge(field: str, value: Any, recipe: BridgeRecipe, where: str) -> Iterator[Problem]:
    """Fields that the release does not have, and values that such a field does not take."""
    release = recipe.release
    section, _, name = field.lstrip("+~").partition(".")
    name, _, below = name.partition(".")
    known = fields_of(release).get(section, {})
    if section not in SECTIONS or not name:
        near = nearest(section, SECTIONS)
        fix = f"sections: {', '.join(SECTIONS)}"
        if section in SECTIONS:
            fix = f"write {section}.FIELD=VALUE for each field"
        elif near:
            fix = f"did you mean '{near}'?"
        message = f"'{field}' is not SECTION.FIELD of Bridge's configuration"
        yield Problem("error", "unknown-bridge-field", message, where, fix)
        return
    stated = recipe.settings if section == "model" else recipe.sections.get(section, {})
    if field.startswith("~") or (name not in known and name in stated):
        return
    # What Hydra adds (+) may be a key of a mapping.
    if known and name not in known and not field.startswith("+"):
        near, fix = nearest(name, known), f"see `{section}` in megatron/bridge/training/config.py"
        if near:
            fix = f"did you mean '{section}.{near}'?"
        message = f"'{section}' of Megatron-Bridge {release} has no field '{name}'"
        yield Problem("error", "unknown-bridge-field", message, where, fix)
        return
    taken = refused_value(known.get(name, ""), {below: value} if below else value)
    if taken is None and field == "dataset.blend" and value is not None and not blend_prefixes(value):
        taken = "[[PATH, ...], null] or [[PATH, ...], [WEIGHT, ...]], one positive weight per path"
    if field == "model.pipeline_model_parallel_layout" and isinstance(value, list) and not are_stages(value):
        taken = f"a text, or a list for each stage of words from {', '.join(PIPELINE_LAYERS)}"
    if taken is not None:
        shown = f"a field '{below}'" if below else json.dumps(value)
        message = f"'{section}.{name}' of Megatron-Bridge {release} takes {taken}, not {shown}"
        yield Problem("error", "bridge-value", message, where, f"write {section}.{name}=VALUE, or remove it")


def _scaled_batch(found: dict[str, Setting], loaded: LoadedRecipe, recipe: BridgeRecipe) -> Setting:
    """The global batch on another number of replicas, as Bridge's own runner scales it.

    0.6.0 keeps the samples per replica (`_apply_benchmark_weak_scaling` of scripts/training/run_recipe.py). Releases up
    to 0.5, whose recipes have arguments, keep the samples per GPU in any layout (`set_post_overrides` of
    scripts/performance/utils/overrides.py).
    """
    world = loaded.recipe.resources.world_size
    before = after = 1
    for axis in () if recipe.arguments else _AXES:
        before *= size(f"model.{axis}", {}, recipe)
        after *= size(f"model.{axis}", found, recipe)
    where = loaded.where("resources")
    if world % after or recipe.gpus % before:
        return Setting(recipe.global_batch, where)  # the layout does not divide, which is reported as such
    samples = recipe.global_batch * (world // after)
    replicas = recipe.gpus // before
    if samples % replicas:
        unit = "GPUs" if recipe.arguments else "replicas"
        message = (
            f"global batch {recipe.global_batch} of {replicas} {unit} does not scale to a whole number on "
            f"{world // after}"
        )
        raise UserError([Problem("error", "batch-size", message, where, "set batch.global")])
    return Setting(samples // replicas, where)

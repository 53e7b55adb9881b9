"""Turn values of Megatron's flags into the sections of a recipe: the inverse of translation.

Sections are proposed from the values, and kept only if translation turns them back into the same arguments. The other
flags go under `model:` and `megatron:` by their own names. Only translation knows the meaning of a section, so an
import can never change what runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import ValidationError

from fp8launch import engines
from fp8launch.hardware.quantization import UNQUANTIZED, precision_names
from fp8launch.megatron.arguments import FlagValue
from fp8launch.megatron.flag_map import CHOICES, FIELDS, MODEL_FLAGS
from fp8launch.megatron.schema import FlagSchema
from fp8launch.recipe.schema import Recipe, recipe_class
from fp8launch.recipe.sections import Data, Optimizer, Parallel, Precision, Resources, Section

Tree = dict[str, Any]
Values = dict[str, FlagValue]


def recipe_from_values(values: Values, schema: FlagSchema, **sections: object) -> Tree:
    """Return a recipe that gives the same arguments as `values`.

    `sections` holds what an argument list cannot express, such as `env` and `resources`; it is kept unchanged.
    """
    recipe = _confirmed(_proposal(values, schema), values, schema)
    settings = engines.default().settings(_valid({"name": "import", **recipe}))
    covered = {flag for flag, value, _ in settings if value is not None}
    for flag, value in values.items():
        if flag not in covered:
            recipe.setdefault("megatron", {})[flag] = value
    return {key: _in_order(key, section) for key, section in {**recipe, **sections}.items() if section}


# --- sections


def _proposal(values: Values, schema: FlagSchema) -> Tree:
    """Return every section that the arguments might mean. `_confirmed` removes wrong and redundant proposals."""
    recipe: Tree = {}
    for path, value in _proposed(values, schema):
        section = recipe
        for step in path[:-1]:
            section = section.setdefault(step, {})
        section[path[-1]] = value
    return recipe


def _proposed(values: Values, schema: FlagSchema) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield from _model(values)
    yield from _precision(values, schema)
    for path, fields in FIELDS.items():
        for field, flag in fields.items():
            # A `vp` of 1 sets no flag.
            if flag in values and path != ("precision",) and (field, values[flag]) != ("vp", 1):
                yield (*path, field), values[flag]
    if values.get("sequence_parallel"):
        yield ("parallel", "sequence"), True
    yield from _choices(values, schema)
    if values.get("mock_data"):
        yield ("data", "kind"), "mock"
    elif isinstance(path_words := values.get("data_path"), list):
        yield ("data", "kind"), "indexed"
        yield ("data", "blend"), [_weight(str(word)) for word in path_words]


def _model(values: Values) -> Iterator[tuple[tuple[str, ...], Any]]:
    length = values.get("seq_length")
    for flag, value in values.items():
        if flag in MODEL_FLAGS and (flag, value) != ("max_position_embeddings", length):
            yield ("model", flag), value
    if length is not None and "max_position_embeddings" not in values:
        # A stated null keeps translation from deriving it.
        yield ("model", "max_position_embeddings"), None


def _choices(values: Values, schema: FlagSchema) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Return the named choices whose flags all have the values that the choice sets."""
    for path, choices in CHOICES.items():
        for choice, flags in choices.items():
            first = next(iter(flags))
            if first in values and all(effective(values, flag, schema) == value for flag, value in flags.items()):
                yield path, choice


def _precision(values: Values, schema: FlagSchema) -> Iterator[tuple[tuple[str, ...], Any]]:
    fp8, fp4 = values.get("fp8_format"), values.get("fp4_format")
    recipe = _precision_recipe(values)
    wide = "fp16" if recipe == "fp16" else "bf16"
    if not values.get(wide) or (fp8 and fp4) or recipe not in precision_names():
        return
    yield ("precision", "recipe"), recipe
    if recipe == "fp16" and "loss_scale" in values:
        yield ("precision", "loss_scale"), values["loss_scale"]
    if recipe in UNQUANTIZED:
        return
    yield ("precision", "format"), fp8 or fp4
    gather = "fp4_param_gather" if fp4 else "fp8_param_gather"
    if values.get(gather):
        yield ("precision", "param_gather"), True
    if values.get("first_last_layers_bf16"):
        for end in ("start", "end"):
            yield ("precision", "bf16_layers", end), effective(values, f"num_layers_at_{end}_in_bf16", schema)
    if recipe == "delayed":
        for field, flag in FIELDS[("precision",)].items():
            if flag in values and field != "loss_scale":
                yield ("precision", field), values[flag]


def _precision_recipe(values: Values) -> Any:
    if values.get("fp8_format"):
        return values.get("fp8_recipe")
    if values.get("fp4_format"):
        return values.get("fp4_recipe")
    if values.get("fp16"):
        return "fp16"
    return "bf16"


def _weight(word: str) -> str | int | float:
    """Return the weight of a data blend as a number, if the number is written the same way."""
    for kind in (int, float):
        try:
            if str(kind(word)) == word:
                return kind(word)
        except ValueError:
            continue
    return word


def effective(values: Values, flag: str, schema: FlagSchema) -> object:
    """Return the value that Megatron sees: a section may state a default that the arguments omit."""
    found = schema.find(flag)
    if flag in values or found is None:
        return values.get(flag)
    return found.default


# --- compared with translation


def _confirmed(recipe: Tree, values: Values, schema: FlagSchema) -> Tree:
    """Return the valid part of a proposal that translation turns back into the arguments."""
    while True:
        wrong = next(_refused(recipe), None) or next(_contradicted(recipe, values, schema), None)
        if wrong is None:
            return recipe
        recipe = _without(recipe, wrong)


def _valid(recipe: Tree) -> Recipe:
    return recipe_class().model_validate(recipe)


def _refused(recipe: Tree) -> Iterator[tuple[str, ...]]:
    """Return the paths that the recipe format does not allow."""
    try:
        _valid({"name": "import", **recipe})
    except ValidationError as exc:
        for err in exc.errors(include_url=False):
            path: tuple[str, ...] = ()
            for step in map(str, err["loc"]):
                inner = _at(recipe, path)
                if not isinstance(inner, dict) or step not in inner:
                    break
                path = (*path, step)
            yield path


def _contradicted(recipe: Tree, values: Values, schema: FlagSchema) -> Iterator[tuple[str, ...]]:
    """Return the paths that would change an argument of the run."""
    for flag, value, path in engines.default().settings(_valid({"name": "import", **recipe})):
        if value is not None and path[0] != "model" and effective(values, flag, schema) != value:
            yield path


def _at(recipe: Any, path: Sequence[str]) -> Any:
    for step in path:
        recipe = recipe[step]
    return recipe


def _without(recipe: Tree, path: Sequence[str]) -> Tree:
    """Return `recipe` without the value at `path` and without sections that this leaves empty."""
    first, rest = path[0], path[1:]
    inner = recipe[first]
    if rest and isinstance(inner, dict) and rest[0] in inner:
        smaller = _without(inner, rest)
        if smaller:
            return {**recipe, first: smaller}
    return {key: value for key, value in recipe.items() if key != first}


def _in_order(name: str, section: Any) -> Any:
    """Return a section with its fields in the order of the recipe format."""
    models: dict[str, type[Section]] = {
        "precision": Precision,
        "parallel": Parallel,
        "optimizer": Optimizer,
        "data": Data,
        "resources": Resources,
    }
    if name not in models:
        return section
    fields = list(models[name].model_fields)
    return {key: section[key] for key in sorted(section, key=fields.index)}

"""A recipe to the exact argument list of one Megatron-Core version.

Each section turns into the flags that it states; `megatron:` adds any other flag by its own name. The same flag from
two places is an error unless both say the same.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from fp8launch.cluster.images import software_in
from fp8launch.diagnostics import ANSWER_IS_NO, Problem, UserError
from fp8launch.engines.base import EngineArguments, Setting
from fp8launch.hardware.quantization import DEFAULT_RECIPE, QUANTIZATION
from fp8launch.megatron.argv import as_parsed, attributes, emit_arguments
from fp8launch.megatron.flag_map import CHOICES, FIELDS
from fp8launch.megatron.flag_problems import check_values
from fp8launch.megatron.schema import FlagSchema, load_schema
from fp8launch.megatron.versions import DEFAULT
from fp8launch.recipe.field_types import FlagValue
from fp8launch.recipe.load import LoadedRecipe
from fp8launch.recipe.schema import Data, Parallel, Precision, Recipe, Section

Where = tuple[str, ...]


def translate(loaded: LoadedRecipe) -> EngineArguments:
    """The arguments that `loaded` means. Raises UserError with every problem that the flag schema shows."""
    recipe = loaded.recipe
    version = _megatron_version(recipe)
    schema = load_schema(version, recipe.launch.script)
    values, places, problems = _collect(flag_settings(recipe), loaded, schema)
    problems += check_values(values, schema, lambda flag: places.get(_canonical(flag, schema)))
    problems += _pairs(values, places)
    problems += _fp8_on_cpu(recipe, values, places)
    if problems:
        raise UserError(problems, ANSWER_IS_NO)
    stored = attributes(as_parsed(values, schema), schema)
    exact = version if version.count(".") > 1 else schema.version
    return EngineArguments(
        version=exact,
        values=values,
        arguments=emit_arguments(values, schema),
        attributes=stored,
        places=places,
        attribute_places={flag.dest: place for name, place in places.items() if (flag := schema.find(name))},
    )


@functools.cache
def defaults(version: str) -> Mapping[str, Any]:
    """The defaults of a Megatron release's parser, by attribute name."""
    return {flag.dest: flag.default for flag in load_schema(version).flags()}


def _megatron_version(recipe: Recipe) -> str:
    """The recipe's, else the image's, else the default; of a minor version that the image has, the image's release."""
    stated, in_image = recipe.software.megatron, software_in(recipe.container.image).get("megatron")
    if stated is None:
        return in_image or DEFAULT
    of_this_minor = in_image is not None and in_image.split(".")[:2] == stated.removeprefix("v").split(".")
    return in_image if in_image is not None and of_this_minor else stated


def flag_settings(recipe: Recipe) -> Iterator[Setting]:
    """Every flag that the recipe states: its name, its value and the path that states it."""
    for flag, value in recipe.model.items():
        yield flag, value, ("model", flag)
    yield from _fields(recipe.batch, "batch")
    if "max_position_embeddings" not in recipe.model:
        yield "max_position_embeddings", recipe.batch.sequence, ("batch", "sequence")
    yield from _fields(recipe.train, "train")
    if recipe.precision is not None:
        yield from _precision(recipe.precision)
    yield from _parallel(recipe.parallel, recipe)
    yield from _optimizer(recipe)
    if recipe.data is not None:
        yield from _data(recipe.data)
    yield from _fields(recipe.checkpoint, "checkpoint")
    for flag, value in recipe.megatron.items():
        yield flag, value, ("megatron", flag)


def _fields(section: Section, *path: str) -> Iterator[Setting]:
    """The fields of a section that set one flag each."""
    for field, flag in FIELDS[path].items():
        yield flag, getattr(section, "global_" if field == "global" else field), (*path, field)


def _choice(value: str | None, *path: str) -> Iterator[Setting]:
    """The flags that a field's named choice sets."""
    for flag, setting in CHOICES[path].get(value or "", {}).items():
        yield flag, setting, path


def _precision(precision: Precision) -> Iterator[Setting]:
    stated = ("precision", "recipe")
    yield "bf16", True, stated
    quantization = QUANTIZATION.get(precision.recipe)
    if quantization is not None:
        yield quantization.format_flag, precision.format, ("precision", "format")
        yield quantization.recipe_flag, quantization.name, stated
        if precision.param_gather:
            for flag in (quantization.gather_flag, *quantization.gather_flags):
                yield flag, True, ("precision", "param_gather")
    if precision.bf16_layers is not None:
        here = ("precision", "bf16_layers")
        yield "first_last_layers_bf16", True, here
        yield "num_layers_at_start_in_bf16", precision.bf16_layers.start, here
        yield "num_layers_at_end_in_bf16", precision.bf16_layers.end, here
    yield from _fields(precision, "precision")


def _parallel(parallel: Parallel, recipe: Recipe) -> Iterator[Setting]:
    yield from (s for s in _fields(parallel, "parallel") if s[1:] != (1, ("parallel", "vp")))
    # Sequence parallelism costs nothing beside TP, but PyTorch's own norms, which the CPU mode uses, lack it.
    automatic = parallel.sequence == "auto" and (parallel.tp or 1) > 1 and recipe.resources.gpu != "cpu"
    if automatic or parallel.sequence is True:
        yield "sequence_parallel", True, ("parallel", "sequence")
    yield from _choice(parallel.fsdp, "parallel", "fsdp")


def _optimizer(recipe: Recipe) -> Iterator[Setting]:
    dtypes = list(_fields(recipe.optimizer, "optimizer"))
    for _, dtype, where in dtypes:
        if dtype is not None:
            yield "use_precision_aware_optimizer", True, where
            break
    yield from dtypes
    yield from _choice(recipe.optimizer.grad_reduce, "optimizer", "grad_reduce")


def _data(data: Data) -> Iterator[Setting]:
    if data.kind == "mock":
        yield "mock_data", True, ("data", "kind")
    elif data.blend:
        yield "data_path", [str(part) for part in data.blend], ("data", "blend")
    if data.tokenizer is not None:
        yield from _fields(data.tokenizer, "data", "tokenizer")
    elif data.kind == "mock":
        yield "tokenizer_type", "NullTokenizer", ("data", "kind")
    yield from _fields(data, "data")


def _canonical(flag: str, schema: FlagSchema) -> str:
    found = schema.find(flag)
    return found.name if found else flag.lstrip("-").replace("-", "_")


def _collect(
    settings: Iterable[Setting], loaded: LoadedRecipe, schema: FlagSchema
) -> tuple[dict[str, FlagValue], dict[str, str], list[Problem]]:
    """Values and places by canonical flag, and one problem for each pair of settings that disagree."""
    values: dict[str, FlagValue] = {}
    places: dict[str, str] = {}
    setter: dict[str, Setting] = {}
    problems: list[Problem] = []
    for flag, value, path in settings:
        if value is None:
            continue
        name = _canonical(flag, schema)
        found = schema.find(flag)
        # Two spellings of one Megatron argument (--no-x and --disable-x) meet in its dest.
        key = found.dest if found else name
        if key in setter:
            first_flag, first_value, first_path = setter[key]
            if (first_flag, first_value) != (name, value):
                problems.append(_clash(loaded, (first_flag, first_value, first_path), (name, value, path)))
            continue
        setter[key] = (name, value, path)
        values[name] = value
        places[name] = loaded.where(*path)
    return values, places, problems


def _clash(loaded: LoadedRecipe, first: Setting, second: Setting) -> Problem:
    return Problem(
        "error",
        "flag-set-twice",
        f"'{'.'.join(second[2])}: {second[1]}' contradicts '{'.'.join(first[2])}' at {loaded.where(*first[2])}, "
        f"which sets {first[0]} to {first[1]}",
        loaded.where(*second[2]),
        f"keep one of them; the section ({'.'.join(first[2])}) is the usual place",
    )


def _pairs(values: Mapping[str, FlagValue], places: Mapping[str, str]) -> Iterator[Problem]:
    """Format and recipe belong together: alone, the one means `delayed` and the other means bf16, both silently."""
    for kind, means in DEFAULT_RECIPE.items():
        given, missing = f"{kind}_format", f"{kind}_recipe"
        if given in values and missing not in values:
            yield Problem(
                "error",
                "format-without-recipe",
                f"{given} is set and {missing} is not, which Megatron reads as {means}",
                places[given],
                f"state {missing} as well, or use `precision: {{recipe: ..., format: ...}}`",
            )
        if missing in values and given not in values:
            yield Problem(
                "error",
                "recipe-without-format",
                f"{missing} is set and {given} is not: Megatron then trains in bf16",
                places[missing],
                f"state {given} as well, or use `precision: {{recipe: ..., format: ...}}`",
            )


def _fp8_on_cpu(recipe: Recipe, values: Mapping[str, FlagValue], places: Mapping[str, str]) -> Iterator[Problem]:
    """Megatron on a CPU accepts FP8 flags and does nothing with them."""
    for flag in (f"{kind}_format" for kind in DEFAULT_RECIPE):
        if recipe.resources.gpu == "cpu" and flag in values:
            yield Problem(
                "error",
                "fp8-on-cpu",
                f"{flag} is set and resources.gpu is cpu, where Megatron would silently train in bf16",
                places[flag],
                "use `precision: {recipe: bf16}` on CPUs, or name the GPU",
            )

"""Settings that contradict each other, or that Megatron silently reads as something else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fp8launch.diagnostics import Problem
from fp8launch.engines.base import Setting
from fp8launch.hardware.quantization import DEFAULT_RECIPE
from fp8launch.megatron.arguments import FlagValue
from fp8launch.recipe.load import LoadedRecipe
from fp8launch.recipe.schema import Recipe


def set_twice(loaded: LoadedRecipe, first: Setting, second: Setting) -> Problem:
    return Problem(
        "error",
        "flag-set-twice",
        f"'{'.'.join(second[2])}: {second[1]}' contradicts '{'.'.join(first[2])}' at {loaded.where(*first[2])}, "
        f"which sets {first[0]} to {first[1]}",
        loaded.where(*second[2]),
        f"keep one of them; the section ({'.'.join(first[2])}) is the usual place",
    )


def incomplete_pairs(values: Mapping[str, FlagValue], places: Mapping[str, str]) -> Iterator[Problem]:
    """Report a format without a recipe, which silently means `delayed`, and the converse, which means bf16."""
    for kind, means in DEFAULT_RECIPE.items():
        number_format, recipe = f"{kind}_format", f"{kind}_recipe"
        pairs = (
            ("format-without-recipe", number_format, recipe, f", which Megatron reads as {means}"),
            ("recipe-without-format", recipe, number_format, ": Megatron then trains in bf16"),
        )
        for code, given, missing, effect in pairs:
            if given in values and missing not in values:
                message = f"{given} is set and {missing} is not{effect}"
                fix = f"state {missing} as well, or use `precision: {{recipe: ..., format: ...}}`"
                yield Problem("error", code, message, places[given], fix)


def fp8_on_cpu(recipe: Recipe, values: Mapping[str, FlagValue], places: Mapping[str, str]) -> Iterator[Problem]:
    """Report FP8 flags for a CPU, which Megatron accepts and ignores."""
    for flag in (f"{kind}_format" for kind in DEFAULT_RECIPE):
        if recipe.resources.gpu == "cpu" and flag in values:
            message = f"{flag} is set and resources.gpu is cpu, where Megatron would silently train in bf16"
            fix = "use `precision: {recipe: bf16}` on CPUs, or name the GPU"
            yield Problem("error", "fp8-on-cpu", message, places[flag], fix)

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


def fp8_on_cpu(recipe: Recipe, values: Mapping[str, FlagValue], places: Mapping[str, str]) -> Iterator[Problem]:
    """Report FP8 flags for a CPU, which Megatron accepts and ignores."""
    for flag in (f"{kind}_format" for kind in DEFAULT_RECIPE):
        if recipe.resources.gpu == "cpu" and flag in values:
            yield Problem(
                "error",
                "fp8-on-cpu",
                f"{flag} is set and resources.gpu is cpu, where Megatron would silently train in bf16",
                places[flag],
                "use `precision: {recipe: bf16}` on CPUs, or name the GPU",
            )

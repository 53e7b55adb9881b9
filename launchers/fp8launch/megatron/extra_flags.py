"""Flags and values that only a fork knows. They are passed on exactly as written in the recipe."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fp8launch.diagnostics import Problem
from fp8launch.megatron.arguments import Argument, FlagValue, looks_like_option
from fp8launch.megatron.flag_problems import check_values
from fp8launch.megatron.schema import Flag, FlagSchema

# The recipe section for these flags.
EXTRA = "megatron_extra"


def option_of(name: str) -> str:
    """Return the option for a name: as written if it starts with a dash, else in Megatron's style."""
    if name.startswith("-"):
        return name
    return "--" + name.replace("_", "-")


def name_of(option: str) -> str:
    """Return the shortest name that `option_of` turns back into an option."""
    name = option.removeprefix("--").replace("-", "_")
    return name if option_of(name) == option else option


def extra_arguments(
    values: Mapping[str, FlagValue], schema: FlagSchema, where: Callable[[str], str]
) -> tuple[tuple[Argument, ...], list[Problem]]:
    """Return the arguments, and a problem for each name that belongs to Megatron or whose value cannot be passed.

    `where` returns the place of a name in the recipe.
    """
    arguments: list[Argument] = []
    problems: list[Problem] = []
    used: dict[str, str] = {}
    for name, value in values.items():
        if value is None:
            continue
        option = option_of(name)
        flag = schema.find(option)
        refusal = None
        if option in used:
            refusal = f"is given twice, as {used[option]} and as {name}", "remove one"
        elif flag is not None and option in flag.options and not _only_of_fork(flag, option, value, schema):
            refusal = f"is a flag of Megatron-Core {schema.minor}, so it can be checked", "move it to `megatron:`"
        elif value is False:
            refusal = "cannot be false", 'write null to remove it, or "False" to pass this word'
        elif isinstance(value, list) and not value:
            refusal = "has an empty list", "write true for a flag without a value, or null to remove it"
        used[option] = name
        texts = _texts(value)
        if any("\0" in text for text in texts):
            refusal = "contains a NUL character, which argument lists cannot contain", "remove it"
        elif len(texts) > 1 and any(text.startswith("--") for text in texts):
            refusal = (
                "cannot have a value that starts with two dashes among several values",
                "write each flag as a separate key",
            )
        if refusal is not None:
            message, fix = refusal
            problems.append(Problem("error", "extra-flag", f"{EXTRA}: {option} {message}", where(name), fix))
            continue
        words = (option, *texts)
        if len(texts) == 1 and looks_like_option(texts[0]):
            words = (f"{option}={texts[0]}",)
        arguments.append(Argument(option.lstrip("-"), words))
    return tuple(arguments), problems


def _only_of_fork(flag: Flag, option: str, value: FlagValue, schema: FlagSchema) -> bool:
    """Return whether Megatron has the flag, but refuses this value."""
    return flag.takes_value and not isinstance(value, bool) and bool(check_values({option: value}, schema))


def _texts(value: FlagValue) -> list[str]:
    if isinstance(value, list):
        return [str(item) for item in value]
    if value is None or isinstance(value, bool):
        return []
    return [str(value)]

"""Flags that Megatron's parser would refuse, by value, number of words or name, with the fix."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from difflib import SequenceMatcher

from fp8launch.diagnostics import Problem, UserError, nearest
from fp8launch.megatron.arguments import (
    FlagValue,
    InvalidValue,
    Scalar,
    convert,
    emit_arguments,
    items_of,
    looks_like_option,
    option_for,
    text_of,
    words_of,
)
from fp8launch.megatron.schema import Flag, FlagSchema, normalize, other_names, supported_versions, versions_with
from fp8launch.wording import joined

# A name of other programs that resembles the wrong choice.
_MEANT = {"ByteTokenizer": "NullTokenizer, and model.vocab_size: 257 for data built with `--tokenizer bytes`"}

# Finding the nearest name takes milliseconds, and nobody reads more messages of this kind.
MOST_UNKNOWN = 50


def check_values(
    values: Mapping[str, FlagValue], schema: FlagSchema, where: Callable[[str], str | None] = lambda name: None
) -> list[Problem]:
    """Return everything in `values` that Megatron's parser would refuse or that an argument list cannot express.

    `where` returns the place of a name in `values`, as shown in the problem.
    """
    problems: list[Problem] = []
    used: dict[str, str] = {}
    unknown: list[str] = []
    for name, value in values.items():
        flag = schema.find(name)
        if flag is None:
            unknown.append(name)
            if len(unknown) <= MOST_UNKNOWN:
                problems.append(unknown_flag(name, schema, where(name)))
            continue
        if value is None:
            continue
        if flag.name in used:
            message = f"is given twice, as {used[flag.name]} and as {name}"
            problems.append(wrong_value(flag, message, where(name), "remove one"))
        used[flag.name] = name
        for refusal, fix in _refusals(flag, name, value, schema):
            problems.append(wrong_value(flag, refusal, where(name), fix))
    if len(unknown) > MOST_UNKNOWN:
        problems.append(more_unknown_flags(len(unknown) - MOST_UNKNOWN, schema, where(unknown[MOST_UNKNOWN])))
    return problems


def _refusals(
    flag: Flag, name: str, value: Scalar | list[Scalar], schema: FlagSchema
) -> Iterator[tuple[str, str | None]]:
    """Return the problem of a value, and its fix."""
    if not flag.takes_value:
        if not isinstance(value, bool):
            yield f"is a bare flag and takes no value, got {value!r}", "write true, or null to remove it"
        elif value is False and schema.negative(flag) is None:
            yield "is a bare flag and cannot be false", "write null to remove it"
        elif value is False and option_for(flag, name).startswith("--no-") and flag.action == "boolean":
            yield f"is given by its negative name {name} and false", f"write {flag.name}: true"
        return
    if flag.nargs is None and isinstance(value, list) and flag.type not in ("ints", "pattern"):
        yield f"takes one value, got {len(value)}", None
        return
    items = items_of(flag, value)
    if flag.nargs == "+" and not items:
        yield "needs at least one value", "write null to remove it"
    if isinstance(flag.nargs, int) and len(items) != flag.nargs:
        yield f"needs {flag.nargs} values, got {len(items)}", None
    for item in items:
        yield from _item_refusals(flag, item)
    if len(items) > 1 and any(looks_like_option(text_of(flag, item)) for item in items):
        yield "cannot have a value that starts with a dash among several values", None


def _item_refusals(flag: Flag, item: Scalar | list[Scalar]) -> Iterator[tuple[str, str | None]]:
    if isinstance(item, bool) and flag.type != "bool":
        fix = "write the value, or null to remove the flag"
        if flag.choices is not None:
            fix = f"choices are {', '.join(map(str, flag.choices))}"
        yield f"needs a value, got {str(item).lower()}", fix
    elif isinstance(item, list) and not (flag.nargs is None and all(type(part) is int for part in item)):
        yield f"takes whole numbers, got {item!r}", None
    elif isinstance(item, float) and flag.type in ("int", "ints", "pattern"):
        fix = None
        if item.is_integer():
            fix = f"write {int(item)}"
        yield f"needs a whole number, got {item!r}", fix
    elif isinstance(item, str) and "\0" in item:
        yield "contains a NUL character, which argument lists cannot contain", None
    else:
        try:
            convert(flag, text_of(flag, item))
        except InvalidValue as refusal:
            fix = None
            if guess := _MEANT.get(str(item)) or nearest(str(item), map(str, flag.choices or ())):
                fix = f"write {guess}"
            yield str(refusal), fix


def wrong_value(flag: Flag, message: str, where: str | None, fix: str | None = None) -> Problem:
    """Return the problem of a value that a flag does not accept; `message` continues the name of the flag."""
    return Problem("error", "flag-value", f"{flag.options[0]} {message}", where, fix)


def unknown_flag(name: str, schema: FlagSchema, where: str | None) -> Problem:
    """Return the versions that have the flag, its name in this version, or the nearest valid name."""
    key = normalize(name)
    option = "--" + key.replace("_", "-")
    if schema.find(key) is not None:
        return Problem("error", "flag-unknown", f"Megatron takes {option}, not {name}", where, f"write {option}")
    message = f"Megatron-Core {schema.minor} has no flag {option}"
    elsewhere = versions_with(key)
    if elsewhere:
        have = "have"
        if len(elsewhere) == 1:
            have = "has"
        message += f"; {joined(elsewhere)} of the supported {joined(supported_versions())} {have} it"
    renamed = other_names(key, schema)
    setting = schema.setting(key)
    guess = _similar_flag(key, schema)
    fix = None
    if renamed:
        fix = f"use {joined([flag.options[0] for flag in renamed], 'or')}, its name in {schema.minor}"
    elif setting:
        fix = f"{key} is what {joined([flag.options[0] for flag in setting])} sets; use the flag's own name"
    elif guess and not elsewhere:
        fix = f"did you mean {guess}?"
    return Problem("error", "flag-unknown", message, where, fix)


def _similar_flag(key: str, schema: FlagSchema) -> str | None:
    """Return the flag that `key` may be a typing error for; None if the nearest name means something else.

    Each word must resemble the word in the same place, and digits must agree: `ademamix_beta3` is not `adam_beta2`.
    """
    guess = nearest(key, (flag.name for flag in schema.flags() if not flag.deprecated))
    if guess is None:
        return None
    if key.replace("_", "") == guess.replace("_", ""):
        return guess
    theirs, ours = key.split("_"), guess.split("_")
    if len(theirs) != len(ours) or not all(map(_similar_words, theirs, ours)):
        return None
    return guess


def _similar_words(one: str, other: str) -> bool:
    if re.findall(r"\d", one) != re.findall(r"\d", other):
        return False
    short, long = sorted((one, other), key=len)
    if len(short) >= 3 and long.startswith(short):
        return True
    return SequenceMatcher(None, one, other).ratio() >= 0.75


def more_unknown_flags(count: int, schema: FlagSchema, where: str | None) -> Problem:
    """Return one problem for the unknown flags beyond MOST_UNKNOWN."""
    message = f"{count} more names are no flags of Megatron-Core {schema.minor}"
    return Problem("error", "flag-unknown", message, where, "pass only Megatron's arguments")


def emit_argv(values: Mapping[str, FlagValue], schema: FlagSchema) -> tuple[str, ...]:
    """Return the argument list for Megatron in the order of `values`.

    Raises `UserError` with everything that `check_values` finds, so that nothing is left out silently.
    """
    problems = check_values(values, schema)
    if problems:
        raise UserError(problems)
    return words_of(emit_arguments(values, schema))

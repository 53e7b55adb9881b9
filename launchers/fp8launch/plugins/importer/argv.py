"""Parse Megatron's argument list without Megatron, and report what its parser would refuse.

The rules are those of argparse with `allow_abbrev=False`. Tests compare the results with Megatron's own parser.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import cast

from fp8launch.diagnostics import Problem
from fp8launch.megatron.arguments import (
    NEGATIVE_NUMBER,
    FlagValue,
    InvalidValue,
    Scalar,
    convert,
)
from fp8launch.megatron.flag_problems import (
    MOST_UNKNOWN,
    more_unknown_flags,
    unknown_flag,
    wrong_value,
)
from fp8launch.megatron.schema import Flag, FlagSchema


def parse_argv(argv: Sequence[str], schema: FlagSchema) -> tuple[dict[str, FlagValue], list[Problem]]:
    """Return values by canonical name, in order of last use, and the problems that Megatron's parser would report."""
    values: dict[str, FlagValue] = {}
    problems: list[Problem] = []
    unknown = 0
    at = 0
    while at < len(argv):
        word, at = argv[at], at + 1
        option, _, attached = word.partition("=")
        if word == "--help" or word.startswith("-h"):
            problems.append(Problem("error", "flag-help", f"{word} makes Megatron print its help and exit"))
            continue
        if not word.startswith("--"):
            message = f"{word!r} does not belong to any flag"
            problems.append(Problem("error", "flag-stray", message, None, "remove it, or add its flag"))
            continue
        exact = _flag_named(word, schema)
        flag, name = exact, word
        if exact is None:
            flag, name = _flag_named(option, schema), option
        if flag and not exact:
            words = [attached]
        else:
            following = at + _count_values(argv, at, flag, schema)
            words, at = list(argv[at:following]), following
        if flag is None:
            unknown += 1
            if unknown <= MOST_UNKNOWN:
                problems.append(unknown_flag(option, schema, None))
            continue
        try:
            value = _read(flag, name, words, attached=not exact)
        except InvalidValue as refusal:
            problems.append(wrong_value(flag, str(refusal), None))
            continue
        values.pop(flag.name, None)
        values[flag.name] = value
    if unknown > MOST_UNKNOWN:
        problems.append(more_unknown_flags(unknown - MOST_UNKNOWN, schema, None))
    return values, problems


def flag_by_flag(words: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Split an argument list that has no Megatron flags into flags and their values."""
    found: list[tuple[str, list[str]]] = []
    for word in words:
        option, equals, attached = word.partition("=")
        if word.startswith("--") and " " not in option:
            found.append((option, [attached] if equals else []))
        else:
            found[-1][1].append(word)
    return found


def split_unknown(
    argv: Sequence[str], schema: FlagSchema, stray: bool = False, fork: FlagSchema | None = None
) -> tuple[list[str], list[str]]:
    """Split an argument list into words that belong to Megatron's flags and words that belong to other flags.

    Words that belong to no flag count as Megatron's, whose parser refuses them. With `stray`, they count as others.
    `fork` knows how many values its own flags take.
    """
    known: list[str] = []
    unknown: list[str] = []
    at = 0
    while at < len(argv):
        word = argv[at]
        exact = _flag_named(word, schema)
        flag = exact or _flag_named(word.partition("=")[0], schema)
        end = at + 1
        own = _flag_named(word, fork) if fork and flag is None else None
        if flag is None or exact:
            end += _count_values(argv, end, flag or own, schema)
        if flag is None and (stray or (word.startswith("--") and word not in ("--", "--help"))):
            unknown += argv[at:end]
        else:
            known += argv[at:end]
        at = end
    return known, unknown


def split_fork_values(
    argv: Sequence[str], schema: FlagSchema, fork: FlagSchema | None = None
) -> tuple[list[str], list[str]]:
    """Divide Megatron's arguments into words that it accepts and flags whose last value is no choice of Megatron's.

    If the fork is known, these are flags whose value `fork` accepts and Megatron refuses.

    The earlier values of such a flag are dropped, as its parser would drop them. Formats and recipes of FP8 and FP4
    stay: without them the recipe would describe another precision.
    """
    pieces: list[tuple[Flag | None, list[str]]] = []
    at = 0
    while at < len(argv):
        word = argv[at]
        exact = _flag_named(word, schema)
        flag = exact or _flag_named(word.partition("=")[0], schema)
        end = at + 1
        if exact:
            wider = _flag_named(word, fork) if fork else None
            end += max(_count_values(argv, end, one, schema) for one in (exact, wider or exact))
        pieces.append((flag, list(argv[at:end])))
        at = end
    last = {flag.name: words for flag, words in pieces if flag is not None}
    own = {name for name, words in last.items() if _has_fork_value(words, schema, fork)}
    known = [word for flag, words in pieces if flag is None or flag.name not in own for word in words]
    return known, [word for name in last if name in own for word in last[name]]


def _has_fork_value(words: Sequence[str], schema: FlagSchema, fork: FlagSchema | None) -> bool:
    option, _, attached = words[0].partition("=")
    flag = schema.find(option)
    if fork is not None and flag is not None and (own := fork.find(option)) is not None:
        values = [attached] if attached else words[1:]
        return _accepts(own, option, values) and not _accepts(flag, option, values)
    if flag is None or flag.choices is None or flag.name.startswith(("fp8_", "fp4_")):
        return False
    values = [attached] if attached else words[1:]
    if not values or not all(re.fullmatch(r"\w[\w.+-]*", value) for value in values):
        return False
    try:
        _read(flag, option, values, attached=False)
    except InvalidValue:
        return flag.type == "str"
    return False


def _accepts(flag: Flag, option: str, values: Sequence[str]) -> bool:
    """Return whether a flag's parser takes all of these words."""
    try:
        _read(flag, option, values, attached=False)
    except InvalidValue:
        return False
    return len(values) <= 1 or flag.nargs is not None


def _flag_named(word: str, schema: FlagSchema) -> Flag | None:
    """Return the flag with exactly this name. argparse does not treat underscores as dashes."""
    flag = schema.find(word)
    if flag is None or word not in flag.options:
        return None
    return flag


def _count_values(argv: Sequence[str], at: int, flag: Flag | None, schema: FlagSchema) -> int:
    """Return how many of the words from `at` on belong to a flag. An unknown flag takes all values that follow it."""
    available = 0
    while at + available < len(argv):
        word = argv[at + available]
        if word == "--" or not _is_value(word, schema):
            break
        available += 1
    if flag is None or flag.nargs in ("+", "*"):
        return available
    if not flag.takes_value:
        return 0
    if isinstance(flag.nargs, int):
        return min(available, flag.nargs)
    return min(available, 1)


def _is_value(word: str, schema: FlagSchema) -> bool:
    """Return whether argparse takes a word for a value, even if it starts with a dash."""
    if not word.startswith("-") or word == "-":
        return True
    if _flag_named(word, schema) or _flag_named(word.partition("=")[0], schema) or word.startswith("-h"):
        return False
    return NEGATIVE_NUMBER.match(word) is not None or " " in word


def _read(flag: Flag, name: str, words: Sequence[str], attached: bool) -> FlagValue:
    """Return the value of the words after a flag, or attached to it. Raises `InvalidValue`."""
    if not flag.takes_value:
        if attached:
            raise InvalidValue("is a bare flag and takes no value")
        return flag.action != "boolean" or not name.startswith("--no-")
    if flag.nargs is None:
        if not words:
            raise InvalidValue("needs a value")
        return convert(flag, words[0])
    if flag.nargs == "+" and not words:
        raise InvalidValue("needs at least one value")
    if isinstance(flag.nargs, int) and len(words) != flag.nargs:
        raise InvalidValue(f"needs {flag.nargs} values, got {len(words)}")
    return [cast(Scalar, convert(flag, word)) for word in words]

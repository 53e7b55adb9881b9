"""Megatron's argument list, read without Megatron, and written with what its parser would refuse reported.

The rules are those of argparse with `allow_abbrev=False`, which the test suite compares with Megatron's own parser.
`arguments` says how values are kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from fp8launch.diagnostics import Problem, UserError
from fp8launch.megatron.arguments import (
    NEGATIVE_NUMBER,
    FlagValue,
    InvalidValue,
    Scalar,
    convert,
    emit_arguments,
    words_of,
)
from fp8launch.megatron.flag_problems import (
    MOST_UNKNOWN,
    check_values,
    more_unknown_flags,
    stray_word,
    unknown_flag,
    wrong_value,
)
from fp8launch.megatron.schema import Flag, FlagSchema


def parse_argv(argv: Sequence[str], schema: FlagSchema) -> tuple[dict[str, FlagValue], list[Problem]]:
    """Values by canonical name, in the order of each flag's last use, and what Megatron's parser would refuse."""
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
            problems.append(stray_word(word))
            continue
        exact = _spelt(word, schema)
        flag, spelling = exact, word
        if exact is None:
            flag, spelling = _spelt(option, schema), option
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
            value = _read(flag, spelling, words, attached=not exact)
        except InvalidValue as refusal:
            problems.append(wrong_value(flag, str(refusal), None))
            continue
        values.pop(flag.name, None)
        values[flag.name] = value
    if unknown > MOST_UNKNOWN:
        problems.append(more_unknown_flags(unknown - MOST_UNKNOWN, schema, None))
    return values, problems


def split_unknown(argv: Sequence[str], schema: FlagSchema) -> tuple[list[str], list[str]]:
    """The words of an argument list that belong to Megatron's flags, and those of flags that Megatron does not have."""
    known: list[str] = []
    unknown: list[str] = []
    at = 0
    while at < len(argv):
        word = argv[at]
        exact = _spelt(word, schema)
        flag = exact or _spelt(word.partition("=")[0], schema)
        end = at + 1
        if flag is None or exact:
            end += _count_values(argv, end, flag, schema)
        if flag is None:
            unknown += argv[at:end]
        else:
            known += argv[at:end]
        at = end
    return known, unknown


def _spelt(word: str, schema: FlagSchema) -> Flag | None:
    """The flag with exactly this spelling; argparse takes no underscores for dashes."""
    flag = schema.find(word)
    if flag is None or word not in flag.options:
        return None
    return flag


def _count_values(argv: Sequence[str], at: int, flag: Flag | None, schema: FlagSchema) -> int:
    """How many of the words from `at` argparse would hand to the flag (to an unknown one: every value that follows)."""
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
    """Whether argparse takes the word for a value, though it may start with a dash."""
    if not word.startswith("-") or word == "-":
        return True
    if _spelt(word, schema) or _spelt(word.partition("=")[0], schema) or word.startswith("-h"):
        return False
    return NEGATIVE_NUMBER.match(word) is not None or " " in word


def _read(flag: Flag, spelling: str, words: Sequence[str], attached: bool) -> FlagValue:
    """The value that the words after (or attached to) a spelling give. Raises `InvalidValue`."""
    if not flag.takes_value:
        if attached:
            raise InvalidValue("is a bare flag and takes no value")
        return flag.action != "boolean" or not spelling.startswith("--no-")
    if flag.nargs is None:
        if not words:
            raise InvalidValue("needs a value")
        return convert(flag, words[0])
    if flag.nargs == "+" and not words:
        raise InvalidValue("needs at least one value")
    if isinstance(flag.nargs, int) and len(words) != flag.nargs:
        raise InvalidValue(f"needs {flag.nargs} values, got {len(words)}")
    return [cast(Scalar, convert(flag, word)) for word in words]


def emit_argv(values: Mapping[str, FlagValue], schema: FlagSchema) -> tuple[str, ...]:
    """The argument list for Megatron, word by word, in the order of `values`.

    Raises `UserError` with everything that `check_values` finds, so that nothing is left out silently.
    """
    problems = check_values(values, schema)
    if problems:
        raise UserError(problems)
    return words_of(emit_arguments(values, schema))

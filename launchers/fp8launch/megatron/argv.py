"""Megatron's argument list, read and written without Megatron.

Values are keyed by the flag's canonical name (`Flag.name`). True is a bare flag, a number or text is a value, a list
is several values, None means "not given". The rules are those of argparse with `allow_abbrev=False`, which the test
suite compares with Megatron's own parser.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, cast

from fp8launch.diagnostics import Problem, UserError
from fp8launch.megatron.flag_problems import (
    MOST_UNKNOWN,
    check_values,
    more_unknown_flags,
    stray_word,
    unknown_flag,
    wrong_value,
)
from fp8launch.megatron.flag_text import (
    NEGATIVE_NUMBER,
    FlagValue,
    InvalidValue,
    Scalar,
    convert,
    items_of,
    looks_like_option,
    spelling_of,
    text_of,
)
from fp8launch.megatron.schema import Flag, FlagSchema


class Argument(NamedTuple):
    """One flag of an argument list: its canonical name, and the words that stand for it, its spelling first."""

    flag: str
    words: tuple[str, ...]


def words_of(arguments: Iterable[Argument]) -> tuple[str, ...]:
    """The argument list that these flags make up, word by word."""
    return tuple(word for argument in arguments for word in argument.words)


def parse_argv(argv: Sequence[str], schema: FlagSchema) -> tuple[dict[str, FlagValue], list[Problem]]:
    """Values by canonical name, in the order of each flag's last use, and what Megatron's parser would refuse."""
    values: dict[str, FlagValue] = {}
    problems: list[Problem] = []
    unknown = 0
    at = 0
    while at < len(argv):
        word, at = argv[at], at + 1
        option, equals, attached = word.partition("=")
        if word == "--help" or word.startswith("-h"):
            problems.append(Problem("error", "flag-help", f"{word} makes Megatron print its help and exit"))
            continue
        if not word.startswith("--"):
            problems.append(stray_word(word))
            continue
        exact = _spelt(word, schema)
        flag = exact or (_spelt(option, schema) if equals else None)
        words = [attached] if flag and not exact else []
        if not words:
            following = at + _count_values(argv, at, flag, schema)
            words, at = list(argv[at:following]), following
        if flag is None:
            unknown += 1
            if unknown <= MOST_UNKNOWN:
                problems.append(unknown_flag(option, schema, None))
            continue
        spelling = word if exact else option
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
        flag = _spelt(word, schema) or _spelt(word.partition("=")[0], schema)
        end = at + 1
        if flag is None or _spelt(word, schema) is not None:
            end += _count_values(argv, end, flag, schema)
        (known if flag is not None else unknown).extend(argv[at:end])
        at = end
    return known, unknown


def _spelt(word: str, schema: FlagSchema) -> Flag | None:
    """The flag with exactly this spelling; argparse takes no underscores for dashes."""
    flag = schema.find(word)
    return flag if flag and word in flag.options else None


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
    wanted = flag.nargs if isinstance(flag.nargs, int) else 1
    return min(available, wanted if flag.takes_value else 0)


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
        return not spelling.startswith("--no-") if flag.action == "boolean" else True
    if flag.nargs is None:
        if not words:
            raise InvalidValue("needs a value")
        return convert(flag, words[0])
    if flag.nargs == "+" and not words:
        raise InvalidValue("needs at least one value")
    if isinstance(flag.nargs, int) and len(words) != flag.nargs:
        raise InvalidValue(f"needs {flag.nargs} values, got {len(words)}")
    return [cast(Scalar, convert(flag, word)) for word in words]


def emit_arguments(values: Mapping[str, FlagValue], schema: FlagSchema) -> tuple[Argument, ...]:
    """The arguments for Megatron, flag by flag, in the order of `values`.

    Raises `UserError` with everything that `check_values` finds, so that nothing is left out silently.
    """
    problems = check_values(values, schema)
    if problems:
        raise UserError(problems)
    found = []
    for name, value in values.items():
        if value is not None:
            flag, _ = _setting(name, value, schema)
            found.append(Argument(flag.name, tuple(_words(name, value, schema))))
    return tuple(found)


def emit_argv(values: Mapping[str, FlagValue], schema: FlagSchema) -> tuple[str, ...]:
    """The same word by word."""
    return words_of(emit_arguments(values, schema))


def as_parsed(values: Mapping[str, FlagValue], schema: FlagSchema) -> dict[str, FlagValue]:
    """Valid `values` by canonical name, each of the type that Megatron's parser would give it: an `lr` of 1 is 1.0."""
    found: dict[str, FlagValue] = {}
    for name, value in values.items():
        if value is None:
            continue
        flag, stored = _setting(name, value, schema)
        if flag.takes_value:
            converted = [convert(flag, text_of(flag, item)) for item in items_of(flag, value)]
            found[flag.name] = converted[0] if flag.nargs is None else cast("list[Scalar]", converted)
        else:
            found[flag.name] = stored
    return found


def attributes(values: Mapping[str, FlagValue], schema: FlagSchema) -> dict[str, FlagValue]:
    """Values by the attribute of Megatron's arguments that they set (dest), as Megatron's parser stores them.

    Takes values by canonical name that are typed already: those of `parse_argv` or `as_parsed`.
    """
    found: dict[str, FlagValue] = {}
    for name, value in values.items():
        flag = schema.find(name)
        assert flag is not None, name
        found[flag.dest] = value if flag.takes_value or flag.action == "boolean" else flag.const
    return found


def _setting(name: str, value: FlagValue, schema: FlagSchema) -> tuple[Flag, FlagValue]:
    """The flag that an argument list has for `name: value`, and its value there.

    `false` for a bare flag is said by its opposite, which is a flag of its own unless the two are one `boolean` pair.
    """
    flag = schema.find(name)
    assert flag is not None, name
    if flag.action == "boolean":
        return flag, bool(value) and not spelling_of(flag, name).startswith("--no-")
    if flag.takes_value or value:
        return flag, value
    opposite = schema.find(cast(str, schema.negative(flag)))
    assert opposite is not None, name
    return opposite, True


def _words(name: str, value: Scalar | list[Scalar], schema: FlagSchema) -> list[str]:
    flag = schema.find(name)
    assert flag is not None, name
    if not flag.takes_value:
        return [spelling_of(flag, name) if value else cast(str, schema.negative(flag))]
    texts = [text_of(flag, item) for item in items_of(flag, value)]
    if len(texts) == 1 and looks_like_option(texts[0]):
        return [f"{flag.options[0]}={texts[0]}"]
    return [flag.options[0], *texts]

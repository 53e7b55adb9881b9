"""Megatron's argument list: read it, write it, and find what its parser would refuse, all without Megatron.

Values are keyed by the flag's canonical name (`Flag.name`). True is a bare flag, a number or text is a value, a list
is several values, None means "not given". The rules are those of argparse with `allow_abbrev=False`, which the test
suite compares with Megatron's own parser.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from typing import cast

from fp8launch.megatron.schema import Flag, FlagSchema, normalize, other_names, supported_versions, versions_with
from fp8launch.problems import Problem, UserError, nearest

Scalar = bool | int | float | str
FlagValue = Scalar | list[Scalar] | None

# What every argparse takes for a negative number rather than for an option.
_NEGATIVE_NUMBER = re.compile(r"-\d+$|-\d*\.\d+$")


class _Invalid(ValueError):
    """A text that the flag's type does not accept; the message says what it does accept."""


# --- reading --------------------------------------------------------------------------------------------------------


def parse_argv(argv: Sequence[str], schema: FlagSchema) -> tuple[dict[str, FlagValue], list[Problem]]:
    """Values by canonical name, in the order of each flag's last use, and what Megatron's parser would refuse."""
    values: dict[str, FlagValue] = {}
    problems: list[Problem] = []
    at = 0
    while at < len(argv):
        word, at = argv[at], at + 1
        option, equals, attached = word.partition("=")
        if word == "--help" or word.startswith("-h"):
            problems.append(Problem("error", "flag-help", f"{word} makes Megatron print its help and stop"))
            continue
        if not word.startswith("--"):
            problems.append(_stray(word))
            continue
        exact = _spelt(word, schema)
        flag = exact or (_spelt(option, schema) if equals else None)
        words = [attached] if flag and not exact else []
        if not words:
            following = at + _count_values(argv[at:], flag, schema)
            words, at = list(argv[at:following]), following
        if flag is None:
            problems.append(_unknown(option, schema, None))
            continue
        spelling = word if exact else option
        try:
            value = _read(flag, spelling, words, attached=not exact)
        except _Invalid as refusal:
            problems.append(_wrong(flag, str(refusal), None))
            continue
        values.pop(flag.name, None)
        values[flag.name] = value
    return values, problems


def _spelt(word: str, schema: FlagSchema) -> Flag | None:
    """The flag with exactly this spelling; argparse takes no underscores for dashes."""
    flag = schema.find(word)
    return flag if flag and word in flag.options else None


def _count_values(rest: Sequence[str], flag: Flag | None, schema: FlagSchema) -> int:
    """How many of the next words argparse would hand to the flag (to an unknown one: every value that follows)."""
    available = 0
    for word in rest:
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
    return _NEGATIVE_NUMBER.match(word) is not None or " " in word


def _read(flag: Flag, spelling: str, words: Sequence[str], attached: bool) -> FlagValue:
    """The value that the words after (or attached to) a spelling give. Raises `_Invalid`."""
    if not flag.takes_value:
        if attached:
            raise _Invalid("is a bare flag and takes no value")
        return not spelling.startswith("--no-") if flag.action == "boolean" else True
    if flag.nargs is None:
        if not words:
            raise _Invalid("needs a value")
        return _convert(flag, words[0])
    if flag.nargs == "+" and not words:
        raise _Invalid("needs at least one value")
    if isinstance(flag.nargs, int) and len(words) != flag.nargs:
        raise _Invalid(f"needs {flag.nargs} values, got {len(words)}")
    return [cast(Scalar, _convert(flag, word)) for word in words]


def _convert(flag: Flag, text: str) -> FlagValue:
    """One value as argparse would convert it, then held against the choices. Raises `_Invalid`."""
    value = _CONVERT[flag.type or "str"](text)
    if flag.choices is not None and value not in flag.choices:
        raise _Invalid(f"has no choice {text!r}; choices are {', '.join(map(str, flag.choices))}")
    return value


def _int(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise _Invalid(f"needs a whole number, not {text!r}") from None


def _float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise _Invalid(f"needs a number, not {text!r}") from None


def _ints(text: str) -> FlagValue:
    try:
        return [int(part) for part in text.strip("()").split(",")]
    except ValueError:
        raise _Invalid(f"needs whole numbers joined by commas, not {text!r}") from None


def _pattern(text: str) -> int | str:
    """A whole number, or a list expression of numbers, lists, + and *, kept as text. Raises `_Invalid`."""
    if "[" not in text:
        return _int(text)
    refusal = f"needs a whole number or a list expression such as ([0]*3+[1])*8, not {text!r}"
    if re.search(r"[^,\d\[\]()+*]", text):
        raise _Invalid(refusal)
    try:
        _kind(ast.parse(text, mode="eval").body)
    except (SyntaxError, TypeError, RecursionError, MemoryError):
        raise _Invalid(refusal) from None
    return text


def _kind(node: ast.expr) -> type:
    """The type that a pattern evaluates to, without evaluating it (`[0]*9999999999` would take the memory)."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return int
    if isinstance(node, (ast.List, ast.Tuple)):
        for element in node.elts:
            _kind(element)
        return list if isinstance(node, ast.List) else tuple
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.UAdd) and _kind(node.operand) is int:
        return int
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Mult)):
        left, right = _kind(node.left), _kind(node.right)
        if left is right and (isinstance(node.op, ast.Add) or left is int):
            return left
        if isinstance(node.op, ast.Mult) and int in (left, right):
            return right if left is int else left
    raise TypeError("not a list expression")


# `bool` is Python's own, applied to the text: Megatron has one such flag, and there every text but "" is true.
_CONVERT: Mapping[str, Callable[[str], FlagValue]] = {
    "str": str,
    "int": _int,
    "float": _float,
    "bool": bool,
    "ints": _ints,
    "pattern": _pattern,
}


# --- writing --------------------------------------------------------------------------------------------------------


def emit_argv(values: Mapping[str, FlagValue], schema: FlagSchema) -> tuple[str, ...]:
    """The argument list for Megatron, in the order of `values`.

    Raises `UserError` with everything that `check_values` finds, so that nothing is left out silently.
    """
    problems = check_values(values, schema)
    if problems:
        raise UserError(problems)
    return tuple(word for name, value in values.items() if value is not None for word in _words(name, value, schema))


def _words(name: str, value: Scalar | list[Scalar], schema: FlagSchema) -> list[str]:
    flag = schema.find(name)
    assert flag is not None, name
    if not flag.takes_value:
        return [_spelling(flag, name) if value else cast(str, schema.negative(flag))]
    texts = [_text(flag, item) for item in _items(flag, value)]
    if len(texts) == 1 and _looks_like_option(texts[0]):
        return [f"{flag.options[0]}={texts[0]}"]
    return [flag.options[0], *texts]


def _spelling(flag: Flag, name: str) -> str:
    """The positive spelling; a name given with its `no_` prefix keeps it."""
    return next((option for option in flag.options if normalize(option) == normalize(name)), flag.options[0])


def _items(flag: Flag, value: Scalar | list[Scalar]) -> list[Scalar | list[Scalar]]:
    """The values that become a word each."""
    return list(value) if flag.nargs is not None and isinstance(value, list) else [value]


def _text(flag: Flag, value: Scalar | list[Scalar]) -> str:
    """The word that Megatron reads back as this value."""
    if isinstance(value, list):
        return ",".join(map(str, value)) if flag.type == "ints" else f"[{','.join(map(str, value))}]"
    if isinstance(value, bool):
        return str(value) if value else ""
    return _float_text(value) if isinstance(value, float) else str(value)


def _float_text(value: float) -> str:
    """The shortest text of the float, as a person would write it: 1e-5 for Python's 1e-05."""
    if value < 0 and "e" in repr(value):
        # argparse takes -1e-5 for an option, but not a plain decimal.
        return format(Decimal(repr(value)), "f")
    return re.sub(r"e([+-])0+(?=\d)", r"e\1", repr(value)).replace("e+", "e")


def _looks_like_option(text: str) -> bool:
    return text.startswith("-") and text != "-" and not _NEGATIVE_NUMBER.match(text)


# --- checking -------------------------------------------------------------------------------------------------------


def check_values(
    values: Mapping[str, FlagValue], schema: FlagSchema, where: Callable[[str], str | None] = lambda name: None
) -> list[Problem]:
    """Everything in `values` that Megatron's parser would refuse or that cannot be said in an argument list.

    `where` gives the place of a name of `values`, as the problem shall show it.
    """
    problems: list[Problem] = []
    used: dict[str, str] = {}
    for name, value in values.items():
        flag = schema.find(name)
        if flag is None:
            problems.append(_unknown(name, schema, where(name)))
            continue
        if value is None:
            continue
        if flag.name in used:
            message = f"is given twice, as {used[flag.name]} and as {name}"
            problems.append(_wrong(flag, message, where(name), "drop one"))
        used[flag.name] = name
        problems += [_wrong(flag, refusal, where(name), fix) for refusal, fix in _refusals(flag, name, value, schema)]
    return problems


def _refusals(
    flag: Flag, name: str, value: Scalar | list[Scalar], schema: FlagSchema
) -> Iterator[tuple[str, str | None]]:
    """What is wrong with a value, and how to put it right."""
    if not flag.takes_value:
        if not isinstance(value, bool):
            yield f"is a bare flag and takes no value, got {value!r}", "write true, or null to leave it out"
        elif value is False and schema.negative(flag) is None:
            yield "is a bare flag, it cannot be false", "write null to leave it out"
        elif value is False and _spelling(flag, name).startswith("--no-") and flag.action == "boolean":
            yield f"is given by its negative name {name} and false", f"write {flag.name}: true"
        return
    if flag.nargs is None and isinstance(value, list) and flag.type not in ("ints", "pattern"):
        yield f"takes one value, got {len(value)}", None
        return
    items = _items(flag, value)
    if flag.nargs == "+" and not items:
        yield "needs at least one value", "write null to leave it out"
    if isinstance(flag.nargs, int) and len(items) != flag.nargs:
        yield f"needs {flag.nargs} values, got {len(items)}", None
    for item in items:
        yield from _item_refusals(flag, item)
    if len(items) > 1 and any(_looks_like_option(_text(flag, item)) for item in items):
        yield "cannot have a value that starts with a dash among several values", None


def _item_refusals(flag: Flag, item: Scalar | list[Scalar]) -> Iterator[tuple[str, str | None]]:
    choices = f"choices are {', '.join(map(str, flag.choices))}" if flag.choices is not None else None
    if isinstance(item, bool) and flag.type != "bool":
        yield f"needs a value, got {str(item).lower()}", choices or "write the value, or null to leave the flag out"
    elif isinstance(item, list) and not (flag.nargs is None and all(type(part) is int for part in item)):
        yield f"takes whole numbers, got {item!r}", None
    elif isinstance(item, float) and flag.type in ("int", "ints", "pattern"):
        yield f"needs a whole number, got {item!r}", f"write {int(item)}" if item.is_integer() else None
    elif isinstance(item, str) and "\0" in item:
        yield "cannot hold a NUL character: no argument list can", None
    else:
        try:
            _convert(flag, _text(flag, item))
        except _Invalid as refusal:
            guess = nearest(str(item), map(str, flag.choices)) if flag.choices is not None else None
            yield str(refusal), f"write {guess}" if guess else None


def _wrong(flag: Flag, message: str, where: str | None, fix: str | None = None) -> Problem:
    return Problem("error", "flag-value", f"{flag.options[0]} {message}", where, fix)


def _stray(word: str) -> Problem:
    return Problem("error", "flag-stray", f"{word!r} follows no flag that takes it", None, "Megatron takes flags only")


def _unknown(name: str, schema: FlagSchema, where: str | None) -> Problem:
    """Says which versions have the flag, its name in this one, or the nearest valid name."""
    key = normalize(name)
    option = "--" + key.replace("_", "-")
    message = f"Megatron-Core {schema.minor} has no flag {option}"
    elsewhere = versions_with(key)
    if elsewhere:
        message += f"; {_joined(elsewhere)} of the supported {_joined(supported_versions())} {_have(elsewhere)} it"
    renamed = other_names(key, schema)
    setting = schema.setting(key)
    guess = nearest(key, (flag.name for flag in schema.flags() if not flag.deprecated))
    fix = None
    if renamed:
        fix = f"use {_joined([flag.options[0] for flag in renamed], 'or')}, its name in {schema.minor}"
    elif setting:
        fix = f"{key} is what {_joined([flag.options[0] for flag in setting], 'and')} sets; use the flag's own name"
    elif guess and not elsewhere:
        fix = f"did you mean {guess}?"
    return Problem("error", "flag-unknown", message, where, fix)


def _have(versions: Sequence[str]) -> str:
    return "has" if len(versions) == 1 else "have"


def _joined(words: Sequence[str], conjunction: str = "and") -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {conjunction} {words[-1]}"

"""Convert values of Megatron's flags to the words of an argument list, and back.

Values are keyed by the flag's canonical name (`Flag.name`). True is a bare flag, a number or text is a value, a list
is several values, None means "not given". The rules follow argparse and the types in Megatron's parser.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal
from typing import NamedTuple, cast

from fp8launch.megatron.schema import Flag, FlagSchema, normalize

Scalar = bool | int | float | str
FlagValue = Scalar | list[Scalar] | None

# Words that argparse reads as a negative number instead of an option.
NEGATIVE_NUMBER = re.compile(r"-\d+$|-\d*\.\d+$")


class InvalidValue(ValueError):
    """A text that the type of a flag does not accept; the message says what the type accepts."""


class Argument(NamedTuple):
    """One flag of an argument list: its canonical name, and its words, of which the first is the flag as written."""

    flag: str
    words: tuple[str, ...]


def words_of(arguments: Iterable[Argument]) -> tuple[str, ...]:
    """Return the words of these flags."""
    return tuple(word for argument in arguments for word in argument.words)


def emit_arguments(values: Mapping[str, FlagValue], schema: FlagSchema) -> tuple[Argument, ...]:
    """Return the arguments for Megatron in the order of `values`, which `check_values` has accepted."""
    found = []
    for name, value in values.items():
        if value is not None:
            flag, _ = _setting(name, value, schema)
            found.append(Argument(flag.name, tuple(_words(name, value, schema))))
    return tuple(found)


def as_parsed(values: Mapping[str, FlagValue], schema: FlagSchema) -> dict[str, FlagValue]:
    """Return valid values by canonical name, with the types of Megatron's parser: an `lr` of 1 is 1.0."""
    found: dict[str, FlagValue] = {}
    for name, value in values.items():
        if value is None:
            continue
        flag, stored = _setting(name, value, schema)
        if flag.takes_value:
            converted = [convert(flag, text) for text in _texts(flag, value)]
            stored = cast("list[Scalar]", converted)
            if flag.nargs is None:
                stored = converted[0]
        found[flag.name] = stored
    return found


def attributes(values: Mapping[str, FlagValue], schema: FlagSchema) -> dict[str, FlagValue]:
    """Return values by the attribute that they set (dest), as Megatron's parser stores them.

    Takes typed values by canonical name, as `as_parsed` returns them.
    """
    found: dict[str, FlagValue] = {}
    for name, value in values.items():
        flag = schema.find(name)
        assert flag is not None, name
        found[flag.dest] = flag.const
        if flag.takes_value or flag.action == "boolean":
            found[flag.dest] = value
    return found


def _setting(name: str, value: FlagValue, schema: FlagSchema) -> tuple[Flag, FlagValue]:
    """Return the flag of an argument list for `name: value`, and its value.

    `false` for a bare flag needs the opposite flag, unless the two are one `boolean` pair.
    """
    flag = schema.find(name)
    assert flag is not None, name
    if flag.action == "boolean":
        return flag, bool(value) and not option_for(flag, name).startswith("--no-")
    if flag.takes_value or value:
        return flag, value
    opposite = schema.find(cast(str, schema.negative(flag)))
    assert opposite is not None, name
    return opposite, True


def _words(name: str, value: Scalar | list[Scalar], schema: FlagSchema) -> list[str]:
    flag = schema.find(name)
    assert flag is not None, name
    if not flag.takes_value:
        if value:
            return [option_for(flag, name)]
        return [cast(str, schema.negative(flag))]
    texts = _texts(flag, value)
    if len(texts) == 1 and looks_like_option(texts[0]):
        return [f"{flag.options[0]}={texts[0]}"]
    return [flag.options[0], *texts]


def _texts(flag: Flag, value: Scalar | list[Scalar]) -> list[str]:
    return [text_of(flag, item) for item in items_of(flag, value)]


def convert(flag: Flag, text: str) -> FlagValue:
    """Convert one value like argparse, and check it against the choices. Raises `InvalidValue`."""
    value = _CONVERT[flag.type or "str"](text)
    if flag.choices is not None and value not in flag.choices:
        raise InvalidValue(f"has no choice {text!r}; choices are {', '.join(map(str, flag.choices))}")
    return value


def _int(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise InvalidValue(f"needs a whole number, not {text!r}") from None


def _float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InvalidValue(f"needs a number, not {text!r}") from None


def _ints(text: str) -> FlagValue:
    try:
        return list(map(int, text.strip("()").split(",")))
    except ValueError:
        raise InvalidValue(f"needs whole numbers joined by commas, not {text!r}") from None


def _pattern(text: str) -> int | str:
    """Return a whole number, or the text of a list expression of numbers, lists, + and *. Raises `InvalidValue`."""
    if "[" not in text:
        return _int(text)
    refusal = f"needs a whole number or a list expression such as ([0]*3+[1])*8, not {text!r}"
    if re.search(r"[^,\d\[\]()+*]", text):
        raise InvalidValue(refusal)
    try:
        _kind(ast.parse(text, mode="eval").body)
    except (SyntaxError, TypeError, RecursionError, MemoryError):
        raise InvalidValue(refusal) from None
    return text


def _kind(node: ast.expr) -> type:
    """Return the type of a pattern's value without evaluating it (`[0]*9999999999` would exhaust the memory)."""
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
        if isinstance(node.op, ast.Mult) and left is int:
            return right
        if isinstance(node.op, ast.Mult) and right is int:
            return left
    raise TypeError("not a list expression")


# Megatron has one flag with Python's own `bool` as its type, for which every text but "" is true.
_CONVERT: Mapping[str, Callable[[str], FlagValue]] = {
    "str": str,
    "int": _int,
    "float": _float,
    "bool": bool,
    "ints": _ints,
    "pattern": _pattern,
}


def option_for(flag: Flag, name: str) -> str:
    """Return the positive option of a flag, or the negative one for a name with the prefix `no_`."""
    key = normalize(name)
    return next((option for option in flag.options if normalize(option) == key), flag.options[0])


def takes_words(flag: Flag) -> bool:
    """Return whether a flag takes several values that cannot contain spaces: numbers, or words of a list of choices."""
    return flag.nargs is not None and (flag.type in ("int", "float") or flag.choices is not None)


def items_of(flag: Flag, value: Scalar | list[Scalar]) -> list[Scalar | list[Scalar]]:
    """Return the values that become one word each. `"2 2"` is two values if values cannot contain spaces."""
    if flag.nargs is None or not isinstance(value, (list, str)):
        return [value]
    if isinstance(value, list):
        return list(value)
    if takes_words(flag):
        return list(value.split())
    return [value]


def text_of(flag: Flag, value: Scalar | list[Scalar]) -> str:
    """Return the word that Megatron reads as this value."""
    if isinstance(value, list):
        joined = ",".join(map(str, value))
        if flag.type == "ints":
            return joined
        return f"[{joined}]"
    if value is False:
        return ""
    if isinstance(value, float):
        return _float_text(value)
    return str(value)


def _float_text(value: float) -> str:
    """Return the shortest text of a float: 1e-5 for Python's 1e-05."""
    if value < 0 and "e" in repr(value):
        # argparse reads -1e-5 as an option, but a plain decimal as a number.
        return format(Decimal(repr(value)), "f")
    return re.sub(r"e([+-])0+(?=\d)", r"e\1", repr(value)).replace("e+", "e")


def looks_like_option(text: str) -> bool:
    return text.startswith("-") and text != "-" and not NEGATIVE_NUMBER.match(text)

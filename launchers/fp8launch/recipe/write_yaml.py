"""Write a recipe as readable YAML: sections in their usual order, short ones on one line."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Any

from fp8launch.recipe.schema import recipe_keys
from fp8launch.recipe.yaml_source import resolve_plain_scalar

_WIDTH = 110
# Sections with one field per line.
_ALWAYS_BLOCK = ("model", "env", "megatron", "megatron_extra")
_PLAIN = re.compile(r"[A-Za-z_/.][A-Za-z0-9_/.+@%=-]*(?:[: ][A-Za-z0-9_/.+@%=-]+)*")
# Control characters, and characters that YAML or an editor may treat as a line break.
_UNSAFE = re.compile(r"[^\x20-\x7e\xa0-\u2027\u202a-\ud7ff\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010ffff]")
# Words that YAML 1.1 parsers read as true or false.
_OLD_WORDS = frozenset(("y", "n", "yes", "no", "on", "off"))


def write_yaml(recipe: Mapping[str, Any], comments: Mapping[str, Iterable[str]] | None = None) -> str:
    """Return `recipe` as YAML. `comments` maps a section to the comment above it; "" is the top of the file."""
    notes = dict(comments or {})
    lines = _comment(notes.pop("", ()))
    order = [name for name in ("extends", *recipe_keys()) if name in recipe or name in notes]
    order += [name for name in recipe if name not in order]
    for name in order:
        lines += _comment(notes.get(name, ()))
        if name in recipe:
            lines += _entry(name, recipe[name], 0, flow=name not in _ALWAYS_BLOCK)
    return "\n".join(lines) + "\n"


def _comment(texts: Iterable[str]) -> list[str]:
    lines: list[str] = []
    for text in texts:
        lines += [f"# {line}".rstrip() for line in _visible(text).split("\n")]
    return lines


def _entry(key: str, value: Any, depth: int, flow: bool) -> list[str]:
    indent = "  " * depth
    name = _scalar(key)
    if not isinstance(value, (dict, list)) or not value:
        return [f"{indent}{name}: {inline(value)}"]
    line = f"{indent}{name}: {inline(value)}"
    if len(line) <= _WIDTH and (flow or isinstance(value, list)):
        return [line]
    if isinstance(value, list):
        return [f"{indent}{name}:", *(f"{indent}  - {inline(item)}" for item in value)]
    lines = [f"{indent}{name}:"]
    for below, item in value.items():
        lines += _entry(below, item, depth + 1, flow=True)
    return lines


def inline(value: Any) -> str:
    """Return a value as YAML on one line."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_scalar(key)}: {inline(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(inline, value)) + "]"
    return _scalar(value)


def _scalar(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return _float(value)
    if isinstance(value, int):
        # Anything longer is read as text, which is what is needed here.
        return str(value)
    text = str(value)
    if _PLAIN.fullmatch(text) and text.lower() not in _OLD_WORDS and isinstance(resolve_plain_scalar(text), str):
        return text
    return _quoted(text)


def _float(value: float) -> str:
    """Format a number: plain from 0.001 to a million, else like 3.0e-4, which every YAML parser reads as a number."""
    if not math.isfinite(value):
        # Recipes cannot contain infinity or NaN as numbers, but Megatron's parser accepts them as text.
        return f'"{value}"'
    if value == 0 or 1e-3 <= abs(value) < 1e6:
        return repr(value)
    digits, _, power = format(Decimal(repr(value)).normalize(), "e").partition("e")
    if "." not in digits:
        digits += ".0"
    return f"{digits}e{power}"


def _quoted(text: str) -> str:
    return _UNSAFE.sub(_escape, json.dumps(text, ensure_ascii=False))


def _escape(char: re.Match[str]) -> str:
    return f"\\U{ord(char[0]):08x}"


def _visible(text: str) -> str:
    """Remove control characters from a comment, because they could end it."""
    return "\n".join(_UNSAFE.sub(" ", line) for line in text.split("\n"))

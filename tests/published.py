"""Argument lists of Megatron: NVIDIA's published benchmark configurations, and the values that they give."""

from __future__ import annotations

import shlex
from pathlib import Path

from support import TESTS, unpacked

from fp8launch.megatron.arguments import FlagValue, as_parsed
from fp8launch.megatron.schema import FlagSchema


def published_arguments() -> list[Path]:
    """NVIDIA's published benchmark configurations as argument lists, NAME.args, by name."""
    return sorted(unpacked(TESTS / "data" / "published.tar.xz", "published").glob("*.args"))


def listed_values(file: Path, schema: FlagSchema) -> dict[str, FlagValue]:
    """Return the values of an argument list with one flag per line, by canonical name."""
    given: dict[str, FlagValue] = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        words = shlex.split(line, comments=True)
        if not words:
            continue
        option, *values = words
        flag = schema.find(option)
        assert flag is not None, option
        if flag.nargs is not None:
            given[option] = list(values)
        else:
            given[option] = values[0] if flag.takes_value else True
    return as_parsed(given, schema)

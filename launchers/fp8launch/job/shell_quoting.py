"""Shell quoting: the only place where outside text enters a script."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import dataclass

from fp8launch.megatron.arguments import Argument

INDENT = "    "


@dataclass(frozen=True)
class RawShell:
    """Shell text written by fp8launch, never taken from a recipe. Only this text is left unquoted."""

    text: str


Word = str | RawShell


def quote(word: Word) -> str:
    """Quote a word if a shell requires it."""
    if isinstance(word, RawShell):
        return word.text
    quoted = shlex.quote(word)
    if "," in word and quoted == word:
        # Bash does not need quotes around a comma, but in an array, readers and shellcheck take it for a separator.
        return f"'{word}'"
    return quoted


def indented(lines: Iterable[str]) -> list[str]:
    return [INDENT + line for line in lines]


def array_lines(assignment: str, words: Iterable[str]) -> list[str]:
    """Return the lines of a bash array, starting with `assignment`, such as `name=`. Words must already be quoted."""
    return [f"{assignment}(", *indented(words), ")"]


def flag_lines(arguments: Iterable[Argument]) -> list[str]:
    """Return one line per flag and its values, quoted for a shell."""
    return [" ".join(map(quote, argument.words)) for argument in arguments]

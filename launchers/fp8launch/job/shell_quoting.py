"""Quoting for a shell: the one place where words from outside get into a script."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import dataclass

from fp8launch.megatron.arguments import Argument

INDENT = "    "


@dataclass(frozen=True)
class RawShell:
    """Shell text that fp8launch wrote itself, never a recipe: the only text that is not quoted."""

    text: str


Word = str | RawShell


def quote(word: Word) -> str:
    """Return the word, quoted as far as a shell needs it."""
    if isinstance(word, RawShell):
        return word.text
    quoted = shlex.quote(word)
    if "," in word and quoted == word:
        # Bash needs no quotes around a comma, but in an array readers and shellcheck take it for a separator.
        return f"'{word}'"
    return quoted


def indented(lines: Iterable[str]) -> list[str]:
    return [INDENT + line for line in lines]


def array_lines(assignment: str, words: Iterable[str]) -> list[str]:
    """Return the lines of a bash array that begin with `assignment`, such as `name=`; the words are quoted already."""
    return [f"{assignment}(", *indented(words), ")"]


def flag_lines(arguments: Iterable[Argument]) -> list[str]:
    """Return one line for each flag with its values, quoted for a shell."""
    return [" ".join(map(quote, argument.words)) for argument in arguments]

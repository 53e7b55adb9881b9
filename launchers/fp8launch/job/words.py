"""Words as a shell must read them: the one place that quotes."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

INDENT = "    "


@dataclass(frozen=True)
class Expansion:
    """A piece of shell that we wrote, never a recipe: the only text that is not quoted."""

    text: str


Word = str | Expansion


def quote(word: Word) -> str:
    """A word as the shell must read it. Every value from outside passes here."""
    if isinstance(word, Expansion):
        return word.text
    # Bash needs no quotes around a comma, but in an array readers and shellcheck take it for a separator.
    return f"'{word}'" if "," in word and shlex.quote(word) == word else shlex.quote(word)


def flag_lines(argv: Sequence[str]) -> list[str]:
    """One line a flag with its values, quoted for a shell."""
    return [" ".join(map(quote, flag)) for flag in flags_of(argv)]


def flags_of(argv: Sequence[str]) -> list[tuple[str, ...]]:
    """An argument list as flags, each with its values."""
    flags: list[tuple[str, ...]] = []
    for word in argv:
        # A value such as -1 belongs to the flag before it.
        if word.startswith("--") or not flags:
            flags.append((word,))
        else:
            flags[-1] += (word,)
    return flags

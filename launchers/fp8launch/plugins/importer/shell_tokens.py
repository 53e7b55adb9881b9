"""The tokens of shell text that `shell_lexer` produces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True)
class Text:
    text: str
    quoted: bool


@dataclass(frozen=True)
class Variable:
    """`$name` or `${name...}`. `index` is "@" or "*" for a whole array; `fallback` is what follows `rule`."""

    name: str
    raw: str
    quoted: bool
    line: int
    index: str = ""
    rule: str = ""
    fallback: Word | None = None


@dataclass(frozen=True)
class Arithmetic:
    """`$((...))` with its inner text as a word."""

    inner: Word
    raw: str


@dataclass(frozen=True)
class Opaque:
    """Text that only a shell could replace, such as `$(date)`. `raw` shows at most the first word of a command."""

    raw: str
    line: int
    why: str


Part: TypeAlias = "Text | Variable | Arithmetic | Opaque"


@dataclass(frozen=True)
class Word:
    """One word as written. `array` holds the elements of `NAME=(...)`, whose `parts` are then `NAME=` alone."""

    parts: tuple[Part, ...]
    line: int
    array: tuple[Word, ...] | None = None

    @property
    def bare(self) -> str | None:
        """The text of a word without quotes and expansions; only such a word can be a keyword."""
        if self.array is None and len(self.parts) == 1 and isinstance(part := self.parts[0], Text) and not part.quoted:
            return part.text
        return None


@dataclass(frozen=True)
class Operator:
    text: str
    line: int


@dataclass(frozen=True)
class Redirect:
    """A redirection with its target. The body of a here-document is skipped."""

    text: str
    line: int


@dataclass(frozen=True)
class Sum:
    """The command `((...))`."""

    text: str
    line: int


Token: TypeAlias = "Word | Operator | Redirect | Sum"

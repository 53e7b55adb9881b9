"""Holes: marks inside a word for text that only running the script would give. They are reported, not guessed."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

# Private-use characters around the hole's number. Such characters in a script are replaced before it is read.
_MARK = re.compile("\ue000(\\d+)\ue001")
# Enough for the flags that a variable may hold.
_LONGEST = 400
_MARKS = re.compile("(?:\ue000\\d+\ue001)+")


@dataclass(frozen=True)
class Hole:
    """A value that only running the script would give."""

    raw: str
    line: int
    why: str

    def __str__(self) -> str:
        return f"{self.raw} of line {self.line} {self.why}"


@dataclass
class Holes:
    """The holes of one script; a mark in a word refers to one of them."""

    _all: list[Hole] = field(default_factory=list)
    _numbers: dict[Hole, int] = field(default_factory=dict)

    def mark(self, raw: str, line: int, why: str) -> str:
        """Add a hole and return its mark."""
        # The source text may itself contain the marks of earlier holes.
        raw, why = self.shown(raw), self.shown(why)
        if len(raw) > _LONGEST:
            raw = f"{raw[: _LONGEST - 3]}..."
        hole = Hole(raw, line, why)
        number = self._numbers.setdefault(hole, len(self._all))
        if number == len(self._all):
            self._all.append(hole)
        return f"\ue000{number}\ue001"

    def of(self, word: str) -> tuple[Hole, ...]:
        """Return the holes in a word."""
        return tuple(self._all[int(number)] for number in _MARK.findall(word))

    def shown(self, word: str) -> str:
        """Return a word with the source text of its holes."""
        return _MARKS.sub(lambda marks: "".join(self.texts(marks[0])), word)

    def fill(self, word: str) -> bool:
        """Return whether a word consists of holes alone."""
        return _MARKS.fullmatch(word) is not None

    def texts(self, word: str) -> list[str]:
        """Return the source texts of a word's holes. Assignments of several branches to one name become one text."""
        found: dict[str, dict[str, None]] = {}
        for hole in self.of(word):
            name, _, flags = hole.raw.partition("=... ")
            key = f"{name}=..." if flags else hole.raw
            found.setdefault(key, {}).update(dict.fromkeys(flags.split()))
        return [" ".join([text, *flags]) for text, flags in found.items()]


def is_known(*words: str) -> bool:
    """Return whether none of these words has a hole."""
    return not any(map(_MARK.search, words))


def without_marks(text: str) -> str:
    """Replace the characters of a text that could be mistaken for a mark."""
    return re.sub("[\ue000\ue001\0]", "\ufffd", text)

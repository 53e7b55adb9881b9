"""Holes: marks inside a word for text that only running the script would give. They are reported, not guessed."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

# Private-use characters around the hole's number. Such characters in a script are replaced before it is read.
_MARK = re.compile("\ue000(\\d+)\ue001")
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
        if len(raw) > 60:
            raw = f"{raw[:57]}..."
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
        # The assignments of several branches share a name.
        return _MARKS.sub(lambda marks: "".join(dict.fromkeys(hole.raw for hole in self.of(marks[0]))), word)


def is_known(*words: str) -> bool:
    """Return whether none of these words has a hole."""
    return not any(map(_MARK.search, words))


def without_marks(text: str) -> str:
    """Replace the characters of a text that could be mistaken for a mark."""
    return re.sub("[\ue000\ue001\0]", "\ufffd", text)

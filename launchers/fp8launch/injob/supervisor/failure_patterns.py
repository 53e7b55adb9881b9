"""The table of failures (failure_patterns.ini), and a matcher whose time is linear in the length of a line.

A log may contain anything, and a supervisor that spends minutes on one line blocks the allocation. So `.*`, for which a
regular expression tries every pair of positions, is removed, and the parts between are searched in order. Before that,
the fixed text that every match contains is searched, at memory speed.
"""

from __future__ import annotations

import configparser
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

# Depths of failures; failure_patterns.ini explains them.
CAUSE, EXCEPTION, PEER, END, VAGUE = range(5)
_DEPTHS = ("cause", "exception", "peer", "end", "vague")

# Slurm prints the same message whether somebody cancelled a step or srun ended it because a process failed.
STEP_CANCELLED = "step-cancelled"

_ANYTHING = ".*"
# An escaped character, a character class, a count of repetitions, or any other character.
_TOKEN = re.compile(r"\\.|\[(?:\\.|[^\]\\])+\]|\{[^}]*\}|.")
_SPECIAL = frozenset("^$.|()[]{}*+?\\")
_MAKES_OPTIONAL = ("*", "?", "{")
_SHORTEST = 3


class LinePattern:
    """A regular expression without alternatives at its top level; `.*` may stand there only, outside groups."""

    def __init__(self, expression: str) -> None:
        self.expression = expression
        self.needle = fixed_text(expression)
        self._parts: list[Any] = []  # compiled when a line contains the fixed text: most patterns never are

    def matches(self, line: str) -> bool:
        if self.needle not in line:
            return False
        if not self._parts:
            self._parts = [re.compile(part) for part in self.expression.split(_ANYTHING)]
        at = 0
        for part in self._parts:
            found = part.search(line, at)
            if found is None:
                return False
            at = found.end()
        return True


def fixed_text(expression: str) -> str:
    """Return the longest text that every match contains. Raises ValueError if it is too short to search for."""
    runs = [""]
    depth = 0
    tokens = _TOKEN.findall(expression)
    for token, following in zip(tokens, [*tokens[1:], ""]):  # noqa: B905 (Python 3.7 has no `strict`)
        depth += (token == "(") - (token == ")")
        character = _literal(token)
        if character is None or depth > 0 or following.startswith(_MAKES_OPTIONAL):
            runs.append("")
        else:
            runs[-1] += character
    longest = max(runs, key=len)
    if len(longest) < _SHORTEST:
        raise ValueError(f"{expression!r} matches lines that have no text in common")
    return longest


def _literal(token: str) -> str | None:
    """Return the only character that a token of an expression matches; None if there are several."""
    if token.startswith("\\"):
        return None if token[1].isalnum() else token[1]
    if token.startswith("["):
        return token[1] if len(token) == 3 else None
    return None if token[0] in _SPECIAL else token


class Pattern:
    """Lines of one meaning: any of the alternatives. `retry` is None if an earlier section states it for this code."""

    def __init__(self, depth: int, code: str, advice: str, retry: str | None, alternatives: Iterable[str]) -> None:
        self.depth, self.code, self.advice, self.retry = depth, code, advice, retry
        self.alternatives = [LinePattern(alternative) for alternative in alternatives]

    def matches(self, line: str) -> bool:
        """Return whether any of the alternatives occurs in the line."""
        # Every line meets hundreds of alternatives: `any` and calls without a reason would double the time.
        for alternative in self.alternatives:  # noqa: SIM110
            if alternative.needle in line and alternative.matches(line):
                return True
        return False


def _read_table() -> tuple[Pattern, ...]:
    table = configparser.RawConfigParser(delimiters="=", comment_prefixes="#")
    table.read_string(Path(__file__).with_suffix(".ini").read_text(encoding="utf-8"))
    patterns = []
    for name in table.sections():
        depth, code = name.split()
        section = table[name]
        advice = section["advice"].replace("\n", " ")
        lines = section["lines"].strip().split("\n")
        patterns.append(Pattern(_DEPTHS.index(depth), code, advice, section.get("retry"), lines))
    return tuple(patterns)


PATTERNS = _read_table()


def needles(patterns: Iterable[Pattern], *more: str) -> tuple[bytes, ...]:
    """Return texts such that every matching line contains one. A text that contains another text is left out."""
    texts = {alternative.needle for pattern in patterns for alternative in pattern.alternatives} | set(more)
    shortest: list[str] = []
    for text in sorted(texts, key=len):
        if not any(other in text for other in shortest):
            shortest.append(text)
    return tuple(text.encode() for text in sorted(shortest))

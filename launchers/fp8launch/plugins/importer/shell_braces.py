"""Brace expansion, bash's first step: `/data/{a,b}` becomes two words and `{1..3}` three."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from fp8launch.plugins.importer.shell_tokens import Part, Text, Word

MAX_WORDS = 10_000
MAX_PIECES = 1 << 20
MAX_DEPTH = 50
# Longer text between braces is not a sequence.
_LONGEST_SEQUENCE = 40

# A word in its smallest pieces: single unquoted characters, and everything else unchanged.
_Piece: TypeAlias = "str | Part"
_NUMBERS = re.compile(r"(-?\d{1,9})\.\.(-?\d{1,9})(?:\.\.(-?\d{1,9}))?")
_LETTERS = re.compile(r"([A-Za-z])\.\.([A-Za-z])(?:\.\.(-?\d{1,9}))?")


class TooManyWords(ValueError):
    """Braces that expand to more words than any launch script needs."""


def expand_braces(word: Word) -> list[Word]:
    """Return the words that a word with braces expands to; most words expand to themselves.

    Raises TooManyWords.
    """
    if not any(isinstance(part, Text) and not part.quoted and "{" in part.text for part in word.parts):
        return [word]
    pieces = list(itertools.chain.from_iterable(map(_pieces, word.parts)))
    found: list[Word] = []
    total = 0
    for each in _expanded(pieces):
        total += len(each)
        if len(found) >= MAX_WORDS or total > MAX_PIECES:
            raise TooManyWords
        found.append(Word(tuple(_joined(each)), word.line))
    return found


def _pieces(part: Part) -> Sequence[_Piece]:
    if isinstance(part, Text) and not part.quoted:
        return part.text
    return [part]


def _joined(pieces: Sequence[_Piece]) -> Iterator[Part]:
    """Join pieces into the parts of a word."""
    for plain, group in itertools.groupby(pieces, lambda piece: isinstance(piece, str)):
        if plain:
            yield Text("".join(map(str, group)), False)
        else:
            yield from (piece for piece in group if not isinstance(piece, str))


def _expanded(pieces: Sequence[_Piece]) -> Iterator[list[_Piece]]:
    for start, (end, commas) in sorted(_pairs(pieces).items()):
        if not commas and end - start > _LONGEST_SEQUENCE:
            continue
        alternatives = _alternatives(pieces[start + 1 : end], [comma - start - 1 for comma in commas])
        if alternatives is None:
            continue
        for middle in alternatives:
            for rest in _expanded(pieces[end + 1 :]):
                yield [*pieces[:start], *middle, *rest]
        return
    yield list(pieces)


def _pairs(pieces: Sequence[_Piece]) -> dict[int, tuple[int, list[int]]]:
    """Return the closing brace of each opening brace, and the commas between its alternatives."""
    found: dict[int, tuple[int, list[int]]] = {}
    open_braces: list[tuple[int, list[int]]] = []
    for at, piece in enumerate(pieces):
        if piece == "{":
            open_braces.append((at, []))
        elif piece == "," and open_braces:
            if len(open_braces) > MAX_DEPTH:
                raise TooManyWords
            open_braces[-1][1].append(at)
        elif piece == "}" and open_braces:
            start, commas = open_braces.pop()
            found[start] = (at, commas)
    return found


def _alternatives(inner: Sequence[_Piece], commas: Sequence[int]) -> Iterator[Sequence[_Piece]] | None:
    """Return the words that the text between two braces expands to, or None if it is neither a list nor a sequence."""
    if commas:
        bounds = itertools.pairwise([-1, *commas, len(inner)])
        return itertools.chain.from_iterable(_expanded(inner[left + 1 : right]) for left, right in bounds)
    if all(isinstance(piece, str) for piece in inner):
        return _sequence("".join(map(str, inner)))
    return None


def _sequence(text: str) -> Iterator[str] | None:
    """Expand a sequence such as `1..3`, `01..10..2` or `a..e`."""
    if found := _NUMBERS.fullmatch(text):
        ends = found[1], found[2]
        width = 0
        if any(re.match(r"-?0\d", end) for end in ends):
            width = max(map(len, ends))
        return (f"{number:0{width}d}" for number in _steps(int(ends[0]), int(ends[1]), found[3]))
    if found := _LETTERS.fullmatch(text):
        return map(chr, _steps(ord(found[1]), ord(found[2]), found[3]))
    return None


def _steps(first: int, last: int, step: str | None) -> range:
    size = abs(int(step or 1)) or 1
    if first > last:
        return range(first, last - 1, -size)
    return range(first, last + 1, size)

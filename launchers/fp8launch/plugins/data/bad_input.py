"""Describe and count documents that cannot be used."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from fp8launch.injob.regular_files import open_regular

# Descriptions by reason, in the order in which summaries list them.
REASONS = {
    "broken-json": "not valid JSON",
    "not-an-object": "JSON, but not an object with fields",
    "no-field": "the field is missing",
    "not-text": "the field is not text",
    "invalid-utf8": "not valid UTF-8",
    "too-long": "longer than --max-document",
    "cut-short": "the file is truncated or damaged from here on",
    "unpacks-too-far": "the file decompresses to far more data than text would",
    "no-conversation": "no conversation in a known format",
    "role": "a role that is not known here",
    "turn": "a turn without text",
    "order": "turns in the wrong order",
    "no-answer": "no turn of the assistant",
    "template": "the chat template refuses it",
    "untrained": "no token is trained on",
    "beyond-sequence": "longer than --sequence",
    "beyond-vocabulary": "a token id is outside the vocabulary",
    "empty": "no text",
}
# Always left out, whatever --on-error says, because no text is lost.
HARMLESS = frozenset({"empty"})
# How many documents are listed. The others are only counted.
NAMED = 5


@dataclass(frozen=True)
class BadInput:
    """A document that was left out. `line` counts from byte offset `begin`. `unit` is "line", "row" or "file"."""

    reason: str
    file: str
    line: int
    begin: int = 0
    detail: str = ""
    unit: str = "line"

    def place(self) -> str:
        """Return FILE:LINE, with the line counted from the start of the file."""
        if self.unit == "file":
            return self.file
        if self.unit == "row":
            return f"{self.file} row {self.line}"
        return f"{self.file}:{self.line + _lines_before(self.file, self.begin)}"

    def words(self) -> str:
        """Return the place and the reason as one line."""
        return f"{self.place()}: {self.why()}"

    def why(self) -> str:
        """Return the reason with its detail."""
        if not self.detail:
            return REASONS[self.reason]
        return f"{REASONS[self.reason]} ({self.detail})"

    def as_json(self) -> dict[str, object]:
        return asdict(self)


def summary(counts: dict[str, int]) -> str:
    """Return the counts by reason, as text."""
    return ", ".join(f"{counts[reason]:,} {text}" for reason, text in REASONS.items() if counts.get(reason))


def first_few(found: Iterable[BadInput]) -> list[BadInput]:
    """Return the documents to list: first documents whose text is lost, then empty ones, both in order."""
    return sorted(found, key=lambda bad: bad.reason in HARMLESS)[:NAMED]


def _lines_before(file: str, end: int) -> int:
    lines = 0
    with open_regular(Path(file)) as stream:
        while end > 0 and (block := stream.read(min(end, 4 << 20))):
            lines += block.count(b"\n")
            end -= len(block)
    return lines

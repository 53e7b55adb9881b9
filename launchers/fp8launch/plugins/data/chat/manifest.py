"""DIR/chat.manifest.json: what a folder of conversations holds, and what it was built with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8launch.datasets.manifest import read_json

MANIFEST = "chat.manifest.json"
TEMPLATE = "chat_template.jinja"
FORMAT = 1
SPLITS = ("training", "validation", "test")
# The lengths of conversations are listed by length, so a manifest of long ones is larger than those of other datasets.
LARGEST = 64 << 20


@dataclass(frozen=True)
class Lengths:
    """How many conversations have each number of tokens."""

    counts: Mapping[int, int]

    @staticmethod
    def of(lengths: Sequence[int]) -> Lengths:
        return Lengths(Counter(lengths))

    @property
    def conversations(self) -> int:
        return sum(self.counts.values())

    @property
    def longest(self) -> int:
        return max(self.counts, default=0)

    def longer_than(self, sequence: int) -> int:
        """Count the conversations that a sequence of this length does not hold. Their last token is only a label."""
        return sum(count for length, count in self.counts.items() if length - 1 > sequence)

    def quantile(self, share: float) -> int:
        """Return the length that this share of the conversations does not exceed."""
        left = share * self.conversations
        for length in sorted(self.counts):
            left -= self.counts[length]
            if left <= 0:
                return length
        return self.longest

    def as_json(self) -> list[list[int]]:
        return [[length, self.counts[length]] for length in sorted(self.counts)]


def lengths_of(split: Mapping[str, Any]) -> Lengths:
    """Return the lengths that a manifest states of a split."""
    return Lengths({int(length): int(count) for length, count in split["lengths"]})


def read_chat_manifest(folder: Path) -> dict[str, Any] | None:
    """Return the manifest of a folder; None if it has none. Raises OSError and ValueError if it cannot be read."""
    raw = read_json(folder / MANIFEST, LARGEST)
    if raw is None:
        return None
    if not isinstance(raw, dict) or raw.get("format") != FORMAT or not isinstance(raw.get("splits"), dict):
        raise ValueError(f"{folder / MANIFEST} is not a manifest of conversations")
    return raw

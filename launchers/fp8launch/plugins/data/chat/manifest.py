"""DIR/chat.manifest.json: what a folder of conversations holds, and what it was built with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fp8launch.datasets.manifest import read_json

MANIFEST = "chat.manifest.json"
TEMPLATE = "chat_template.jinja"
FORMAT = 1
SPLITS = ("training", "validation", "test")
# The manifest counts conversations by length, so with long conversations it is larger than other manifests.
LARGEST = 64 << 20


class _Part(BaseModel):
    """The values of a manifest that reports use. Others are ignored."""

    model_config = ConfigDict(strict=True)


class _File(_Part):
    bytes: int
    sha256: str


class _Split(_Part):
    conversations: int
    tokens: int
    trained_tokens: int
    lengths: list[Annotated[list[int], Field(min_length=2, max_length=2)]]
    file: _File


class _Efficiency(_Part):
    packing_efficiency: float
    packing_factor: float


class _PackedSplit(_Part):
    sequences: int
    left_out: int
    cut: int
    metadata: _Efficiency
    file: _File


class _Packed(_Part):
    size: int
    training: _PackedSplit | None = None
    validation: _PackedSplit | None = None


class _Tokenizer(_Part):
    name: str
    file: str
    sha256: str
    vocab_size: int


class _Manifest(_Part):
    format: Literal[1]
    sequence: int | None
    splits: dict[Literal["training", "validation", "test"], _Split]
    packed: _Packed | None
    tokenizer: _Tokenizer


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
    try:
        _Manifest.model_validate(raw)
    except ValidationError as exc:
        wrong = exc.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, wrong["loc"])) or "content"
        raise ValueError(f"{folder / MANIFEST} is not a manifest of conversations: {place}: {wrong['msg']}") from None
    found: dict[str, Any] = raw
    return found

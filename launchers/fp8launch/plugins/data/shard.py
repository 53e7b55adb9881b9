"""Build one shard: write its documents as token ids to a file, which is renamed when it is complete."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from fp8launch.datasets.manifest import read_json
from fp8launch.plugins.data.bad_input import HARMLESS, BadInput, first_few
from fp8launch.plugins.data.documents import Document, documents
from fp8launch.plugins.data.extras import load
from fp8launch.plugins.data.files import sync, write_json
from fp8launch.plugins.data.plan import BuildPlan
from fp8launch.plugins.data.tokenizer import Encoder

# The size of a batch, which is encoded in one call.
BATCH_BYTES, BATCH_DOCUMENTS = 1 << 20, 2048
LENGTH_BYTES = 4
Batch: TypeAlias = list[Document]
# Called with the documents, tokens and input bytes since the last call.
Progress = Callable[[int, int, int], None]


@dataclass(frozen=True)
class Encoded:
    """A batch in the format of a shard's files, without its `bad` documents. `taken` counts bytes of input files."""

    tokens: bytes
    lengths: bytes
    bad: list[BadInput]
    taken: int


# Encodes batches, here or in other processes, and yields them in order. Bad input passes through.
EncodeAll: TypeAlias = Callable[[Iterator["Batch | BadInput"]], Iterator["Encoded | BadInput"]]


class StopOnBadInput(Exception):
    """A document is bad and --on-error is "fail"."""

    def __init__(self, bad: BadInput) -> None:
        super().__init__(bad)
        self.bad = bad


@dataclass
class ShardResult:
    """The counts of a finished shard, and the documents that were left out."""

    documents: int = 0
    tokens: int = 0
    bytes: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    examples: list[BadInput] = field(default_factory=list)

    def count(self, bad: BadInput, skip: bool) -> None:
        """Count a document that is left out. Raises StopOnBadInput if that is not allowed and text would be lost."""
        if not skip and bad.reason not in HARMLESS:
            raise StopOnBadInput(bad)
        self.skipped[bad.reason] = self.skipped.get(bad.reason, 0) + 1
        # Keep a few of each reason, so that a flood of one kind does not hide the others.
        if self.skipped[bad.reason] <= 5:
            self.examples.append(bad)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def shard_file(folder: Path, number: int, ending: str) -> Path:
    return folder / f"{number:06d}.{ending}"


def finished(folder: Path, number: int) -> ShardResult | None:
    """Return the result of a finished shard, or None if it must be built."""
    try:
        content = read_json(shard_file(folder, number, "json"))
        if content is None:
            return None
        examples = [BadInput(**each) for each in content.pop("examples")]
        return ShardResult(**content, examples=examples)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def build_shard(plan: BuildPlan, number: int, encode_all: EncodeAll, skip: bool, progress: Progress) -> ShardResult:
    """Write the tokens and lengths of one shard. Raises StopOnBadInput unless `skip`, and OSError if the disk is full.

    The record is written last; a shard without one is built again.
    """
    own = f"{os.uname().nodename}.{os.getpid()}.partial"
    partial = {ending: shard_file(plan.folder, number, f"{ending}.{own}") for ending in ("bin", "lengths")}
    result = ShardResult()
    try:
        with partial["bin"].open("wb") as tokens, partial["lengths"].open("wb") as lengths:
            for piece in encode_all(batches(plan, number)):
                if isinstance(piece, BadInput):
                    result.count(piece, skip)
                    continue
                for bad in piece.bad:
                    result.count(bad, skip)
                tokens.write(piece.tokens)
                lengths.write(piece.lengths)
                count, read = len(piece.lengths) // LENGTH_BYTES, len(piece.tokens) // plan.token_bytes
                result.documents += count
                result.tokens += read
                result.bytes += piece.taken
                progress(count, read, piece.taken)
        for ending, file in partial.items():
            sync(file)
            file.replace(shard_file(plan.folder, number, ending))
        write_json(shard_file(plan.folder, number, "json"), result.as_json())
    finally:
        for file in partial.values():
            file.unlink(missing_ok=True)
    return result


def batches(plan: BuildPlan, number: int) -> Iterator[Batch | BadInput]:
    """Yield batches of documents of a shard, with the bad input among them."""
    batch: Batch = []
    size = 0
    for each in documents(plan.shards[number], plan.reading):
        if isinstance(each, BadInput):
            yield each
            continue
        if batch and size + each.size > BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(each)
        size += each.size
        if len(batch) == BATCH_DOCUMENTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def encode(plan: BuildPlan, encoder: Encoder, batch: Batch) -> Encoded:
    """Encode the documents of a batch in the format of a shard's files."""
    numpy: Any = load("numpy", "building a dataset")
    flat, lengths = encoder.encode([document.content for document in batch])
    keep, bad = _usable(plan.vocab_limit, batch, flat, lengths)
    if not keep.all():
        flat, lengths = flat[numpy.repeat(keep, lengths)], lengths[keep]
    after = encoder.suffix
    if plan.tokenizer.eod is not None:
        after = (*after, plan.tokenizer.eod)
    flat, lengths = _with_ends(flat, lengths, encoder.prefix, after)
    token_type = numpy.dtype(plan.token_type).newbyteorder("<")
    tokens = flat.astype(token_type, copy=False).tobytes()
    return Encoded(tokens, lengths.astype("<i4").tobytes(), bad, sum(document.taken for document in batch))


def _usable(limit: int, batch: Batch, flat: Any, lengths: Any) -> tuple[Any, list[BadInput]]:
    """Split documents into those to write (they have tokens, all inside the vocabulary) and bad input."""
    numpy: Any = load("numpy", "building a dataset")
    keep = lengths > 0
    bad = [batch[at].bad("empty", "no tokens") for at in numpy.flatnonzero(~keep)]
    if len(flat) and (int(flat.max()) >= limit or int(flat.min()) < 0):
        ends = numpy.cumsum(lengths)
        wrong = numpy.flatnonzero((flat >= limit) | (flat < 0))
        owners = numpy.searchsorted(ends, wrong, side="right")
        for at, first in zip(*numpy.unique(owners, return_index=True), strict=True):
            detail = f"id {int(flat[wrong[first]])}, and the vocabulary has {limit}"
            bad.append(batch[at].bad("beyond-vocabulary", detail))
            keep[at] = False
    return keep, bad


def _with_ends(flat: Any, lengths: Any, before: tuple[int, ...], after: tuple[int, ...]) -> tuple[Any, Any]:
    """Add the prefix and suffix ids to every document."""
    numpy: Any = load("numpy", "building a dataset")
    extra = len(before) + len(after)
    if not extra or not len(lengths):
        return flat, lengths
    longer = lengths + extra
    ends = numpy.cumsum(longer)
    begins = ends - longer
    found = numpy.empty(int(ends[-1]), dtype=numpy.int64)
    is_text = numpy.ones(len(found), dtype=bool)
    for at, token in enumerate(before):
        found[begins + at], is_text[begins + at] = token, False
    for at, token in enumerate(after):
        found[ends - len(after) + at], is_text[ends - len(after) + at] = token, False
    found[is_text] = flat
    return found, longer


def examples_of(results: list[ShardResult]) -> list[BadInput]:
    """Return the bad documents of all shards that are to be named."""
    return first_few(bad for result in results for bad in result.examples)

"""One shard of a build: its documents as token ids in a file, which gets its name when it is whole."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from fp8launch.data.bad_input import HARMLESS, BadInput, first_few
from fp8launch.data.documents import Document, documents
from fp8launch.data.extras import load
from fp8launch.data.files import read_json, sync, write_json
from fp8launch.data.plan import BuildPlan
from fp8launch.data.tokenizer import Encoder

# A batch is encoded at once.
BATCH_BYTES, BATCH_DOCUMENTS = 1 << 20, 2048
LENGTH_BYTES = 4
Batch: TypeAlias = list[Document]
# Documents, tokens and bytes of input since the last call.
Progress = Callable[[int, int, int], None]


@dataclass(frozen=True)
class Encoded:
    """A batch as the files of a shard have it, without its `bad` documents. `taken` is in bytes of the input files."""

    tokens: bytes
    lengths: bytes
    bad: list[BadInput]
    taken: int


# Encodes batches, in this process or in others, and yields them in their order; what cannot be read passes through.
EncodeAll: TypeAlias = Callable[[Iterator["Batch | BadInput"]], Iterator["Encoded | BadInput"]]


class StopOnBadInput(Exception):
    """A document is bad, and --on-error is fail."""

    def __init__(self, bad: BadInput) -> None:
        super().__init__(bad)
        self.bad = bad


@dataclass
class ShardResult:
    """What is in a finished shard, and what was left out of it."""

    documents: int = 0
    tokens: int = 0
    bytes: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    examples: list[BadInput] = field(default_factory=list)

    def count(self, bad: BadInput, skip: bool) -> None:
        """Count a document that is left out. Raises StopOnBadInput where none may be, unless its loss is harmless."""
        if not skip and bad.reason not in HARMLESS:
            raise StopOnBadInput(bad)
        self.skipped[bad.reason] = self.skipped.get(bad.reason, 0) + 1
        # Of each reason a few are kept: a flood of one kind hides no other.
        if self.skipped[bad.reason] <= 5:
            self.examples.append(bad)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def shard_file(folder: Path, number: int, ending: str) -> Path:
    return folder / f"{number:06d}.{ending}"


def finished(folder: Path, number: int) -> ShardResult | None:
    """Return what is in a finished shard; None for one that has to be built."""
    try:
        content = read_json(shard_file(folder, number, "json"))
        if content is None:
            return None
        examples = [BadInput(**each) for each in content.pop("examples")]
        return ShardResult(**content, examples=examples)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def build_shard(plan: BuildPlan, number: int, encode_all: EncodeAll, skip: bool, progress: Progress) -> ShardResult:
    """Write the tokens and the lengths of one shard. Raises StopOnBadInput unless `skip`, OSError for a full disk.

    The record is written last: a shard without it is built again.
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
    """Yield the documents of a shard, some at a time, and what cannot be read."""
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
    """Return the documents of a batch as they stand in the files of a shard."""
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
    """Which documents can be written: those with tokens, all of them inside the vocabulary; and what is wrong else."""
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
    """Put ids around every document's own."""
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
    """Return the bad documents to name, of all shards."""
    return first_few(bad for result in results for bad in result.examples)

"""Read a dataset back: the lengths of its documents, the tokens of one, and how often ids occur."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8launch.datasets.index_format import HEADER, TYPES, BrokenIndex, Index, code_of, read_index
from fp8launch.datasets.manifest import dataset_file
from fp8launch.diagnostics import ANSWER_IS_NO, UserError, error, nearest
from fp8launch.injob.regular_files import open_regular
from fp8launch.plugins.data.extras import load

PART = 1 << 20
# Larger than any vocabulary. Ids are counted in a table with one row per id.
_MOST_IDS = 1 << 24


@dataclass(frozen=True)
class Bucket:
    """Documents with `begin` to `end` - 1 tokens."""

    begin: int
    end: int
    documents: int
    tokens: int


@dataclass(frozen=True)
class Lengths:
    shortest: int
    longest: int
    mean: float
    buckets: tuple[Bucket, ...]


def prefix_of(text: str) -> Path:
    """Return the prefix of a dataset, which the user may give with or without a suffix."""
    path = Path(text).expanduser().absolute()
    for ending in (".bin", ".idx", ".manifest.json"):
        if path.name.endswith(ending):
            return path.with_name(path.name.removesuffix(ending))
    return path


def open_index(prefix: Path) -> Index:
    """Read the index of a dataset. Raises UserError if it is missing or damaged."""
    try:
        return read_index(prefix)
    except BrokenIndex as exc:
        raise _broken(prefix, str(exc)) from None
    except OSError as exc:
        near = None
        if prefix.parent.is_dir():
            near = nearest(prefix.name, [path.stem for path in prefix.parent.glob("*.idx")])
        fix = "name the path that .bin and .idx share"
        if any(prefix.with_name(f"{prefix.name}.{ending}").exists() for ending in ("bin", "idx")):
            fix = "copy the missing file next to the other one, or build the dataset again"
        elif near:
            fix = f"did you mean {prefix.parent / near}?"
        message = f"there is no dataset {prefix}: {exc.strerror}"
        raise error("data-missing", message, str(exc.filename or prefix), fix) from None


def _broken(prefix: Path, why: str) -> UserError:
    return error("data-broken", f"{prefix}: {why}", str(prefix), "build it again", ANSWER_IS_NO)


def lengths_in_parts(prefix: Path, index: Index) -> Iterator[Any]:
    """Yield arrays of document lengths in tokens. Raises UserError for a negative length."""
    numpy: Any = load("numpy", "reading a dataset")
    with open_regular(dataset_file(prefix, "idx")) as stream:
        stream.seek(HEADER)
        left = index.sequences
        while left:
            count = min(left, PART)
            part = numpy.frombuffer(stream.read(4 * count), "<i4")
            if int(part.min()) < 0:
                raise _broken(prefix, "the .idx has documents with less than zero tokens")
            yield part
            left -= count


def measure(prefix: Path, index: Index) -> Lengths:
    """Count the documents by length, in buckets that end at powers of two."""
    numpy: Any = load("numpy", "reading a dataset")
    documents, tokens = numpy.zeros(33, numpy.int64), numpy.zeros(33, numpy.int64)
    shortest, longest = 1 << 31, 0
    for part in lengths_in_parts(prefix, index):
        shortest, longest = min(shortest, int(part.min())), max(longest, int(part.max()))
        powers = numpy.frexp(part.astype(numpy.float64))[1]
        documents += numpy.bincount(powers, minlength=33)
        tokens += numpy.bincount(powers, weights=part, minlength=33).astype(numpy.int64)
    used = numpy.flatnonzero(documents)
    buckets = []
    for power in range(int(used[0]), int(used[-1]) + 1):
        buckets.append(Bucket((1 << power) >> 1, 1 << power, int(documents[power]), int(tokens[power])))
    return Lengths(shortest, longest, index.tokens / index.sequences, tuple(buckets))


def document(prefix: Path, index: Index, number: int, most: int) -> list[int]:
    """Return the first tokens of a document, at most `most`."""
    numpy: Any = load("numpy", "reading a dataset")
    with open_regular(dataset_file(prefix, "idx")) as stream:
        stream.seek(HEADER + 4 * number)
        (length,) = struct.unpack("<i", stream.read(4))
        stream.seek(HEADER + 4 * index.sequences + 8 * number)
        (offset,) = struct.unpack("<q", stream.read(8))
    _, width = TYPES[code_of(index.token_type)]
    if length < 0 or offset < 0:
        raise _broken(prefix, f"the .idx says that document {number} has {length} tokens at byte {offset}")
    with open_regular(dataset_file(prefix, "bin")) as stream:
        stream.seek(offset)
        raw = stream.read(min(length, most) * width)
    found: list[int] = numpy.frombuffer(raw, numpy.dtype(index.token_type).newbyteorder("<")).tolist()
    return found


@dataclass(frozen=True)
class TokenUse:
    """How often ids occur in a dataset. `unigram_entropy` is in nats per token."""

    largest: int
    different: int
    unigram_entropy: float


def count_tokens(prefix: Path, index: Index) -> TokenUse:
    """Count every token. A model that only knows the frequencies has the unigram entropy as its loss."""
    numpy: Any = load("numpy", "reading a dataset")
    _, width = TYPES[code_of(index.token_type)]
    counts = numpy.zeros(1, numpy.int64)
    form = numpy.dtype(index.token_type).newbyteorder("<")
    with open_regular(dataset_file(prefix, "bin")) as stream:
        while raw := stream.read(PART * width):
            ids = numpy.frombuffer(raw, form)
            for wrong in (int(ids.min()), int(ids.max())):
                if not 0 <= wrong < _MOST_IDS:
                    raise _broken(prefix, f"the .bin has the token id {wrong}, which is in no vocabulary")
            part = numpy.bincount(ids)
            shorter, longer = sorted((counts, part), key=len)
            counts = longer.astype(numpy.int64)
            counts[: len(shorter)] += shorter
    shares = counts[counts > 0] / counts.sum()
    return TokenUse(len(counts) - 1, len(shares), float(-(shares * numpy.log(shares)).sum()))

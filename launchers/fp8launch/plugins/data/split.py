"""Split a dataset by documents, at random with a seed or in order."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from fp8launch import __version__
from fp8launch.datasets.index_format import TYPES, Index, code_of
from fp8launch.datasets.manifest import FORMAT, dataset_file, read_manifest
from fp8launch.diagnostics import ANSWER_IS_NO, error
from fp8launch.injob.regular_files import open_regular
from fp8launch.plugins.data.extras import load
from fp8launch.plugins.data.files import sync, write_json
from fp8launch.plugins.data.lengths import lengths_in_parts
from fp8launch.plugins.data.merge import files_record, write_index

# Documents are copied in groups of at most this many documents and tokens.
MOST_TOKENS = 16 << 20


@dataclass(frozen=True)
class Part:
    """A part to write, with its share of the documents."""

    prefix: Path
    share: float


@dataclass
class _Files:
    tokens: Any
    lengths: Any
    documents: int = 0
    written: int = 0


def split_dataset(
    prefix: Path, index: Index, parts: Sequence[Part], seed: int | None, progress: Callable[[int], None]
) -> list[dict[str, Any]]:
    """Write the parts and return their manifests. Without a seed, documents keep their order.

    Files are renamed when all parts are complete. Raises UserError if a part would be empty.
    """
    owners = _owners(index, parts, seed)
    partial = [part.prefix.with_name(f".{part.prefix.name}.split") for part in parts]
    endings = ("bin", "idx", "lengths")
    try:
        with contextlib.ExitStack() as stack:
            opened = []
            for path in partial:
                tokens = stack.enter_context(dataset_file(path, "bin").open("wb"))
                lengths = stack.enter_context(dataset_file(path, "lengths").open("wb"))
                opened.append(_Files(tokens, lengths))
            _distribute(prefix, index, owners, opened, progress)
        for path, files in zip(partial, opened, strict=True):
            with dataset_file(path, "idx").open("wb") as stream:
                write_index(stream, dataset_file(path, "lengths"), index.token_type, files.documents)
        manifests = []
        for part, path, files in zip(parts, partial, opened, strict=True):
            manifests.append(_name(prefix, index, part, path, files, seed))
        return manifests
    finally:
        for path in partial:
            for ending in endings:
                dataset_file(path, ending).unlink(missing_ok=True)


def _owners(index: Index, parts: Sequence[Part], seed: int | None) -> Any:
    """Return the index of the part for each document."""
    numpy: Any = load("numpy", "splitting a dataset")
    if index.documents != index.sequences:
        message = "documents of several sequences cannot be split here"
        raise error("data-split", message, "PREFIX", "split the text before it is tokenized", ANSWER_IS_NO)
    shares = list(itertools.accumulate(part.share for part in parts))
    counts = []
    begin = 0
    for part, share in zip(parts, shares, strict=True):
        end = round(index.documents * share / shares[-1])
        counts.append(end - begin)
        begin = end
        if counts[-1] == 0:
            message = f"{part.prefix.name} would get none of the {index.documents:,} documents"
            raise error("data-split", message, "--part", "give it a larger share", ANSWER_IS_NO)
    owners = numpy.repeat(numpy.arange(len(parts), dtype=numpy.uint8), counts)
    if seed is not None:
        numpy.random.default_rng(seed).shuffle(owners)
    return owners


def _distribute(prefix: Path, index: Index, owners: Any, opened: list[_Files], progress: Callable[[int], None]) -> None:
    numpy: Any = load("numpy", "splitting a dataset")
    _, width = TYPES[code_of(index.token_type)]
    with open_regular(dataset_file(prefix, "bin")) as stream:
        first = 0
        for lengths in lengths_in_parts(prefix, index):
            ends = numpy.cumsum(lengths, dtype=numpy.int64)
            begin = 0
            while begin < len(lengths):
                before = int(ends[begin] - lengths[begin])
                end = max(begin + 1, int(numpy.searchsorted(ends, before + MOST_TOKENS, side="right")))
                some, owned = lengths[begin:end], owners[first + begin : first + end]
                raw = numpy.frombuffer(stream.read(int(some.sum(dtype=numpy.int64)) * width), f"V{width}")
                of_token = numpy.repeat(owned, some)
                for number, files in enumerate(opened):
                    kept = some[owned == number]
                    files.tokens.write(raw[of_token == number].tobytes())
                    files.lengths.write(kept.astype("<i4").tobytes())
                    files.documents += len(kept)
                    files.written += int(kept.sum(dtype=numpy.int64))
                begin = end
                progress(first + begin)
            first += len(lengths)


def _name(prefix: Path, index: Index, part: Part, path: Path, files: _Files, seed: int | None) -> dict[str, Any]:
    parts = {ending: dataset_file(path, ending) for ending in ("bin", "idx")}
    for file in parts.values():
        sync(file)
    vocab_limit, tokenizer = 0, None
    with contextlib.suppress(ValueError):
        if source := read_manifest(prefix):
            vocab_limit, tokenizer = source.vocab_limit, source.raw.get("tokenizer")
    record = {
        "format": FORMAT,
        "made_by": f"fp8launch {__version__}",
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "documents": files.documents,
        "tokens": files.written,
        "token_type": index.token_type,
        "vocab_limit": vocab_limit,
        "files": files_record(parts),
        "tokenizer": tokenizer,
        "skipped": {},
        "split_of": str(prefix),
        "share": part.share,
        "seed": seed,
    }
    for ending, file in parts.items():
        file.replace(dataset_file(part.prefix, ending))
    write_json(dataset_file(part.prefix, "manifest.json"), record)
    return record

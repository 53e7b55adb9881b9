"""PREFIX.manifest.json: the sources of a dataset, and the checksums of its files."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8launch.injob.regular_files import open_regular, read_regular

FORMAT = 1
# A manifest that names 1000 sources is several times smaller.
MAX_JSON = 4 << 20
LARGEST_TOKENIZER = 256 << 20
_BLOCK = 4 << 20


@dataclass(frozen=True)
class TokenizerRecord:
    """The tokenizer that a dataset was built with; `eod` is the id of its end of document."""

    kind: str
    vocab_size: int
    eod: int | None
    sha256: str | None
    file: str | None


@dataclass(frozen=True)
class Manifest:
    """The parts of a manifest that are used; `raw` is all of it.

    `files` maps `bin` and `idx` to size in bytes and SHA-256. Every token id is below `vocab_limit`.
    """

    documents: int
    tokens: int
    files: dict[str, tuple[int, str]]
    tokenizer: TokenizerRecord | None
    vocab_limit: int
    raw: dict[str, Any]


def dataset_file(prefix: Path, ending: str) -> Path:
    """Return PREFIX.ENDING. A prefix may contain dots."""
    return prefix.with_name(f"{prefix.name}.{ending}")


def read_json(path: Path, limit: int = MAX_JSON) -> Any:
    """Return the content of a JSON file of at most `limit` bytes; None if the file does not exist.

    Raises OSError if it cannot be read, and ValueError if it is larger, no regular file or no JSON.
    """
    try:
        return json.loads(read_regular(path, limit).decode("utf-8", "surrogateescape"))
    except FileNotFoundError:
        return None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def sha256(path: Path) -> str:
    """Return the checksum of a file."""
    found = hashlib.sha256()
    with open_regular(path) as stream:
        while block := stream.read(_BLOCK):
            found.update(block)
    return found.hexdigest()


def tokenizer_sha256(file: Path) -> str:
    """Return the checksum of a tokenizer's file. Raises OSError and ValueError for what cannot be one."""
    return hashlib.sha256(read_regular(file, LARGEST_TOKENIZER)).hexdigest()


def read_manifest(prefix: Path) -> Manifest | None:
    """Return the manifest of a dataset; None if it has none. Raises OSError and ValueError if it cannot be read."""
    raw = read_json(dataset_file(prefix, "manifest.json"))
    if raw is None:
        return None
    try:
        tokenizer = raw.get("tokenizer")
        record = None
        if tokenizer is not None:
            record = TokenizerRecord(
                str(tokenizer["kind"]), int(tokenizer["vocab_size"]), tokenizer["eod"], tokenizer["sha256"],
                tokenizer["file"],
            )  # fmt: skip
        files = {end: (int(raw["files"][end]["bytes"]), str(raw["files"][end]["sha256"])) for end in ("bin", "idx")}
        limit = int(raw.get("vocab_limit") or 0)
        return Manifest(int(raw["documents"]), int(raw["tokens"]), files, record, limit, raw)
    except (KeyError, TypeError, ValueError, AttributeError) as exc:
        raise ValueError(f"it is not a manifest: {type(exc).__name__} {exc}") from None


def size_differences(prefix: Path, manifest: Manifest) -> list[str]:
    """Describe each file whose size differs from the manifest."""
    found = []
    for ending, (size, _) in manifest.files.items():
        there = dataset_file(prefix, ending).stat().st_size
        if there != size:
            found.append(f"the .{ending} has {there:,} bytes, and had {size:,} when it was made")
    return found

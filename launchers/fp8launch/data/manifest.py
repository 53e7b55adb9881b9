"""PREFIX.manifest.json: what a dataset was made of, and the checksums of its files."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from fp8launch import __version__
from fp8launch.data.files import read_json, sha256
from fp8launch.data.plan import BuildPlan, beside
from fp8launch.data.sources import bytes_of
from fp8launch.data.tokenizer import MEGATRON_TYPES

FORMAT = 1
# Of more files the first ones are named, and all are counted.
MOST_SOURCES = 1000


@dataclass(frozen=True)
class TokenizerRecord:
    kind: str
    vocab_size: int
    eod: int | None
    sha256: str | None
    file: str | None


@dataclass(frozen=True)
class Manifest:
    """What readers of a manifest use; `raw` is all of it."""

    documents: int
    tokens: int
    files: dict[str, tuple[int, str]]
    tokenizer: TokenizerRecord | None
    vocab_limit: int  # no id is this large
    raw: dict[str, Any]


def new_manifest(
    plan: BuildPlan, documents: int, tokens: int, files: dict[str, Any], skipped: dict[str, int], engine: str
) -> dict[str, Any]:
    """Return the manifest of a dataset that was built from sources."""
    tokenizer = plan.tokenizer
    return {
        "format": FORMAT,
        "made_by": f"fp8launch {__version__}",
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "documents": documents,
        "tokens": tokens,
        "token_type": plan.token_type,
        "vocab_limit": plan.vocab_limit,
        "files": files,
        "tokenizer": {
            **tokenizer.as_json(),
            "engine": engine,
            "megatron_type": MEGATRON_TYPES[tokenizer.kind],
            "megatron_model": tokenizer.megatron_model,
        },
        "skipped": skipped,
        "field": plan.reading.field,
        "source_files": len(plan.files),
        "source_bytes": bytes_of(plan.files),
        "sources": [{"path": file.path, "bytes": file.bytes} for file in plan.files[:MOST_SOURCES]],
        "fingerprint": plan.fingerprint(),
    }


def read_manifest(prefix: Path) -> Manifest | None:
    """Return the manifest beside a dataset; None where there is none. Raises ValueError where it cannot be read."""
    raw = read_json(beside(prefix, "manifest.json"))
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
        raise ValueError(f"it lacks what a manifest has: {type(exc).__name__} {exc}") from None


def size_differences(prefix: Path, manifest: Manifest) -> list[str]:
    """Return what contradicts the manifest in the sizes of the files, in words."""
    found = []
    for ending, (size, _) in manifest.files.items():
        there = beside(prefix, ending).stat().st_size
        if there != size:
            found.append(f"the .{ending} has {there:,} bytes, and had {size:,} when it was made")
    return found


def content_differences(prefix: Path, manifest: Manifest, endings: Iterable[str] = ("bin", "idx")) -> list[str]:
    """Return which files do not have the manifest's checksum, in words. Reads all of them."""
    found = []
    for ending in endings:
        now = sha256(beside(prefix, ending))
        if now != manifest.files[ending][1]:
            found.append(f"the .{ending} has another sha256 than when it was made ({now[:12]}...)")
    return found

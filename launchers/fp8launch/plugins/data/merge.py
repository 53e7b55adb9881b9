"""Merge finished shards into a dataset: append each in order, delete it, and rename the files when all are on disk.

PREFIX.build/merge.json records the progress. After a kill the next process truncates the merged tokens to that point
and continues. The disk holds each token once, plus one shard.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from fp8launch.datasets.index_format import TYPES, code_of, header
from fp8launch.datasets.manifest import dataset_file, read_json, sha256
from fp8launch.plugins.data.extras import load
from fp8launch.plugins.data.files import copy_into, sync, write_json
from fp8launch.plugins.data.plan import BuildPlan
from fp8launch.plugins.data.shard import ShardResult, finished, shard_file

# An index is read in parts of this many documents.
PART = 1 << 20


@dataclass(frozen=True)
class Merged:
    """The merged files hold the first `shards` shards, with this many documents and tokens."""

    shards: int = 0
    documents: int = 0
    tokens: int = 0


def merged_so_far(folder: Path) -> Merged:
    try:
        return Merged(**(read_json(folder / "merge.json") or {}))
    except (ValueError, TypeError):
        return Merged()


def merge_finished(plan: BuildPlan, known: dict[int, ShardResult]) -> Merged:
    """Append the next shards, as far as they are finished."""
    state = merged_so_far(plan.folder)
    while state.shards < len(plan.shards):
        number = state.shards
        result = known.get(number) or finished(plan.folder, number)
        if result is None:
            break
        state = _append(plan, number, result, state)
    return state


def _append(plan: BuildPlan, number: int, result: ShardResult, state: Merged) -> Merged:
    for ending, size in (("bin", state.tokens * plan.token_bytes), ("lengths", state.documents * 4)):
        whole = plan.folder / f"merged.{ending}"
        whole.touch()
        with whole.open("r+b") as target:
            target.truncate(size)
            target.seek(size)
            copy_into(shard_file(plan.folder, number, ending), target)
        sync(whole)
    state = Merged(number + 1, state.documents + result.documents, state.tokens + result.tokens)
    write_json(plan.folder / "merge.json", vars(state))
    for ending in ("bin", "lengths"):
        shard_file(plan.folder, number, ending).unlink(missing_ok=True)
    return state


def finish(plan: BuildPlan, manifest: Callable[[Merged, dict[str, Path]], dict[str, Any]]) -> dict[str, Any]:
    """Write the index and the manifest, rename all files, and return the manifest.

    The .bin is renamed first and the manifest last, so a dataset with a manifest is complete.
    """
    prefix, folder = Path(plan.prefix), plan.folder
    state = merged_so_far(folder)
    parts = {"bin": folder / "merged.bin", "idx": folder / "merged.idx"}
    record: dict[str, Any] | None = read_json(folder / "manifest.json")
    if record is None:
        for ending in ("bin", "lengths"):
            (folder / f"merged.{ending}").touch()
        with parts["idx"].open("wb") as file:
            write_index(file, folder / "merged.lengths", plan.token_type, state.documents)
        sync(parts["idx"])
        record = manifest(state, parts)
        write_json(folder / "manifest.json", record)
    for ending in ("bin", "idx"):
        # After a kill between the two, the first is already renamed.
        if parts[ending].exists():
            parts[ending].replace(dataset_file(prefix, ending))
    write_json(dataset_file(prefix, "manifest.json"), record)
    sync(prefix.parent)
    shutil.rmtree(folder, ignore_errors=True)
    return record


def write_index(file: BinaryIO, lengths: Path, token_type: str, count: int) -> None:
    """Write the .idx for the document lengths that a file holds."""
    numpy: Any = load("numpy", "building a dataset")
    _, width = TYPES[code_of(token_type)]
    file.write(header(token_type, count, count + 1))
    copy_into(lengths, file)
    at = 0
    with lengths.open("rb") as stream:
        while part := stream.read(4 * PART):
            sizes = numpy.frombuffer(part, "<i4").astype("<i8") * width
            ends = at + numpy.cumsum(sizes)
            file.write((ends - sizes).astype("<i8").tobytes())
            at = int(ends[-1])
    for begin in range(0, count + 1, PART):
        file.write(numpy.arange(begin, min(begin + PART, count + 1), dtype="<i8").tobytes())


def files_record(parts: dict[str, Path]) -> dict[str, dict[str, Any]]:
    """Return the size and checksum of each file, by suffix."""
    return {ending: {"bytes": file.stat().st_size, "sha256": sha256(file)} for ending, file in parts.items()}

"""Finished shards to one dataset: appended in order, deleted as they are, and named when everything is on the disk.

PREFIX.build/merge.json says how far it came: after a kill at any moment the next process cuts the tokens back to there
and goes on. The disk holds each token once, plus one shard.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from fp8launch.data.extras import load
from fp8launch.data.files import copy_into, read_json, sha256, sync, write_json
from fp8launch.data.index_format import TYPES, code_of, header
from fp8launch.data.plan import BuildPlan, beside
from fp8launch.data.shard import ShardResult, finished, shard_file

# Of a long index this many documents are in memory at a time.
PART = 1 << 20


@dataclass(frozen=True)
class Merged:
    """The first `shards` shards are in the merged files, which have these documents and tokens."""

    shards: int = 0
    documents: int = 0
    tokens: int = 0


def merged_so_far(folder: Path) -> Merged:
    try:
        return Merged(**(read_json(folder / "merge.json") or {}))
    except (ValueError, TypeError):
        return Merged()


def merge_finished(plan: BuildPlan, known: dict[int, ShardResult]) -> Merged:
    """Append those shards that are finished and whose turn it is."""
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
    """Write the index and the manifest, and give all files their names; return the manifest.

    The .idx comes after the .bin, and the manifest last: what is there is whole.
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
        # After a kill between the two the first already has its name.
        if parts[ending].exists():
            parts[ending].replace(beside(prefix, ending))
    write_json(beside(prefix, "manifest.json"), record)
    sync(prefix.parent)
    shutil.rmtree(folder, ignore_errors=True)
    return record


def write_index(file: BinaryIO, lengths: Path, token_type: str, count: int) -> None:
    """Write the .idx of documents whose lengths a file has, one after the other."""
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
    """Return size and checksum of the files, by ending."""
    return {ending: {"bytes": file.stat().st_size, "sha256": sha256(file)} for ending, file in parts.items()}

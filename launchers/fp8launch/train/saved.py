"""Checkpoints of Megatron in a folder: which there are, which of them are whole, which one a start would read.

Standard library only, on any Python from 3.7: this also runs on a compute node's own Python, outside the image.
Formats: torch_dist and fsdp_dtensor (torch.distributed.checkpoint with a `.metadata` that is written last) and torch
(one file for each model-parallel rank).
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
import shutil
import zipfile
from pathlib import Path
from typing import Any

TRACKER = "latest_checkpointed_iteration.txt"
_FOLDER = re.compile(r"iter_(\d{7,})")


class _Record:
    """Stands for any class in the metadata: what is wanted are its fields, and nothing of it may run."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)

    def __hash__(self) -> int:
        return id(self)

    def append(self, item: Any) -> None:
        """Pickled subclasses of list fill themselves so."""

    def __setitem__(self, key: Any, value: Any) -> None:
        """And those of dict so."""


class _Fields(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return type(name, (_Record,), {})


def latest(folder: Path) -> int:
    """The iteration that Megatron's tracker names; 0 for none, which is where a new run starts."""
    try:
        text = (folder / TRACKER).read_text().strip()
    except (OSError, ValueError):
        return 0
    return whole_number(text) or 0


def whole_number(text: str) -> int | None:
    """What Megatron writes as an iteration; a damaged file holds anything."""
    return int(text) if re.match(r"[0-9]{1,18}\Z", text) else None


def iterations(folder: Path) -> list[int]:
    """The iterations that have a folder, whole or not, in order."""
    try:
        names = os.listdir(str(folder))  # noqa: PTH208 (Path.iterdir would raise later, while it is read)
    except OSError:
        return []
    return sorted(int(match.group(1)) for match in map(_FOLDER.fullmatch, names) if match)


def place(folder: Path, iteration: int) -> Path:
    return folder / f"iter_{iteration:07d}"


def torn(checkpoint: Path) -> str | None:
    """Why a checkpoint cannot be read again, in words; None for a whole one.

    A power cut leaves files that are missing, empty or short. For a distributed checkpoint `.metadata` says which bytes
    of which file each tensor is, so a file that ends too early shows without reading a single tensor.
    """
    if not checkpoint.is_dir():
        return "is not there"
    if (checkpoint / ".metadata").exists() or (checkpoint / "metadata.json").exists():
        return _torn_distributed(checkpoint)
    parts = sorted(checkpoint.glob("mp_rank_*/*.pt"))
    if not parts:
        return "holds no checkpoint (no .metadata)"
    broken = [part.name for part in parts if not zipfile.is_zipfile(str(part))]
    return f"{broken[0]} is cut short" if broken else None


def _torn_distributed(checkpoint: Path) -> str | None:
    for name in (".metadata", "metadata.json"):
        if not (checkpoint / name).is_file() or not (checkpoint / name).stat().st_size:
            return f"has no {name}, which is written last"
    if (checkpoint / "common.pt").exists() and not zipfile.is_zipfile(str(checkpoint / "common.pt")):
        return "common.pt is cut short"
    try:
        json.loads((checkpoint / "metadata.json").read_text())
        with (checkpoint / ".metadata").open("rb") as file:
            stored = _Fields(file).load().storage_data
        ends: dict[str, int] = {}
        for piece in stored.values():
            ends[piece.relative_path] = max(ends.get(piece.relative_path, 0), piece.offset + piece.length)
    except Exception as problem:
        return f"has metadata that cannot be read: {problem}"
    for name, end in sorted(ends.items()):
        size = (checkpoint / name).stat().st_size if (checkpoint / name).is_file() else -1
        if size < end:
            return f"{name} has {size} of {end} bytes" if size >= 0 else f"{name} is missing"
    return None


def repair(folder: Path) -> list[str]:
    """Make the tracker name a whole checkpoint; what was done, in words, nothing if all was well.

    Megatron writes the tracker last, so it names a torn checkpoint only where the disk lost what was written before it.
    """
    if not (folder / TRACKER).exists():
        return []
    text = (folder / TRACKER).read_text(errors="replace").strip()
    if text == "release":
        return []
    named = whole_number(text)
    why = torn(place(folder, named)) if named is not None else None
    if named is not None and why is None:
        return []
    told = [f"checkpoint {named} is torn: it {why}" if named is not None else f"{TRACKER} says {text[:40]!r}"]
    whole = [i for i in iterations(folder) if (named is None or i < named) and torn(place(folder, i)) is None]
    if whole:
        point_at(folder, whole[-1])
        told.append(f"going on from {whole[-1]} instead")
    else:
        (folder / TRACKER).unlink()
        told.append("there is no earlier one that is whole: starting over")
    return told


def point_at(folder: Path, iteration: int) -> None:
    """Write the tracker, whole or not at all."""
    new = folder / f".{TRACKER}.new"
    with new.open("w") as file:
        file.write(str(iteration))
        file.flush()
        os.fsync(file.fileno())
    new.replace(folder / TRACKER)


def prune(folder: Path, keep: int) -> list[int]:
    """Remove all but the `keep` newest whole checkpoints, never one that the tracker names or a newer one.

    Returns the iterations that were removed. Links are left alone: what they point to is somebody else's.
    """
    named = latest(folder)
    older = [i for i in iterations(folder) if i <= named]
    whole = [i for i in older if torn(place(folder, i)) is None]
    removed = []
    if named in whole:
        for iteration in [i for i in older if i not in whole[-keep:]]:
            if not place(folder, iteration).is_symlink():
                shutil.rmtree(str(place(folder, iteration)), ignore_errors=True)
                removed.append(iteration)
    return removed


def look(folder: Path) -> tuple[int, int, int, float]:
    """What changes while a checkpoint is written: how many there are; files, bytes and last write of the newest."""
    there = iterations(folder)
    if not there:
        return 0, 0, 0, 0.0
    found = []
    for file in place(folder, there[-1]).rglob("*"):
        with contextlib.suppress(OSError):  # a temporary file that was renamed meanwhile
            found.append(file.stat())
    return len(there), len(found), sum(s.st_size for s in found), max((s.st_mtime for s in found), default=0.0)

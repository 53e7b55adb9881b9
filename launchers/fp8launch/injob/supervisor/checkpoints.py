"""Megatron's checkpoints in a folder: which exist, which are complete, and which one a start would read.

Formats: torch_dist and fsdp_dtensor (torch.distributed.checkpoint with a `.metadata` that is written last) and torch
(one file for each model-parallel rank).
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import re
import shutil
import zipfile
from pathlib import Path
from typing import Any

from fp8launch.injob.regular_files import open_regular, read_regular

TRACKER = "latest_checkpointed_iteration.txt"
# A conversion (the plugin `convert`) writes this into its output last.
CONVERSION_RECORD = "fp8launch_convert.json"
# Megatron writes a number or the word "release".
_LONGEST_TRACKER = 4096
_LARGEST_JSON = 1 << 20
# A piece of a tensor takes about 90 bytes of `.metadata`, so this is enough for three million.
_LARGEST_METADATA = 256 << 20
# State of a module is kilobytes; 1024 steps of history of five tensors are 20 KiB.
_LARGEST_OBJECT = 16 << 20
_FOLDER = re.compile(r"iter_(\d{7,})")


class _Fields:
    """Stands in for any class in the metadata: only fields are read, and no code of the class may run."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)

    def __hash__(self) -> int:
        return id(self)

    def append(self, item: Any) -> None:
        """Accept the items of pickled subclasses of list."""

    def __setitem__(self, key: Any, value: Any) -> None:
        """Accept the items of pickled subclasses of dict."""


# Python's unpickler instead of C's, in which one opcode of five bytes can enlarge the table of references to gigabytes.
class _FieldsOnly(pickle._Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return type(name, (_Fields,), {})


def latest(folder: Path) -> int:
    """Return the iteration that Megatron's tracker names; 0 if there is none, as for a new run."""
    try:
        text = read_tracker(folder)
    except (OSError, ValueError):
        return 0
    return whole_number(text) or 0


def read_tracker(folder: Path) -> str:
    """Return the text of Megatron's tracker. Raises OSError or ValueError for anything but a small text file.

    Other users may have put something else there: a pipe without a writer would block the caller, a device never ends.
    """
    return read_regular(folder / TRACKER, _LONGEST_TRACKER).decode().strip()


def whole_number(text: str) -> int | None:
    """Return the iteration in a tracker's text; None for any other text, as in a damaged file."""
    return int(text) if re.match(r"[0-9]{1,18}\Z", text) else None


def iterations(folder: Path) -> list[int]:
    """Return the iterations that have a folder, complete or not, in order."""
    try:
        names = os.listdir(str(folder))  # noqa: PTH208 (Path.iterdir would raise later, while it is read)
    except OSError:
        return []
    return sorted(int(match.group(1)) for match in map(_FOLDER.fullmatch, names) if match)


def place(folder: Path, iteration: int) -> Path:
    return folder / f"iter_{iteration:07d}"


def torn(checkpoint: Path) -> str | None:
    """Return why a checkpoint cannot be read; None if it is complete.

    A power cut leaves missing, empty or short files. The `.metadata` of a distributed checkpoint lists the bytes and
    the file of each tensor, so a file that is too short is found without reading any tensor.
    """
    try:
        return _damage(checkpoint)
    except MemoryError:
        return "has metadata that cannot be read: out of memory"


def _damage(checkpoint: Path) -> str | None:
    """Return what `torn` does. Raises MemoryError, which says nothing about the checkpoint."""
    if not checkpoint.is_dir():
        return "does not exist"
    if (checkpoint / ".metadata").exists() or (checkpoint / "metadata.json").exists():
        return _torn_distributed(checkpoint)
    parts = sorted(checkpoint.glob("mp_rank_*/*.pt"))
    if not parts:
        return "contains no checkpoint (no .metadata)"
    broken = [part.name for part in parts if not _is_zip(part)]
    return f"contains {broken[0]}, which is cut short" if broken else None


def _is_zip(file: Path) -> bool:
    try:
        with open_regular(file) as stream:
            return zipfile.is_zipfile(stream)
    except OSError:
        return False


def _torn_distributed(checkpoint: Path) -> str | None:
    for name in (".metadata", "metadata.json"):
        if not (checkpoint / name).is_file() or not (checkpoint / name).stat().st_size:
            return f"has no {name}, which is written last"
    # Megatron-Bridge writes its tracker before this file, without which it cannot load its checkpoint.
    config = checkpoint / "run_config.yaml"
    if (checkpoint / "train_state.pt").exists() and not (config.is_file() and config.stat().st_size):
        return f"has no {config.name}, which Megatron-Bridge writes last"
    if (checkpoint / "common.pt").exists() and not _is_zip(checkpoint / "common.pt"):
        return "contains common.pt, which is cut short"
    try:
        json.loads(read_regular(checkpoint / "metadata.json", _LARGEST_JSON).decode())
        ends: dict[str, int] = {}
        for piece in _storage(checkpoint).values():
            ends[piece.relative_path] = max(ends.get(piece.relative_path, 0), piece.offset + piece.length)
        for name, end in sorted(ends.items()):
            if not (checkpoint / name).is_file():
                return f"{name} is missing"
            size = (checkpoint / name).stat().st_size
            if size < end:
                return f"{name} has {size} of {end} bytes"
    except MemoryError:
        raise
    except Exception as problem:
        return f"has metadata that cannot be read: {problem}"
    return None


def _storage(checkpoint: Path) -> Any:
    """Return the table of a distributed checkpoint's pieces. A damaged or hostile file may raise any exception."""
    return _FieldsOnly(io.BytesIO(read_regular(checkpoint / ".metadata", _LARGEST_METADATA))).load().storage_data


def holds(checkpoint: Path, key: str, text: bytes) -> bool | None:
    """Return whether an object of a distributed checkpoint, with `key` in its name, contains `text`.

    Nothing is unpickled. None for a checkpoint that cannot be read, or of another format.
    """
    try:
        stored = _storage(checkpoint)
        places = sorted(
            (piece.relative_path, piece.offset, piece.length)
            for index, piece in stored.items()
            if key in index.fqn and 0 < piece.length <= _LARGEST_OBJECT
        )
        for name, offset, length in places:
            with open_regular(checkpoint / name) as file:
                file.seek(offset)
                if text in file.read(length):
                    return True
    except Exception:  # a damaged or hostile file may raise any exception
        return None
    return False


def repair(folder: Path) -> list[str]:
    """Make the tracker name a complete checkpoint. Return sentences about what was done, none if nothing was wrong.

    Megatron writes the tracker last, so it names a torn checkpoint only if the disk lost earlier writes. Without a
    tracker Megatron would start over although complete checkpoints exist.
    """
    if not os.path.lexists(str(folder / TRACKER)):
        newest = _newest_whole(folder, iterations(folder))
        if newest is None:
            return []
        point_at(folder, newest)
        return [f"{TRACKER} is missing", f"continuing from {newest}, the newest complete checkpoint"]
    try:
        text = read_tracker(folder)
    except (OSError, ValueError) as failure:
        text = f"nothing: {failure}"
    if text == "release":
        return []
    named = whole_number(text)
    if named is None:
        problem = f"{TRACKER} says {text[:80]!r}"
    else:
        try:
            damage = _damage(place(folder, named))
        except MemoryError:
            return []
        if damage is None:
            return []
        problem = f"checkpoint {named} is torn: it {damage}"
    newest = _newest_whole(folder, [i for i in iterations(folder) if named is None or i < named])
    if newest is None:
        (folder / TRACKER).unlink()
        return [problem, "there is no earlier complete checkpoint; starting over"]
    point_at(folder, newest)
    return [problem, f"continuing from {newest} instead"]


def set_aside(folder: Path, iteration: int) -> list[str]:
    """Rename a checkpoint that cannot be loaded, and make the tracker name the newest older complete one.

    Return sentences about what was done; if there is no older checkpoint, change nothing and return none. Nothing is
    deleted: damage may be repairable, and a file system that failed for a moment leaves a checkpoint intact.
    """
    older = _newest_whole(folder, [i for i in iterations(folder) if i < iteration])
    if older is None or not place(folder, iteration).is_dir():
        return []
    point_at(folder, older)
    name = _rename(folder, iteration, "damaged")
    return [f"checkpoint {iteration} cannot be loaded and is set aside as {name}", f"continuing from {older} instead"]


def go_back_to(folder: Path, iteration: int) -> list[str]:
    """Make the tracker name an older checkpoint, and rename all newer ones. Return sentences about what was done.

    The newer ones have the weights of a broken training, and are kept for inspection.
    """
    newer = [i for i in iterations(folder) if i > iteration]
    point_at(folder, iteration)
    return [f"checkpoint {i} is set aside as {_rename(folder, i, 'unhealthy')}" for i in newer]


def _rename(folder: Path, iteration: int, mark: str) -> str:
    """Add a mark to the name of a checkpoint, and a number if that name is taken. Return the name."""
    name = f"{place(folder, iteration).name}.{mark}"
    number = 1
    while os.path.lexists(str(folder / name)):
        number += 1
        name = f"{place(folder, iteration).name}.{mark}{number}"
    place(folder, iteration).rename(folder / name)
    return name


def whole_iterations(folder: Path) -> list[int]:
    """Return the iterations whose checkpoint is complete, in order."""
    return [i for i in iterations(folder) if torn(place(folder, i)) is None]


def _newest_whole(folder: Path, candidates: list[int]) -> int | None:
    """Return the newest of these iterations whose checkpoint is complete."""
    for iteration in reversed(candidates):
        if torn(place(folder, iteration)) is None:
            return iteration
    return None


def point_at(folder: Path, iteration: int) -> None:
    """Write the tracker, whole or not at all."""
    new = folder / f".{TRACKER}.new"
    with contextlib.suppress(FileNotFoundError):  # a killed supervisor left it, or it is a link to another place
        new.unlink()
    with new.open("x") as file:
        file.write(str(iteration))
        file.flush()
        os.fsync(file.fileno())
    new.replace(folder / TRACKER)


def prune(folder: Path, keep: int) -> list[int]:
    """Remove all but the `keep` newest complete checkpoints. Return the iterations that were removed.

    The checkpoint that the tracker names and newer ones stay, and so do links, whose targets belong to others.
    """
    named = latest(folder)
    up_to_named = [i for i in iterations(folder) if i <= named]
    whole = [i for i in up_to_named if torn(place(folder, i)) is None]
    removed: list[int] = []
    if named not in whole:
        return removed
    kept = whole[-keep:]
    for iteration in up_to_named:
        if iteration not in kept and not place(folder, iteration).is_symlink():
            shutil.rmtree(str(place(folder, iteration)), ignore_errors=True)
            removed.append(iteration)
    return removed


def state_of_newest(folder: Path) -> tuple[int, int, int, float]:
    """Return values that change during a save: the number of checkpoints; files, bytes and last write of the newest."""
    there = iterations(folder)
    if not there:
        return 0, 0, 0, 0.0
    found = []
    for file in place(folder, there[-1]).rglob("*"):
        with contextlib.suppress(OSError):  # a temporary file that was renamed meanwhile
            found.append(file.stat())
    return len(there), len(found), sum(s.st_size for s in found), max((s.st_mtime for s in found), default=0.0)

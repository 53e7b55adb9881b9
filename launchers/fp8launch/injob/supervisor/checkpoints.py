"""Megatron's checkpoints in a folder: which exist, which are complete, and which one a start would read.

Formats: torch_dist and fsdp_dtensor (torch.distributed.checkpoint with a `.metadata` that is written last) and torch
(one file for each model-parallel rank).
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import math
import os
import pickle
import re
import shutil
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from fp8launch.injob.regular_files import NotRegular, open_regular, read_regular, write_whole

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
_ZIP_END_AND_COMMENT = 22 + (1 << 16)
_FOLDER = re.compile(r"iter_(\d{7,})")
# Errors of a file server that fails over or is overloaded, and of a node short of memory or handles.
PASSING = frozenset((
    errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EREMOTEIO, errno.ESHUTDOWN, errno.ENOTCONN, errno.EHOSTDOWN,
    errno.EHOSTUNREACH, errno.ECONNRESET, errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE,
))  # fmt: skip
PAUSES = (1, 5, 20)  # seconds before each further try to read
# These errors mean that there is no such file. Any other error leaves that open.
_ABSENT = (FileNotFoundError, NotADirectoryError, NotRegular)
Result = TypeVar("Result")


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


def again(read: Callable[[], Result]) -> Result:
    """Call a function that reads, and retry after errors that may pass. Raises OSError if the error lasts."""
    for pause in PAUSES:
        try:
            return read()
        except OSError as problem:
            if problem.errno not in PASSING:
                raise
        time.sleep(pause)
    return read()


def latest(folder: Path) -> int:
    """Return the iteration that Megatron's tracker names; 0 if there is none, as for a new run.

    Raises OSError if the tracker cannot be read: a run that took it for a new run would start over.
    """
    try:
        text = again(lambda: read_tracker(folder))
    except (*_ABSENT, ValueError):
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
    """Return the iterations that have a folder, complete or not, in order. Raises OSError."""
    return sorted(int(match.group(1)) for match in map(_FOLDER.fullmatch, _names(folder)) if match)


def place(folder: Path, iteration: int) -> Path:
    return folder / f"iter_{iteration:07d}"


def torn(checkpoint: Path) -> str | None:
    """Return why a checkpoint is damaged or cannot be read now; None if it is complete."""
    try:
        return damage(checkpoint)
    except OSError as problem:
        return f"has files that cannot be read: {problem.strerror}"


def damage(checkpoint: Path) -> str | None:
    """Return why a checkpoint is damaged; None if it is complete.

    A power cut leaves missing, empty or short files. The `.metadata` of a distributed checkpoint lists the bytes and
    the file of each tensor, so a file that is too short is found without reading any tensor. Raises OSError if the
    checkpoint cannot be read now, also for lack of memory, which says nothing about it.
    """
    try:
        return again(lambda: _damage(checkpoint))
    except MemoryError:
        raise OSError(errno.ENOMEM, "out of memory", str(checkpoint)) from None


def _damage(checkpoint: Path) -> str | None:
    names = _names(checkpoint)
    if ".metadata" in names or "metadata.json" in names:
        return _damage_of_distributed(checkpoint, names)
    parts = []
    for name in sorted(names):
        if name.startswith("mp_rank_"):
            parts += [checkpoint / name / file for file in sorted(_names(checkpoint / name)) if file.endswith(".pt")]
    if not parts:
        return "contains no checkpoint (no .metadata)" if names else "is missing or empty"
    broken = [part.name for part in parts if not _is_zip(part)]
    return f"contains {broken[0]}, which is cut short" if broken else None


def _names(folder: Path) -> list[str]:
    """Return the names in a folder, none if there is no such folder. Raises OSError."""
    try:
        return os.listdir(str(folder))  # noqa: PTH208 (Path.iterdir would raise later, while it is read)
    except _ABSENT:
        return []


def _size(file: Path) -> int | None:
    """Return the size of a regular file; None if there is none. Raises OSError, which `Path.is_file` may hide."""
    try:
        state = file.stat()
    except OSError as problem:
        if isinstance(problem, _ABSENT) or problem.errno in (errno.ENAMETOOLONG, errno.ELOOP):
            return None
        raise
    return state.st_size if stat.S_ISREG(state.st_mode) else None


def _is_zip(file: Path) -> bool:
    """Return whether a file ends like a zip archive. Raises OSError, which `zipfile.is_zipfile` hides."""
    try:
        with open_regular(file) as stream:
            stream.seek(max(0, stream.seek(0, 2) - _ZIP_END_AND_COMMENT))
            return b"PK\5\6" in stream.read()
    except _ABSENT:
        return False


def _damage_of_distributed(checkpoint: Path, names: list[str]) -> str | None:
    for name in (".metadata", "metadata.json"):
        if not _size(checkpoint / name):
            return f"has no {name}, which is written last"
    # Megatron-Bridge writes its tracker before this file, without which it cannot load its checkpoint.
    if "train_state.pt" in names and not _size(checkpoint / "run_config.yaml"):
        return "has no run_config.yaml, which Megatron-Bridge writes last"
    if "common.pt" in names and not _is_zip(checkpoint / "common.pt"):
        return "contains common.pt, which is cut short"
    try:
        json.loads(read_regular(checkpoint / "metadata.json", _LARGEST_JSON).decode())
        ends: dict[str, int] = {}
        for piece in _storage(checkpoint).values():
            ends[piece.relative_path] = max(ends.get(piece.relative_path, 0), piece.offset + piece.length)
        for name, end in sorted(ends.items()):
            size = _size(checkpoint / name)
            if size is None:
                return f"{name} is missing"
            if size < end:
                return f"{name} has {size} of {end} bytes"
    except (OSError, MemoryError):
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
    tracker Megatron would start over although complete checkpoints exist. If a file cannot be read now, nothing is
    changed: the training reads it itself, and fails if the error lasts.
    """
    try:
        problem, newest = _examine(folder)
    except OSError as failure:
        return [f"{failure}: the checkpoints are left as they are"]
    if problem is None:
        return []
    if newest is None:
        (folder / TRACKER).unlink()
        return [problem, "there is no earlier complete checkpoint; starting over"]
    point_at(folder, newest)
    return [problem, f"continuing from {newest}, the newest complete checkpoint"]


def _examine(folder: Path) -> tuple[str | None, int | None]:
    """Return the problem with the tracker or its checkpoint, if any, and the newest complete checkpoint before it."""
    try:
        text = again(lambda: read_tracker(folder))
    except FileNotFoundError:
        newest = _newest_whole(folder)
        return (None if newest is None else f"{TRACKER} is missing"), newest
    except ValueError as failure:
        text = f"nothing: {failure}"
    if text == "release":
        return None, None
    named = whole_number(text)
    if named is None:
        return f"{TRACKER} says {text[:80]!r}", _newest_whole(folder)
    found = damage(place(folder, named))
    if found is None:
        return None, None
    return f"checkpoint {named} is torn: it {found}", _newest_whole(folder, before=named)


def set_aside(folder: Path, iteration: int) -> list[str]:
    """Rename a checkpoint that cannot be loaded, and make the tracker name the newest older complete one.

    Return sentences about what was done; if there is no older checkpoint, change nothing and return none. Nothing is
    deleted: damage may be repairable, and a file system that failed for a moment leaves a checkpoint intact.
    """
    older = _newest_whole(folder, before=iteration)
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


def whole_iterations(folder: Path, up_to: int) -> list[int]:
    """Return the iterations up to `up_to` whose checkpoint is complete, in order. Raises OSError."""
    return [i for i in iterations(folder) if i <= up_to and damage(place(folder, i)) is None]


def _newest_whole(folder: Path, before: float = math.inf) -> int | None:
    """Return the newest iteration below `before` whose checkpoint is complete. Raises OSError."""
    for iteration in reversed(iterations(folder)):
        if iteration < before and damage(place(folder, iteration)) is None:
            return iteration
    return None


def point_at(folder: Path, iteration: int) -> None:
    """Make the tracker name an iteration. Whoever shares the folder may save the next checkpoint."""
    write_whole(folder / TRACKER, str(iteration), mode=0o666)


def prune(folder: Path, keep: int) -> list[int]:
    """Remove all but the `keep` newest complete checkpoints. Return the iterations that were removed.

    The checkpoint that the tracker names and newer ones stay, and so do links, whose targets belong to others. Raises
    OSError, without removing anything, if one cannot be read now.
    """
    named = latest(folder)
    whole = whole_iterations(folder, named)
    if named not in whole:
        return []
    surplus = [i for i in iterations(folder) if i <= named and i not in whole[-keep:]]
    removed = [i for i in surplus if not place(folder, i).is_symlink()]
    for iteration in removed:
        shutil.rmtree(str(place(folder, iteration)), ignore_errors=True)
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

"""Files of a build: atomic writes, checksums, and a lock for the build's folder."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fp8launch.diagnostics import MACHINE_LACKS, UserError, error
from fp8launch.injob.regular_files import open_regular
from fp8launch.rundir.atomic_io import write_atomically

BLOCK = 4 << 20


def sync(path: Path) -> None:
    """Flush a file or folder to the disk, if the file system supports it."""
    with contextlib.suppress(OSError):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def write_json(path: Path, content: object) -> None:
    """Replace `path` by JSON atomically. Only the owner may write to it, because a build follows its plan."""
    write_atomically(path, json.dumps(content, indent=1) + "\n")


def copy_into(source: Path, target: Any) -> None:
    """Append a file to an open binary file, in blocks."""
    with open_regular(source) as stream:
        while block := stream.read(BLOCK):
            target.write(block)


@contextlib.contextmanager
def only_one(folder: Path, wait: float = 0.0) -> Iterator[None]:
    """Lock a build's folder. Raises UserError (exit code 3) if another process holds it for `wait` seconds."""
    handle = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        _lock(handle, folder, time.monotonic() + wait)
        yield
    finally:
        os.close(handle)


def _lock(handle: int, folder: Path, end: float) -> None:
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= end:
                raise busy(folder) from None
            time.sleep(0.1)
        except OSError:
            return  # a file system without locks: shards are whole files that any process makes the same
        else:
            return


def busy(folder: Path) -> UserError:
    """Return the error for a build's folder that another process holds."""
    message = f"another process is building this dataset: it holds the lock of {folder}"
    return error("data-busy", message, str(folder), "wait for it to end", MACHINE_LACKS)

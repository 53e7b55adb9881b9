"""Files of a build: written whole or not at all, checksums, and a lock that only one build can hold."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fp8launch.diagnostics import MACHINE_LACKS, UserError, error
from fp8launch.injob.regular_files import open_regular, read_regular

BLOCK = 4 << 20
# Of a manifest with the names of 1000 sources this is several times the size.
MAX_JSON = 4 << 20


def sync(path: Path) -> None:
    """Write what the system still holds of a file or folder to the disk, where the file system can."""
    with contextlib.suppress(OSError):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def write_json(path: Path, content: object) -> None:
    """Replace `path` by JSON; a reader, or a crash, sees the old file or the new one."""
    partial = path.with_name(f".{path.name}.{os.uname().nodename}.{os.getpid()}.partial")
    try:
        # Only its owner may write to it, whatever the umask: a build follows its plan.
        handle = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        with os.fdopen(handle, "w", encoding="utf-8", errors="surrogateescape") as file:
            json.dump(content, file, indent=1)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def read_json(path: Path, limit: int = MAX_JSON) -> Any:
    """Return the content of a JSON file of at most `limit` bytes; None where there is no file.

    Raises OSError, and ValueError for anything else.
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
        while block := stream.read(BLOCK):
            found.update(block)
    return found.hexdigest()


def copy_into(source: Path, target: Any) -> None:
    """Append a file to an open binary file, in blocks."""
    with open_regular(source) as stream:
        while block := stream.read(BLOCK):
            target.write(block)


@contextlib.contextmanager
def only_one(folder: Path, wait: float = 0.0) -> Iterator[None]:
    """Hold a build's folder. Raises UserError (exit code 3) after `wait` seconds in which another process holds it."""
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
    """Return the error of a build's folder that another process holds."""
    message = f"another process builds this dataset: it holds {folder}"
    return error("data-busy", message, str(folder), "wait for it to end", MACHINE_LACKS)

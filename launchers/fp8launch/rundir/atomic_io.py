"""Atomic files, private folders and locks, on which run folders are built."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import signal
import stat
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fp8launch.injob.regular_files import read_regular
from fp8launch.injob.supervisor.log_lines import bounded_int
from fp8launch.untyped import as_mapping

MAX_JSON = 64 << 20
# Some shared file systems have no locks, or none over the network.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class Busy(Exception):
    """Another process holds the folder."""


def write_atomically(path: Path, text: str, mode: int = 0o644) -> None:
    """Replace `path` by `text`; a reader, or a crash, sees the old file or the new one. Links are not followed."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(as_utf8(text))
            file.flush()
            os.fsync(file.fileno())
        Path(name).chmod(mode)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def as_utf8(text: str) -> bytes:
    """Encode a text: bytes of file names that were not UTF-8 come out as they were, half a character as U+FFFD."""
    return re.sub("[\ud800-\udc7f\udd00-\udfff]", "\ufffd", text).encode("utf-8", "surrogateescape")


def sync_folder(folder: Path) -> None:
    """Make renames in a folder survive a power cut, where the file system can."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def make_folders(path: Path) -> None:
    """Make a folder and those above it, never writable for everyone, whatever the umask."""
    for folder in [*reversed(path.parents), path]:
        if not folder.is_dir():
            with contextlib.suppress(FileExistsError):
                folder.mkdir(mode=0o755)
    if not path.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))


def read_json(file: Path) -> Any:
    """The content of a JSON file. Raises OSError or ValueError, also for what no program of ours has written."""
    raw = read_regular(file, MAX_JSON)
    try:
        return json.loads(raw.decode("utf-8"), parse_int=bounded_int)
    except RecursionError:
        raise ValueError("its contents are nested too deeply") from None


def json_mapping(file: Path) -> Mapping[str, Any]:
    """The mapping that a JSON file holds; empty where there is none, and for anything else."""
    try:
        return as_mapping(read_json(file))
    except (OSError, ValueError):
        return {}


def is_own_file(file: Path) -> bool:
    """A regular file, and no link to one: a link in a run folder may lead anywhere."""
    try:
        return stat.S_ISREG(file.lstat().st_mode)
    except (OSError, ValueError):
        return False


def start_of(pid: int) -> str:
    """The kernel's start time of a live process, in clock ticks since boot; empty for none or a zombie."""
    try:
        # The command in parentheses may hold anything: fields count from behind it.
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    if fields[0] == "Z":
        return ""
    return fields[19]


@contextlib.contextmanager
def held(folder: Path, wait: float = 0.0) -> Iterator[bool]:
    """Hold a folder against other launchers; False where the file system has no locks. Raises Busy after `wait` s.

    An sbatch that is started meanwhile inherits the hold (`slurm.call`): when the launcher is killed, the folder stays
    busy until its sbatch has ended too.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    handle = os.open(folder / ".lock", flags, 0o644)
    try:
        locked = _lock(handle, time.monotonic() + wait)
        os.set_inheritable(handle, True)
        yield locked
    finally:
        os.close(handle)


def _lock(handle: int, end: float) -> bool:
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= end:
                raise Busy from None
            time.sleep(0.1)
        except OSError as exc:
            if exc.errno not in _NO_LOCKS:
                raise
            return False
        else:
            return True


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C waits until what was begun is written down; a second Ctrl-C does not wait."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    asked: list[int] = []

    def note(number: int, frame: object) -> None:
        asked.append(number)
        if len(asked) > 1:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if asked:
        raise KeyboardInterrupt

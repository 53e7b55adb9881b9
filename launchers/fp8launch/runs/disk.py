"""What run folders stand on: whole files or none, folders that nobody else writes, one writer at a time."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import signal
import stat
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MAX_JSON = 64 << 20
# Some shared file systems have no locks, or none over the network.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class Busy(Exception):
    """Another process holds the folder."""


def write_atomically(path: Path, text: str) -> None:
    """Replace `path` by `text`; a reader, or a crash, sees the old file or the new one. Links are not followed."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", errors="surrogateescape") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


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
    handle = os.open(file, os.O_RDONLY | os.O_NONBLOCK)  # a pipe of that name would wait for a writer
    with os.fdopen(handle, "rb") as stream:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise ValueError("it is no file")
        raw = stream.read(MAX_JSON + 1)
    if len(raw) > MAX_JSON:
        raise ValueError(f"it is larger than {MAX_JSON >> 20} MiB")
    try:
        return json.loads(raw.decode("utf-8"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def is_own_file(file: Path) -> bool:
    """A regular file, and no link to one: a link in a run folder may lead anywhere."""
    try:
        return stat.S_ISREG(file.lstat().st_mode)
    except (OSError, ValueError):
        return False


def belongs_to_user(path: Path) -> bool:
    """This user made it. What others wrote is read, and never acted upon."""
    try:
        return path.stat().st_uid == os.geteuid()
    except OSError:
        return False


def start_of(pid: int) -> str:
    """The kernel's start time of a live process, in clock ticks since boot; empty for none or a zombie."""
    try:
        # The command in parentheses may hold anything: fields count from behind it.
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] == "Z" else fields[19]


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

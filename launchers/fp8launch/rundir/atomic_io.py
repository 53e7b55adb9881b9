"""Atomic writes, private folders and locks, on which run folders are built."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import signal
import stat
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

# Some shared file systems do not support locks, or not across the network.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class Busy(Exception):
    """Raised if another process holds the lock of a folder."""


def write_atomically(path: Path, content: str | bytes, mode: int = 0o644) -> None:
    """Replace `path` with `content` atomically, even in case of a crash. Symbolic links are not followed.

    An OSError names `path`, never the temporary file.
    """
    name = ""
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "wb") as file:
            file.write(as_utf8(content) if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        Path(name).chmod(mode)
        Path(name).replace(path)
    except BaseException as exc:
        if name:
            Path(name).unlink(missing_ok=True)
        if isinstance(exc, OSError) and exc.errno:
            raise OSError(exc.errno, exc.strerror, str(path)) from None
        raise


def as_utf8(text: str) -> bytes:
    """Encode text. Bytes of file names that are not UTF-8 are preserved, and other lone surrogates become U+FFFD."""
    return re.sub("[\ud800-\udc7f\udd00-\udfff]", "\ufffd", text).encode("utf-8", "surrogateescape")


def sync_folder(folder: Path) -> None:
    """Make renames in a folder survive a power failure, if the file system supports this."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def make_folders(path: Path, mode: int = 0o755) -> None:
    """Create a folder and its missing parents. Their mode is at most `mode`, whatever the umask. Raises OSError."""
    for folder in [*reversed(path.parents), path]:
        if not folder.is_dir():
            with contextlib.suppress(FileExistsError):
                folder.mkdir(mode=mode)
    if not path.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))


def is_own_file(file: Path) -> bool:
    """Return whether it is a regular file, not a symbolic link, which could lead anywhere from a run folder."""
    try:
        return stat.S_ISREG(file.lstat().st_mode)
    except (OSError, ValueError):
        return False


@contextlib.contextmanager
def held(folder: Path, wait: float = 0.0) -> Iterator[bool]:
    """Lock a folder against other launchers. Yields False if the file system has no locks. Raises Busy after `wait` s.

    Commands that submit a job inherit the lock. If the launcher is killed, the folder stays locked until they have
    ended as well.
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
    """Delay Ctrl-C until the current work is recorded. A second Ctrl-C takes effect immediately."""
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

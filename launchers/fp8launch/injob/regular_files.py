"""Read files that other users may have written, and replace files.

Only regular files are opened, and reads have a size limit.

Opening a pipe without a writer blocks forever, a device never ends, and a sparse file of terabytes costs its owner
nothing. `tests/safety/test_direct_reads.py` finds code that opens files in any other way.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


class NotRegular(OSError, ValueError):
    """Raised for a pipe, device, socket or folder where a file was expected."""

    def __init__(self, file: Path) -> None:
        super().__init__(errno.EINVAL, "it is not a regular file", str(file))

    def __str__(self) -> str:
        return str(self.strerror)


def open_regular(file: Path, follow: bool = True, buffering: int = -1) -> BinaryIO:
    """Open a regular file for reading bytes. Raises OSError, or NotRegular for anything but a regular file.

    Without `follow`, symbolic links are refused.
    """
    # O_NONBLOCK lets the open of a pipe return immediately. It does not affect reads of regular files.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
    if not follow:
        flags |= os.O_NOFOLLOW
    handle = os.open(str(file), flags)
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise NotRegular(file)
        return os.fdopen(handle, "rb", buffering)
    except BaseException:
        os.close(handle)
        raise


def read_regular(file: Path, limit: int, follow: bool = True) -> bytes:
    """Read a regular file. Raises OSError, or ValueError if it is larger than `limit` bytes.

    Without `follow`, symbolic links are refused.
    """
    with open_regular(file, follow) as stream:
        raw = stream.read(limit + 1)
    if len(raw) > limit:
        size = f"{limit >> 20} MiB" if limit >= 1 << 20 else f"{limit} bytes"
        raise ValueError(f"it is larger than {size}")
    return raw


def write_whole(file: Path, text: str, mode: int = 0o644) -> None:
    """Replace a file, whole or not at all: a job may be killed at any moment. Links are not followed.

    With the usual `mode`, nobody else may write to it, whatever the umask: records decide which jobs are cancelled.
    """
    new = file.with_name(f".{file.name}.new")
    with contextlib.suppress(FileNotFoundError):
        new.unlink()  # a killed job left it, or it is a link to another place
    with os.fdopen(os.open(str(new), os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    new.replace(file)

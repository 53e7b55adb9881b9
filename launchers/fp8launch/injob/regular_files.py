"""Files that other users may have written: only regular files are opened, and small ones are read with a limit.

Opening a pipe without a writer waits forever, a device has no end, and a sparse file of terabytes costs its owner
nothing. `tests/safety/test_direct_reads.py` finds code that opens files in another way.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


class NotRegular(OSError, ValueError):
    """A pipe, a device, a socket or a folder is in the place of a file."""

    def __init__(self, file: Path) -> None:
        super().__init__(errno.EINVAL, "it is not a regular file", str(file))

    def __str__(self) -> str:
        return str(self.strerror)


def open_regular(file: Path, follow: bool = True, buffering: int = -1) -> BinaryIO:
    """Open a regular file for reading bytes. Raises OSError, which is NotRegular for anything else.

    Without `follow` a link is refused.
    """
    # O_NONBLOCK: opening a pipe returns at once. Reads of regular files do not change.
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
    """Return the content of a regular file of at most `limit` bytes. Raises OSError, and ValueError for a larger one.

    Without `follow` a link is refused.
    """
    with open_regular(file, follow) as stream:
        raw = stream.read(limit + 1)
    if len(raw) > limit:
        size = f"{limit >> 20} MiB" if limit >= 1 << 20 else f"{limit} bytes"
        raise ValueError(f"it is larger than {size}")
    return raw

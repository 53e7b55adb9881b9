"""Open a log, plain or compressed."""

from __future__ import annotations

import importlib
import io
import os
import re
import tempfile
import zlib
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

from fp8launch.injob.regular_files import open_regular

# The first bytes of a compressed file, and the module of Python that reads it.
_MAGIC = ((b"\x1f\x8b", "gzip"), (b"\xfd7zXZ\0", "lzma"), (b"BZh", "bz2"), (b"\x28\xb5\x2f\xfd", "compression.zstd"))
# The mark of a tar archive, its offset, and the number of bytes to read for it.
_TAR, _TAR_AT = b"ustar", 257
_START = _TAR_AT + len(_TAR)
# Some kilobytes may unpack to terabytes, or ask for gigabytes of memory; `xz -9e` needs 65 MiB.
MAX_UNPACKED = 1 << 30
_XZ_MEMORY = 256 << 20
_SUFFIX = re.compile(r"\.(gz|xz|bz2)$")
_COMPRESSED = ("*.log.gz", "*.log.xz", "*.log.bz2")


def open_log(path: Path) -> BinaryIO:
    """Open a log, plain or compressed by gzip, xz, bzip2 or zstd, for reading bytes.

    Readers seek, so a compressed log is unpacked into a temporary file, once for all readers. Raises OSError if the log
    cannot be read, the compressed file is damaged, or it unpacks to more than 1 GiB.
    """
    stream = open_regular(path, buffering=0)
    start = os.pread(stream.fileno(), _START, 0)
    _refuse_archive(start)
    module = compression(start)
    if module is None:
        return stream
    with stream:
        status = os.fstat(stream.fileno())
    plain = _unpacked(path, status.st_size, status.st_mtime_ns, module)
    return cast(BinaryIO, _Reader(plain))


class _Reader(io.RawIOBase):
    """Reader of a shared file, with its own position."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = os.pread(self._file.fileno(), len(buffer), self._position)
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        if whence == os.SEEK_CUR:
            offset += self._position
        elif whence == os.SEEK_END:
            offset += os.fstat(self._file.fileno()).st_size
        self._position = offset
        return offset


def _refuse_archive(start: bytes) -> None:
    """Raise OSError for a tar archive: its logs would be read as a single run."""
    if start[_TAR_AT:] == _TAR:
        raise OSError(None, "an archive of several files: unpack it, and name a log")


def log_name(path: Path) -> str:
    """Return the name of a log's file without its suffixes: `a` for `a.log` and for `a.log.gz`."""
    return Path(_SUFFIX.sub("", path.name)).stem


def logs_in(folder: Path) -> list[Path]:
    """Return the logs of a folder by name, including compressed ones."""
    logs: list[Path] = []
    for pattern in ("*.log", *_COMPRESSED):
        logs += folder.glob(pattern)
    return sorted(logs)


def compression(start: bytes) -> str | None:
    """Return the module of Python that reads a file with this start; None for a plain file."""
    for magic, module in _MAGIC:
        if start.startswith(magic):
            return module
    return None


# The cache holds the temporary files open. They have no names, so a killed process leaves none behind.
@lru_cache(maxsize=4)
def _unpacked(path: Path, size: int, modified: int, module: str) -> IO[bytes]:
    """Return a temporary file with the content of a compressed log, which `size` and `modified` identify."""
    try:
        importlib.import_module(module)
    except ImportError:
        raise OSError(None, f"compressed, and this Python has no module {module}: unpack the file first") from None
    plain = tempfile.TemporaryFile()  # noqa: SIM115
    try:
        written = 0
        for block in _blocks(path, module):
            written += len(block)
            if written > MAX_UNPACKED:
                limit = f"{MAX_UNPACKED >> 20} MiB"
                raise OSError(None, f"compressed, and larger than {limit} when it is unpacked: unpack the file first")
            plain.write(block)
        plain.flush()
        plain.seek(0)
        _refuse_archive(plain.read(_START))
    except BaseException as problem:
        plain.close()
        # The errors of lzma and zstd are not OSErrors, and a truncated file raises EOFError.
        if isinstance(problem, EOFError | zlib.error) or type(problem).__name__ in ("LZMAError", "ZstdError"):
            raise OSError(None, f"the compressed file is damaged ({problem})") from None
        raise
    return plain


def _blocks(path: Path, module: str) -> Iterator[bytes]:
    """Yield the content of a compressed file, 1 MiB at a time."""
    if module == "lzma":
        yield from _xz_blocks(path)
        return
    with open_regular(path) as raw, importlib.import_module(module).open(raw) as packed:
        while block := packed.read(1 << 20):
            yield block


def _xz_blocks(path: Path) -> Iterator[bytes]:
    """Yield the content of an xz file with a limit on memory, because the file itself states how much it needs."""
    import lzma

    with open_regular(path) as packed:
        data = packed.read(1 << 16)
        while data:
            stream = lzma.LZMADecompressor(lzma.FORMAT_XZ, _XZ_MEMORY)
            while not stream.eof:
                yield stream.decompress(data, 1 << 20)
                data = b""
                if stream.needs_input and not stream.eof:
                    data = packed.read(1 << 16)
                    if not data:
                        raise EOFError("it ends too early")
            # Several streams may follow each other, with zeros between them.
            data = stream.unused_data.lstrip(b"\0") or packed.read(1 << 16).lstrip(b"\0")

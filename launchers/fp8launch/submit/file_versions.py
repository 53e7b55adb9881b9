"""Versions of a tracked file, in the commit and in the folder, and their difference as git shows it."""

from __future__ import annotations

import difflib
import hashlib
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8launch.injob.regular_files import open_regular, read_regular
from fp8launch.secrets import holds_credentials

# Larger files are named as changed, without their changes.
_SHOWN_BYTES = 1 << 20
_SHOWN_LINES = 10_000
_NOT_SHOWN = "(not shown: it is large, or the version of the commit is not here)\n"
_COMPARED_BYTES = 256 << 20
_LARGE_FILE_POINTER = b"version https://git-lfs.github.com/spec/v1\n"


@dataclass(frozen=True)
class FileVersion:
    """A tracked file in the commit or in the folder. `content` is None for what is too large to be shown."""

    mode: int
    content: bytes | None


def is_regular(path: Path) -> bool:
    """A file, and neither a link nor a pipe; not one that cannot be looked at."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


def mode_of(place: Path) -> int:
    """The mode that git records for a file of the folder."""
    found = place.lstat()
    if stat.S_ISLNK(found.st_mode):
        return 0o120000
    if found.st_mode & stat.S_IXUSR:
        return 0o100755
    return 0o100644


def current_version(place: Path) -> FileVersion | None:
    """A file or a link as it is in the folder; None for anything else, such as a pipe."""
    found = place.lstat()
    if stat.S_ISLNK(found.st_mode):
        return FileVersion(0o120000, os.fsencode(place.readlink()))
    if not stat.S_ISREG(found.st_mode):
        return None
    content = None
    if found.st_size <= _SHOWN_BYTES:
        content = read_regular(place, _SHOWN_BYTES, follow=False)
    return FileVersion(mode_of(place), content)


def has_id(place: Path, name: bytes) -> bool:
    """The file is the commit's, be it with the line ends of another system."""
    if place.is_symlink():
        return _blob_id(os.fsencode(place.readlink())) == name
    if not is_regular(place) or place.lstat().st_size > _COMPARED_BYTES:
        return False
    content = read_regular(place, _COMPARED_BYTES, follow=False)
    return name in (_blob_id(content), _blob_id(content.replace(b"\r\n", b"\n")))


def _blob_id(content: bytes) -> bytes:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest().encode()


def is_large_file(place: Path, before: FileVersion) -> bool:
    """The commit has a pointer of Git LFS, and the file is what it points to."""
    if not (before.content or b"").startswith(_LARGE_FILE_POINTER) or not is_regular(place):
        return False
    with open_regular(place, follow=False) as stream:
        return _sha256(stream).encode() in (before.content or b"")


def _sha256(stream: Any) -> str:
    digest = hashlib.sha256()
    while block := stream.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()


def as_diff(name: str, before: FileVersion | None, after: FileVersion | None) -> str:
    """The difference of two versions, None for a file that is not there, as git shows it."""
    head = f"diff --git a/{name} b/{name}\n{_mode_lines(before, after)}"
    if holds_credentials(name):
        return head + "(left out by fp8launch: a file of this name holds credentials)\n"
    old: bytes | None = b""
    new: bytes | None = b""
    from_name = to_name = "/dev/null"
    if before:
        old, from_name = before.content, f"a/{name}"
    if after:
        new, to_name = after.content, f"b/{name}"
    if old is None or new is None or max(len(old), len(new)) > _SHOWN_BYTES:
        return head + _NOT_SHOWN
    if b"\0" in old or b"\0" in new:
        return head + f"Binary files a/{name} and b/{name} differ\n"
    old_lines, new_lines = _lines(old), _lines(new)
    if max(len(old_lines), len(new_lines)) > _SHOWN_LINES:
        return head + _NOT_SHOWN
    text = head
    for line in difflib.unified_diff(old_lines, new_lines, from_name, to_name):
        text += line
        if not line.endswith("\n"):
            text += "\n\\ No newline at end of file\n"
    return text


def _mode_lines(before: FileVersion | None, after: FileVersion | None) -> str:
    if before and after and before.mode != after.mode:
        return f"old mode {before.mode:06o}\nnew mode {after.mode:06o}\n"
    if after and not before:
        return f"new file mode {after.mode:06o}\n"
    if before and not after:
        return f"deleted file mode {before.mode:06o}\n"
    return ""


def _lines(content: bytes) -> list[str]:
    """Lines that end where git ends them: at a line feed, and nowhere else."""
    return re.findall(r"[^\n]*\n|[^\n]+", content.decode("utf-8", "replace"))

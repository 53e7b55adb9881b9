"""Files that another user owns or can write, for tests of what this user's commands do with them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

OTHER = 54321
NOBODY = 65534
NEEDS_ROOT = "only root can give files away"

Spoil = Callable[[Path, Path], object]


def give_away(folder: Path, owner: int = OTHER) -> None:
    """Give a folder and everything in it to another user."""
    for path in (folder, *folder.rglob("*")):
        os.chown(path, owner, owner, follow_symlinks=False)


def _give(path: Path) -> None:
    if os.geteuid():
        pytest.skip(NEEDS_ROOT)
    os.chown(path, NOBODY, NOBODY)


# Ways in which a file, or the folder that holds it, is not this user's alone.
WAYS_TO_SPOIL: list[Spoil] = [
    lambda folder, file: file.chmod(0o666),
    lambda folder, file: folder.chmod(0o777),
    lambda folder, file: _give(file),
    lambda folder, file: _give(folder),
]

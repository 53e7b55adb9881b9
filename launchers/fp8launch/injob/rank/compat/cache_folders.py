"""Folders for compiled code. The home folder of a container is often read-only, and compilers then fail at start."""

from __future__ import annotations

import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path


def private_folder() -> Path | None:
    """Return a folder that only this user can write to: in the user's cache, else in the temporary folder.

    None if neither can be written, or if other users can write to both.
    """
    base = os.environ.get("XDG_CACHE_HOME") or _at_home(".cache")
    temporary = Path(tempfile.gettempdir(), f"fp8launch-{os.getuid()}")
    for folder in (Path(base, "fp8launch"), temporary):
        if _made(folder) and _is_private(folder):
            return folder
    return None


def give_triton_a_cache() -> None:
    """Point Triton to a writable folder if its own is not, unless the recipe names one, and have it store its choices.

    Triton stores compiled kernels in ~/.triton, and fails at the first one that it cannot store. By default, each
    process measures anew which variant of a kernel is fastest.
    """
    os.environ.setdefault("TRITON_CACHE_AUTOTUNING", "1")
    if "TRITON_CACHE_DIR" in os.environ:
        return
    home = os.environ.get("TRITON_HOME")
    usual = Path(home, ".triton", "cache") if home else Path(_at_home(".triton"), "cache")
    if _made(usual):
        return
    folder = private_folder()
    if folder is not None:
        os.environ["TRITON_CACHE_DIR"] = str(folder / "triton")


def _at_home(name: str) -> str:
    """Return a path in the home folder, or in the root folder for a user without a home."""
    with suppress(RuntimeError):
        return str(Path.home() / name)
    return f"/{name}"


def _is_private(folder: Path) -> bool:
    """Return whether only this user can write to the folder: the code that is compiled there will run."""
    found = folder.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022


def _made(folder: Path) -> bool:
    """Make a folder if it is missing, and return whether this process can write to it."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False

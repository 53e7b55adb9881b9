"""Wheels in the user's cache, fetched once and verified by hash.

The code in such a wheel is run, so only a release whose hash is known is fetched, whichever index hands it out, and
a cache that other users could have written is not used.
FP8LAUNCH_OFFLINE=1 forbids the download. A download that failed is not repeated for an hour, so a login node without a
network is not slowed.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fp8launch.injob.ownership import (
    take_write_permission,
    why_others_may_change,
    why_others_may_replace,
)
from fp8launch.rundir.atomic_io import make_folders

DOWNLOAD_SECONDS = 30
RETRY_SECONDS = 3600


class NotFetched(Exception):
    """A wheel is not in the cache and was not fetched, or others may have changed it; the message says why."""


@dataclass(frozen=True)
class Wheel:
    """A release of a package on PyPI, the hash (SHA-256) of one of its wheels, and its size for the message."""

    package: str
    version: str
    sha256: str
    size: str


def cache_folder(name: str) -> Path:
    """Return the user's folder for one kind of cached code."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fp8launch" / name


def safe(place: Path) -> Path:
    """Return a file or folder of the cache. Raises NotFetched where other users could have written what is in it."""
    reason = why_others_may_change(place)
    if reason is None:
        return place
    raise NotFetched(
        f"{place} is not used, because other users could have changed the code in it: {reason}; remove it, or set "
        "XDG_CACHE_HOME to a folder that only you can write to"
    )


def fetch(
    wheel: Wheel,
    folder: Path,
    find: Callable[[], Path | None],
    keep: Callable[[Path], None],
    say: Callable[[str], None] = lambda message: None,
) -> Path:
    """Return what `find` finds, after fetching the wheel where it finds nothing.

    `keep` moves a verified wheel, or its content, from a temporary folder inside `folder` to where `find` looks.
    `say` reports a download. Raises NotFetched.
    """
    found = find()
    if found is not None:
        # A place that the user named, or that is installed, is not the cache's.
        return safe(found) if folder in found.parents else found
    if os.environ.get("FP8LAUNCH_OFFLINE", "0") not in ("", "0"):
        raise NotFetched(f"no {wheel.package} {wheel.version} in {folder}, and FP8LAUNCH_OFFLINE forbids fetching it")
    reason = why_others_may_replace(folder)
    if reason is not None:
        raise NotFetched(f"nothing is fetched to {folder}, where other users could replace it: {reason}")
    try:
        make_folders(folder, 0o700)
        # Of several processes at once one downloads; the others wait and find its wheel.
        with os.fdopen(os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if find() is None:
                _download_once(wheel, folder, keep, say)
    except OSError as exc:
        raise NotFetched(f"{exc.filename or folder}: {exc.strerror or exc}") from None
    found = find()
    if found is None:
        raise NotFetched(f"the wheel of {wheel.package} {wheel.version} does not contain what is expected")
    return safe(found)


def _download_once(wheel: Wheel, folder: Path, keep: Callable[[Path], None], say: Callable[[str], None]) -> None:
    failed = folder / f".failed-{wheel.version}"
    if failed.exists() and time.time() - failed.stat().st_mtime < RETRY_SECONDS:
        raise NotFetched(
            f"{failed.read_text(encoding='utf-8')}; next attempt in an hour. To retry now, delete {failed}"
        )
    say(f"fetching {wheel.package} {wheel.version} once ({wheel.size}, to {folder}); FP8LAUNCH_OFFLINE=1 forbids it")
    with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as temporary:
        try:
            fetched = _download(wheel, Path(temporary))
            take_write_permission(Path(temporary))  # pip follows the umask
            keep(fetched)
        except NotFetched as exc:
            failed.write_text(str(exc), encoding="utf-8")
            raise
    failed.unlink(missing_ok=True)


def _download(wheel: Wheel, folder: Path) -> Path:
    """Put the wheel into an empty folder. Raises NotFetched."""
    name = f"{wheel.package} {wheel.version}"
    # pip keeps no file with another hash, whichever index it came from.
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{wheel.package}=={wheel.version} --hash=sha256:{wheel.sha256}\n", encoding="utf-8")
    # The wheel is read and not installed, so its Python version and platform need not match this Python.
    command = [
        *(sys.executable, "-m", "pip", "download", "--require-hashes", "--requirement", str(requirements)),
        *("--no-deps", "--dest", str(folder)),
        *("--only-binary=:all:", "--ignore-requires-python", "--python-version", "3.12"),
        *("--platform", "manylinux_2_28_x86_64", "--disable-pip-version-check", "--no-input", "--quiet"),
        *("--retries", "1", "--timeout", "10"),
    ]
    try:
        # `python -m` imports from its working folder first: this one contains nobody else's files.
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, errors="replace", timeout=DOWNLOAD_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise NotFetched(f"{name} could not be fetched within {DOWNLOAD_SECONDS} s") from None
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        last = (done.stderr.strip().splitlines() or ["pip brought no wheel"])[-1]
        raise NotFetched(f"{name} could not be fetched: {last.removeprefix('ERROR: ')}")
    return wheels[0]

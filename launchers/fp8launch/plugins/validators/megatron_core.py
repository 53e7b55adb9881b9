"""Megatron-Core on this machine: found, or its wheel downloaded once into the user's cache.

The wheel is 2 MB and is only read, never installed: its validators run with stand-ins for torch.
"""

from __future__ import annotations

import os
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from fp8launch.diagnostics import MACHINE_LACKS, error
from fp8launch.injob.ownership import (
    take_write_permission,
    why_others_may_change,
    why_others_may_replace,
)
from fp8launch.megatron.schema import load_schema
from fp8launch.megatron.versions import WHEELS, Release, release
from fp8launch.plugins.validators import wheels
from fp8launch.plugins.validators.wheels import NotFetched, Wheel, fetch
from fp8launch.rundir.atomic_io import make_folders

# The file that shows that a folder has Megatron-Core with its training part, which wheels contain since 0.17.
_ARGUMENTS = Path("megatron/training/arguments.py")
_PACKAGE_INFO = Path("megatron/core/package_info.py")


class NoMegatron(Exception):
    """No Megatron-Core is available; the message says why."""


def megatron_for(version: str, say: Callable[[str], None] = lambda message: None) -> Path:
    """Return a wheel or folder with this minor version. `say` reports a download. Raises NoMegatron."""
    newest = load_schema(version).version
    folder = cache_folder()

    def keep(wheel: Path) -> None:
        wheel.replace(folder / wheel.name)

    try:
        return fetch(
            Wheel("megatron-core", newest, WHEELS[newest], "2 MB"),
            folder,
            find=lambda: find_megatron(version),
            keep=keep,
            say=say,
        )
    except NotFetched as exc:
        raise NoMegatron(str(exc)) from None


def find_megatron(version: str, path: Path | None = None) -> Path | None:
    """Return the folder of a Megatron-Core of this minor version, or None.

    Looked at, in this order: `path`; the folder or wheel that FP8LAUNCH_MEGATRON names; the megatron-core that is
    installed next to this package; the newest in the user's cache. A place may be a wheel, a folder that holds the
    `megatron` package (an unpacked wheel, site-packages, a Megatron-LM checkout), or a folder of such.
    Raises `UserError` when `path` is given and has no such version.
    """
    minor = release(version)[:2]
    if path is not None:
        found = _newest(_candidates(path), minor)
        if found is None:
            raise error(
                "megatron-path",
                f"{path} contains no Megatron-Core {version}",
                fix="name a wheel of megatron-core, or a folder that holds its megatron package",
            )
        return found
    named = os.environ.get("FP8LAUNCH_MEGATRON")
    places = [_installed(), _candidates(cache_folder())]
    if named:
        places.insert(0, _candidates(Path(named).expanduser()))
    return next(filter(None, (_newest(place, minor) for place in places)), None)


def cache_folder() -> Path:
    """Return the folder of this user's copies of Megatron-Core."""
    return wheels.cache_folder("megatron")


def megatron_version(place: Path) -> str | None:
    """Return the version of Megatron-Core in a wheel or folder; None without Megatron-Core or its training part."""
    if place.suffix == ".whl":
        match = re.match(r"megatron_core-([^-]+)-", place.name)
        if match is None or not place.is_file():
            return None
        return match[1]
    if not (place / _ARGUMENTS).is_file():
        return None
    try:
        text = (place / _PACKAGE_INFO).read_text(encoding="utf-8")
    except OSError:
        return None
    parts = dict(re.findall(r"^(MAJOR|MINOR|PATCH)\s*=\s*(\d+)", text, re.MULTILINE))
    if len(parts) != 3:
        return None
    return f"{parts['MAJOR']}.{parts['MINOR']}.{parts['PATCH']}"


def _candidates(place: Path) -> Iterator[Path]:
    yield place
    if place.is_dir() and not (place / "megatron").is_dir():
        yield from sorted(place.iterdir())


def _installed() -> Iterator[Path]:
    """Yield the folder of each installed megatron-core, in the order of Python's search path."""
    for folder in map(Path, sys.path):
        # importlib.metadata would find the same, but importing it takes as long as reading a recipe.
        if any(folder.glob("megatron_core-*.dist-info")):
            yield folder


def _newest(places: Iterable[Path], minor: Release) -> Path | None:
    matching = []
    for place in places:
        version = megatron_version(place)
        if version and release(version)[:2] == minor:
            matching.append((release(version), place))
    return max(matching, default=(None, None))[1]


def site_of(megatron: Path) -> Path:
    """Return the folder with the `megatron` package. A wheel is unpacked into the user's cache."""
    if megatron.suffix == ".whl":
        return _unpacked(megatron)
    return megatron


def _unpacked(wheel: Path) -> Path:
    """Return a folder of the user's cache with the content of a wheel, where byte code can be kept.

    The wheel itself where that fails, or where other users could change the code in that folder.
    """
    import tempfile
    import zipfile

    try:
        target = cache_folder() / f"{megatron_version(wheel)}-{zlib.crc32(wheel.read_bytes()):08x}"
        if target.is_dir() and not why_others_may_change(target):
            return target
        if target.is_dir() or why_others_may_replace(target):
            return wheel
        make_folders(target.parent, 0o700)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".unpack-") as folder:
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(Path(folder) / "site")
            take_write_permission(Path(folder) / "site")
            # If two processes unpack the wheel, the second one uses the folder of the first.
            (Path(folder) / "site").rename(target)
    except zipfile.BadZipFile as failure:
        raise unusable(wheel, str(failure)) from None
    except OSError:
        if not target.is_dir():
            return wheel
    return target


def unusable(megatron: Path, reason: str) -> Exception:
    return error(
        "megatron-unusable",
        f"the validators of {megatron} cannot be run: {reason}",
        fix="name a wheel of megatron-core, or a folder that holds its megatron package, in FP8LAUNCH_MEGATRON",
        exit_code=MACHINE_LACKS,
    )

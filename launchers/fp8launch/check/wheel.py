"""Megatron-Core's wheel in the user's cache: found, or fetched once.

The wheel is 2 MB and is only read, never installed: its validators run with stand-ins for torch. FP8LAUNCH_OFFLINE=1
forbids the download; a failed one is not tried again for an hour, so a login node without a network is not slowed.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from fp8launch.megatron.schema import load_schema
from fp8launch.megatron.validators import cache_folder, find_megatron

DOWNLOAD_SECONDS = 30
RETRY_SECONDS = 3600


class NoMegatron(Exception):
    """There is no Megatron-Core to ask; the message says why."""


def megatron_for(version: str, say: Callable[[str], None] = lambda message: None) -> Path:
    """A wheel or folder with a Megatron-Core of this minor version; `say` hears of a download. Raises NoMegatron."""
    found = find_megatron(version)
    if found is not None:
        return found
    if os.environ.get("FP8LAUNCH_OFFLINE", "0") not in ("", "0"):
        raise NoMegatron(
            f"no megatron-core {_minor(version)} in {cache_folder()}, and FP8LAUNCH_OFFLINE forbids fetching it"
        )
    return _fetch(load_schema(version).version, say)


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _fetch(version: str, say: Callable[[str], None]) -> Path:
    folder = cache_folder()
    failed = folder / f".failed-{version}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Of several checks at once one fetches; the others wait and find what it brought.
        with (folder / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            found = find_megatron(version)
            if found is not None:
                return found
            if failed.exists() and time.time() - failed.stat().st_mtime < RETRY_SECONDS:
                raise NoMegatron(f"{failed.read_text(encoding='utf-8')}; tried again in an hour, or without {failed}")
            say(f"fetching megatron-core {version} once (2 MB, to {folder}); FP8LAUNCH_OFFLINE=1 forbids it")
            reason = _download(version, folder)
            if reason is not None:
                failed.write_text(reason, encoding="utf-8")
                raise NoMegatron(reason)
            failed.unlink(missing_ok=True)
    except OSError as exc:
        raise NoMegatron(f"{exc.filename or folder}: {exc.strerror or exc}") from None
    found = find_megatron(version)
    if found is None:
        raise NoMegatron(f"what was fetched is no megatron-core {version}")
    return found


def _download(version: str, folder: Path) -> str | None:
    """Put the wheel into `folder`; returns why not, if not."""
    with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as here:
        # The code is the same in every wheel of a version, so one is named that exists, whatever runs this Python.
        command = [
            *(sys.executable, "-m", "pip", "download", f"megatron-core=={version}", "--no-deps", "--dest", here),
            *("--only-binary=:all:", "--ignore-requires-python", "--python-version", "3.12"),
            *("--platform", "manylinux_2_28_x86_64", "--disable-pip-version-check", "--no-input", "--quiet"),
            *("--retries", "1", "--timeout", "10"),
        ]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_SECONDS, check=False)
        except subprocess.TimeoutExpired:
            return f"megatron-core {version} could not be fetched within {DOWNLOAD_SECONDS} s"
        wheels = list(Path(here).glob("*.whl"))
        if done.returncode or not wheels:
            last = (done.stderr.strip().splitlines() or ["pip brought no wheel"])[-1]
            return f"megatron-core {version} could not be fetched: {last.removeprefix('ERROR: ')}"
        wheels[0].replace(folder / wheels[0].name)
    return None

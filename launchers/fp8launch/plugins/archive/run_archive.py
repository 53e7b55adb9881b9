"""Pack the texts of a run into one file, without secrets and without the path of the home folder."""

from __future__ import annotations

import io
import os
import re
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from fp8launch.injob.regular_files import open_regular
from fp8launch.rundir.atomic_io import is_own_file
from fp8launch.rundir.run_dir import MANIFEST, RunFolder
from fp8launch.secrets import redacted

# Of a longer file only the first and the last HALF_BYTES are kept.
HALF_BYTES = 1 << 20
# The user's uncommitted changes are none of the bug report's business.
LEFT_OUT = ("git.diff",)


def archive_bytes(run: RunFolder, environment: Mapping[str, str]) -> bytes:
    """Return a .tar.gz of the run's manifest, recipe, script, attempts and logs.

    Secrets of this shell are removed by their values, others by their form. The home folder becomes `~`, and the
    user's name in `environment` becomes `USER`.
    """
    clean = _Cleaner(list(map(str, run.manifest().get("secrets") or [])), environment)
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for file in _files(run):
            data = clean(_read(file)).encode("utf-8", "backslashreplace")
            info = tarfile.TarInfo(f"{clean(run.run_id)}/{clean(str(file.relative_to(run.path)))}")
            info.size, info.mtime, info.mode = len(data), int(file.stat().st_mtime), 0o644
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


class _Cleaner:
    def __init__(self, secrets: Sequence[str], environment: Mapping[str, str]) -> None:
        self._secrets = secrets
        homes = {str(Path.home()), os.path.realpath(Path.home()), environment.get("HOME", "")}
        self._replacements: list[tuple[re.Pattern[str], str]] = []
        for home in sorted(homes, key=len, reverse=True):
            # If the home folder is /, every path would be rewritten.
            if len(home) > 1:
                self._replacements.append((re.compile(rf"{re.escape(home)}(?![\w.-])"), "~"))
        user = environment.get("USER") or environment.get("LOGNAME") or ""
        # Short names and `root` are words that logs contain anyway.
        if len(user) > 2 and user != "root":
            self._replacements.append((re.compile(rf"(?<![\w.-]){re.escape(user)}(?![\w.-])"), "USER"))

    def __call__(self, text: str) -> str:
        text = redacted(text, self._secrets)
        for pattern, replacement in self._replacements:
            text = pattern.sub(replacement, text)
        return text


def _files(run: RunFolder) -> Iterator[Path]:
    """Yield the files at the top of a run folder, and its logs. Links, `code/` and checkpoints are left out."""
    files = sorted(run.path.iterdir(), key=lambda file: (file.name != MANIFEST, file.name))
    logs = run.path / "logs"
    if logs.is_dir() and not logs.is_symlink():
        files += sorted(logs.iterdir())
    for file in files:
        if is_own_file(file) and file.name not in LEFT_OUT and not file.name.startswith("."):
            yield file


def _read(file: Path) -> str:
    with open_regular(file, follow=False) as stream:
        head = stream.read(2 * HALF_BYTES)
        size = stream.seek(0, 2)
        if size > len(head):
            stream.seek(-HALF_BYTES, 2)
            left_out = size - 2 * HALF_BYTES
            head = head[:HALF_BYTES] + f"\n... {left_out} bytes left out ...\n".encode() + stream.read()
    return head.decode("utf-8", "backslashreplace")

"""A cache of Megatron's verdicts in the user's cache folder, so that a repeated check starts no process.

A verdict follows from the request, from Megatron's files, and from the worker and its interpreter, which hide
everything else of this machine from Megatron. All of these are in the key of an entry. A request that names a file of
this machine runs every time, because Megatron may read that file.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from fp8launch.injob.ownership import why_not_own, why_others_may_replace
from fp8launch.plugins.validators.megatron_core import cache_folder, site_of
from fp8launch.plugins.validators.verdicts import WORKER_FILES, MegatronVerdict, Request, validate, verdict_from_json
from fp8launch.rundir.atomic_io import make_folders

# An entry has about 300 bytes. The older half of more entries is removed.
MOST_ENTRIES = 4000


def cached_verdicts(requests: Sequence[Request], megatron: Path) -> list[MegatronVerdict]:
    """Return Megatron's verdict on each request, like `validate`. Only requests without an entry run."""
    folder = cache_folder().parent / "verdicts"
    basis = _basis(site_of(megatron))
    entries: list[Path | None] = [None] * len(requests)
    if why_others_may_replace(folder) is None:
        for position, request in enumerate(requests):
            if not _names_a_file(request):
                entries[position] = folder / f"{_key(basis, request)}.json"
    known = {}
    for position, entry in enumerate(entries):
        if entry is not None and (verdict := _read(entry)):
            known[position] = verdict
    missing = [position for position in range(len(requests)) if position not in known]
    if missing:
        found = validate([requests[position] for position in missing], megatron)
        known |= dict(zip(missing, found, strict=True))
        _keep([(entries[position], known[position]) for position in missing])
    return [known[position] for position in range(len(requests))]


def _basis(site: Path) -> bytes:
    """Return a digest of Megatron's files, by size and time, and of the worker's files, by content."""
    import packaging
    import yaml

    digest = hashlib.sha256(f"{sys.executable} {sys.version} {yaml.__version__} {packaging.__version__}".encode())
    for file in WORKER_FILES:
        digest.update(file.read_bytes())
    for line in sorted(_files_below(str(site / "megatron"))):
        digest.update(line.encode("utf-8", "surrogateescape"))
    return digest.digest()


def _files_below(folder: str) -> Iterator[str]:
    """Return path, size and modification time of every Python file, by which Python recognizes stale byte code."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir():
                if entry.name != "__pycache__":
                    yield from _files_below(entry.path)
            elif entry.name.endswith((".py", ".so")):
                state = entry.stat()
                yield f"{entry.path} {state.st_size} {state.st_mtime_ns}\n"


def _key(basis: bytes, request: Request) -> str:
    content = json.dumps(asdict(request), sort_keys=True).encode()
    return hashlib.sha256(basis + content).hexdigest()


def _names_a_file(request: Request) -> bool:
    """Return whether a word of the request, or a value of its environment, is a path of this machine."""
    values = [word.rpartition("=")[2] for word in request.argv]
    return any(map(_exists, (*request.argv, *values, *request.env.values())))


def _exists(text: str) -> bool:
    try:
        return os.path.lexists(text)
    except ValueError:
        return False


def _read(entry: Path) -> MegatronVerdict | None:
    """Return the verdict of an entry; None without an entry, or if somebody else could have written it."""
    if why_not_own(entry) or why_not_own(entry.parent):
        return None
    try:
        return verdict_from_json(json.loads(entry.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _keep(verdicts: Sequence[tuple[Path | None, MegatronVerdict]]) -> None:
    """Write entries for certain verdicts. It is no error if the cache cannot be written."""
    certain = []
    for entry, verdict in verdicts:
        if entry is not None and verdict.no_answer is None and not verdict.unanswered:
            certain.append((entry, verdict))
    if not certain:
        return
    folder = certain[0][0].parent
    with contextlib.suppress(OSError):
        make_folders(folder, 0o700)
        for entry, verdict in certain:
            written = folder / f".{entry.name}-{os.getpid()}"
            written.write_text(json.dumps(asdict(verdict)), encoding="utf-8")
            written.replace(entry)
        _prune(folder)


def _prune(folder: Path) -> None:
    entries = list(folder.iterdir())
    if len(entries) <= MOST_ENTRIES:
        return
    entries.sort(key=lambda entry: entry.stat().st_mtime)
    for entry in entries[: len(entries) - MOST_ENTRIES // 2]:
        entry.unlink(missing_ok=True)

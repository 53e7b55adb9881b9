"""A cache of verdicts in the user's cache folder, by the work of a proof: a repeated proof starts no process.

Verdicts follow from what is trained, from Megatron's files, from this plugin and the in-job code, and from torch. All
of these are in the key of an entry. An entry that somebody else could have written is ignored.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import fp8launch.injob.rank
import fp8launch.plugins.prove
from fp8launch.injob.ownership import why_not_own, why_others_may_replace
from fp8launch.plugins.prove.judge import Check, Difference
from fp8launch.plugins.prove.settings import CUDA
from fp8launch.plugins.prove.work import Findings, Work
from fp8launch.plugins.validators.megatron_core import cache_folder as megatron_folder
from fp8launch.rundir.atomic_io import make_folders

# An entry has some kilobytes. The older half of more entries is removed.
MOST_ENTRIES = 2000


def folder() -> Path:
    """Return the folder of the entries."""
    return megatron_folder().parent / "proofs"


def entry_of(work: Work, megatron: Path) -> Path | None:
    """Return the file for a verdict; None where other users could replace it."""
    if why_others_may_replace(folder()) is not None:
        return None
    digest = hashlib.sha256(f"{sys.version} torch {importlib.metadata.version('torch')}".encode())
    if work.device == CUDA:
        import torch

        te = importlib.metadata.version("transformer_engine")
        digest.update(f" {torch.cuda.get_device_name()} transformer_engine {te}".encode())
    for line in (*_files_of(megatron / "megatron"), *_own_files()):
        digest.update(line.encode("utf-8", "surrogateescape"))
    digest.update(json.dumps(asdict(work), sort_keys=True).encode())
    return folder() / f"{digest.hexdigest()}.json"


def read(entry: Path | None) -> Findings | None:
    """Return the verdict of an entry; None without one."""
    if entry is None or why_not_own(entry) or why_not_own(entry.parent):
        return None
    try:
        return _from_json(json.loads(entry.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def keep(entry: Path | None, findings: Findings) -> None:
    """Write an entry for a complete verdict. It is no error if the cache cannot be written."""
    if entry is None or findings.unknown:
        return
    with contextlib.suppress(OSError):
        make_folders(entry.parent, 0o700)
        written = entry.with_name(f".{entry.name}-{os.getpid()}")
        written.write_text(json.dumps(asdict(findings)), encoding="utf-8")
        written.replace(entry)
        entries = sorted(entry.parent.iterdir(), key=lambda file: file.stat().st_mtime)
        if len(entries) > MOST_ENTRIES:
            for old in entries[: -MOST_ENTRIES // 2]:
                old.unlink(missing_ok=True)


def _from_json(stored: dict[str, Any]) -> Findings:
    checks = []
    for check in stored["checks"]:
        differences = tuple(Difference(**difference) for difference in check["differences"])
        checks.append(Check(check["name"], check["ok"], check["detail"], differences))
    return Findings(tuple(checks), stored["readers"], tuple(stored["unknown"]), stored["right"], stored["tried"])


def _files_of(place: Path) -> Iterator[str]:
    """Yield path, size and modification time of every Python file, by which Python recognizes stale byte code."""
    for file in sorted(place.rglob("*.py")):
        state = file.stat()
        yield f"{file} {state.st_size} {state.st_mtime_ns}\n"


def _own_files() -> Iterator[str]:
    for package in (fp8launch.plugins.prove, fp8launch.injob.rank):
        for file in sorted(Path(package.__path__[0]).rglob("*.py")):
            yield f"{file.name} {hashlib.sha256(file.read_bytes()).hexdigest()}\n"

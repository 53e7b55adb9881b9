"""The provenance of a run: the checkout that contained its recipe, the image file, the versions."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from fp8launch import __version__
from fp8launch.injob.regular_files import read_regular
from fp8launch.recipe.yaml_source import is_file
from fp8launch.submit.checkout import read_checkout

MAX_DIFF = 5 << 20


@dataclass(frozen=True)
class Origin:
    """The provenance of a run: git state, uncommitted diff, versions. The points of a grid share one."""

    git: dict[str, Any] | None
    diff: str
    versions: dict[str, str | None]


def origin_of(recipe: Path, slurm: str | None) -> Origin:
    """The origin of a run of the recipe in this file. `slurm` is Slurm's version."""
    git, diff = checkout_of(recipe)
    return Origin(git, diff, versions(slurm))


def checkout_of(file: Path) -> tuple[dict[str, Any] | None, str]:
    """The git checkout that holds a file, as commit, branch and whether it has changes; and its uncommitted diff."""
    found = read_checkout(file)
    if found is None:
        return None, ""
    dirty = bool(found.changes) or found.others
    state: dict[str, Any] = {"commit": found.commit, "branch": found.branch, "dirty": dirty}
    if len(found.diff) > MAX_DIFF:
        state["diff_cut_at_bytes"] = MAX_DIFF
    return state, found.diff[:MAX_DIFF]


def image_record(image: str | None) -> dict[str, Any] | None:
    """The identity of an image: a digest in its URI or beside its file, else the file's size and time."""
    if image is None:
        return None
    record: dict[str, Any] = {"image": image}
    digest = image.rpartition("@")[2]
    if digest.startswith("sha256:"):
        return {**record, "digest": digest}
    path = Path(image)
    if is_file(path):
        stat = path.stat()
        record |= {"bytes": stat.st_size, "modified": _utc(stat.st_mtime)}
        beside = path.with_name(path.name + ".sha256")
        words = _first_words(beside)
        if words:
            record["digest"] = "sha256:" + words[0]
    return record


def _first_words(file: Path) -> list[str]:
    try:
        return read_regular(file, 4096).decode(errors="replace").split()
    except (OSError, ValueError):
        return []


def versions(slurm: str | None) -> dict[str, str | None]:
    """The software that submitted the run."""
    return {"fp8launch": __version__, "python": platform.python_version(), "slurm": slurm}


def _utc(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="seconds")

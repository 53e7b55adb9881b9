"""Where a run came from: the checkout that held its recipe, the image file, the versions."""

from __future__ import annotations

import os
import platform
import subprocess
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from fp8launch import __version__
from fp8launch.recipe.source import is_file

MAX_DIFF = 5 << 20


@dataclass(frozen=True)
class Origin:
    """Where a run came from: git state, uncommitted diff, versions. The points of a grid share one."""

    git: dict[str, Any] | None
    diff: str
    versions: dict[str, str | None]


def origin_of(recipe: Path, slurm: str | None) -> Origin:
    """The origin of a run of the recipe in this file. `slurm` is Slurm's version."""
    git, diff = checkout_of(recipe)
    return Origin(git, diff, versions(slurm))


def checkout_of(file: Path) -> tuple[dict[str, Any] | None, str]:
    """The git checkout that holds a file, as commit, branch and whether it has changes; and its uncommitted diff."""
    folder = file.resolve().parent
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None, ""
    quiet = _without_programs(folder)
    diff = _git(folder, *quiet, "diff", "HEAD", "--no-color", "--no-ext-diff", "--no-textconv") or ""
    state = {
        "commit": commit.strip(),
        "branch": (_git(folder, "rev-parse", "--abbrev-ref", "HEAD") or "").strip(),
        "dirty": bool(_git(folder, *quiet, "status", "--porcelain")),
    }
    if len(diff) > MAX_DIFF:
        state["diff_cut_at_bytes"] = MAX_DIFF
    return state, diff[:MAX_DIFF]


def _without_programs(folder: Path) -> list[str]:
    """Options that keep git from running what a checkout of somebody else has in its own configuration."""
    told = _git(folder, "config", "--local", "--name-only", "--get-regexp", r"^filter\..*\.(clean|process)$") or ""
    filters = {line.rpartition(".")[0] for line in told.splitlines()}
    off = ["core.fsmonitor=false", "core.hooksPath=/dev/null"]
    off += [f"{name}.{key}" for name in sorted(filters) for key in ("clean=", "process=", "required=false")]
    return [word for setting in off for word in ("-c", setting)]


def image_record(image: str | None) -> dict[str, Any] | None:
    """What identifies an image: a digest in its URI or beside its file, else the file's size and time."""
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
        words = beside.read_text(errors="replace").split() if is_file(beside) else []
        if words:
            record["digest"] = "sha256:" + words[0]
    return record


def versions(slurm: str | None) -> dict[str, str | None]:
    """What submitted the run."""
    return {"fp8launch": __version__, "python": platform.python_version(), "slurm": slurm}


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=20,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0"},
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _utc(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="seconds")

"""Where the paths of a job are on this machine: through the mounts of its container, or the same place without one."""

from __future__ import annotations

import os
import posixpath
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fp8launch.job.cluster import Cluster
from fp8launch.job.images import local_path
from fp8launch.job.job import Mount
from fp8launch.problems import Problem, UserError
from fp8launch.recipe.load import LoadedRecipe

Kind = Literal["file", "folder", "missing", "denied"]
# Megatron hands these to its object store readers; a single slash is a path.
_REMOTE = re.compile(r"[a-z][a-z0-9+.-]*://")


@dataclass(frozen=True)
class JobPaths:
    """`mounts` is None for a job without a container, whose paths are the machine's own."""

    mounts: tuple[Mount, ...] | None
    runtime: str | None = None

    def here(self, path: str) -> Path | None:
        """The place of an absolute path of the job on this machine.

        None where this machine cannot see it: in an object store, in the image, or relative to a run folder to be.
        """
        if not path.startswith("/"):
            return None
        if self.mounts is None:
            return Path(path)
        mount = self._mount(path)
        if mount is None:
            return None
        rest = posixpath.relpath(posixpath.normpath(path), posixpath.normpath(mount.target))
        return Path(posixpath.normpath(posixpath.join(mount.source, rest)))

    def read_only(self, path: str) -> Mount | None:
        """The read-only mount that holds an absolute path."""
        mount = self._mount(path) if self.mounts is not None else None
        return mount if mount is not None and mount.read_only else None

    def forgotten(self, path: str) -> bool:
        """The path is on this machine, and no mount brings it into the container.

        A runtime may bring more by itself: Apptainer home and what its site says, Charliecloud /tmp, enroot what its
        site says. So this is a reason to warn, never to refuse.
        """
        if self.mounts is None or self.runtime == "apptainer" or not path.startswith("/") or self._mount(path):
            return False
        if self.runtime == "charliecloud" and _is_below(posixpath.normpath(path), "/tmp"):
            return False
        return os.path.lexists(path)

    def _mount(self, path: str) -> Mount | None:
        path = posixpath.normpath(path)
        over = [m for m in self.mounts or () if _is_below(path, posixpath.normpath(m.target))]
        return max(over, key=lambda m: len(posixpath.normpath(m.target)), default=None)


def job_paths(loaded: LoadedRecipe, cluster: Cluster) -> JobPaths:
    """The paths of a recipe's job. Mounts that do not parse are left out: planning the job tells of them."""
    if loaded.recipe.container.image is None or cluster.runtime == "none":
        return JobPaths(None)
    texts = [*cluster.mounts, *loaded.recipe.container.mounts]
    return JobPaths(tuple(m for text in texts if (m := _parse(text))), cluster.runtime)


def is_remote(path: str) -> bool:
    """An address of an object store, such as s3://bucket/key."""
    return _REMOTE.match(path) is not None


def unexpanded(path: str) -> bool:
    """Holds a `~` or `$` that a shell would have expanded; no shell reads Megatron's arguments."""
    return path.startswith(("~", "$")) or "/$" in path


def kind_of(path: Path) -> Kind:
    """What is at a path, for this user; a path that no file system takes is missing."""
    try:
        return "folder" if stat.S_ISDIR(path.stat().st_mode) else "file"
    except PermissionError:
        return "denied"
    except (OSError, ValueError):
        return "missing"


def entries(folder: Path) -> list[str]:
    """The names in a folder, sorted; none where there is no folder or it may not be read."""
    try:
        return sorted(entry.name for entry in folder.iterdir())
    except (OSError, ValueError):
        return []


def missing_path(
    what: str, text: str, where: str | None, paths: JobPaths, wanted: Kind = "file", code: str = "file-missing"
) -> Problem | None:
    """The problem of a path that a run reads and that is not there; None where it is, or where nobody can see it."""
    if not text.startswith("/"):
        return Problem(
            "error",
            "path-relative",
            f"{what} '{text}' is relative to the run folder, which is new for each run and does not hold it",
            where,
            "write the path in full",
        )
    if paths.forgotten(text):
        return not_mounted(what, text, where, text.rpartition("/")[0] or text)
    here = paths.here(text)
    found = wanted if here is None else kind_of(here)
    if found == wanted:
        return None
    seen = "" if str(here) == text else f" (on this machine {here})"
    state = {"missing": "does not exist", "denied": "may not be read by you"}.get(
        found, f"is a {found}, not a {wanted}"
    )
    return Problem("error", code, f"{what} {text}{seen} {state}", where, "correct the path")


def not_mounted(what: str, text: str, where: str | None, folder: str) -> Problem:
    """A path that exists here and that the job's container will not have."""
    return Problem(
        "warning",
        "path-not-mounted",
        f"{what} {text} is on this machine, but no mount brings it into the container",
        where,
        f"add '{folder}' to container.mounts, or to `mounts:` of the cluster profile",
    )


def why_not_writable(path: Path) -> str | None:
    """Why the folder `path` cannot be made or written by this user, in words; None when it can."""
    found = path
    while kind_of(found) == "missing" and found != found.parent:
        found = found.parent
    if kind_of(found) == "denied":
        return f"{found.parent} does not let you in"
    if kind_of(found) != "folder":
        return f"{found} is not a folder"
    if not os.access(found, os.W_OK | os.X_OK):
        return f"{found} cannot be written by you" if found == path else f"{found} does not let you make it"
    return None


def _parse(text: str) -> Mount | None:
    source, _, rest = text.partition(":")
    target, _, mode = rest.partition(":")
    try:
        source = str(local_path(source)) if source.startswith("~") else source
    except UserError:
        return None
    target = target or source
    return Mount(source, target, mode == "ro") if source.startswith("/") and target.startswith("/") else None


def _is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")

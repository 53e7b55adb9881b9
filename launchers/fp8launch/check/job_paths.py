"""Resolve the paths of a job through the mounts of its container, or directly if it has none.

A path that is not mounted into the container is an error even if it exists on this machine. Files that the run writes
there are deleted with the container, and files that it reads are not found.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from fp8launch.cluster.images import image_folder
from fp8launch.cluster.profile import Cluster
from fp8launch.cluster.runtimes import Runtime
from fp8launch.diagnostics import Problem, UserError
from fp8launch.job.container import clean, covering, is_below, on_host, parse_mount, stated_mounts
from fp8launch.job.job import Mount
from fp8launch.recipe.load import LoadedRecipe

Kind = Literal["file", "folder", "missing", "denied"]
Access = Literal["read", "write"]
# URLs for Megatron's object store readers. With a single slash, the text is a path.
_REMOTE = re.compile(r"[a-z][a-z0-9+.-]*://")
# Names of these flags in recipes.
RECIPE_NAMES = {"save": "checkpoint.dir", "load": "checkpoint.load", "data_cache_path": "data.cache"}
# The maximum number of symbolic links that Linux follows in one path.
_MAX_LINKS = 40


@dataclass(frozen=True)
class JobPaths:
    """The file system as a job's processes see it.

    `mounts` has the container's mounts in order. It is None for a job without a container, which sees the host's paths.
    `image` is the root folder of the image on this machine, if the image is a folder. `contains` has the paths that the
    recipe declares as part of the image. `promised` is as in `LoadedRecipe`: nobody can look into these folders yet.
    """

    mounts: tuple[Mount, ...] | None
    runtime: Runtime | None = None
    image: Path | None = None
    contains: tuple[str, ...] = ()
    promised: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def here(self, path: object) -> Path | None:
        """Map an absolute path of the job to this machine.

        Returns None if this machine cannot access the path, because it is in an object store, in the image, promised or
        relative to a future run folder, and if the value is not text.
        """
        if not isinstance(path, str) or not path.startswith("/") or self.promise(path) is not None:
            return None
        if self.mounts is None:
            return Path(path)
        inside = self.followed(path)
        host = on_host(self.mounts, inside)
        if host is not None:
            return Path(host)
        if self.image is not None:
            return self.image / inside.lstrip("/")
        return None

    def promise(self, path: object) -> Mapping[str, Any] | None:
        """Return the manifest entries of the run that will write a path, or None if no run promises it."""
        text = clean(str(path))
        return next((entries for folder, entries in self.promised.items() if is_below(text, folder)), None)

    def read_only(self, path: str) -> Mount | None:
        """Return the read-only mount that contains an absolute path, if any."""
        mount = covering(self.mounts or (), self.followed(path))
        return mount if mount is not None and mount.read_only else None

    def mounted(self, path: str) -> bool:
        """Return whether an absolute path is on the host, where files outlive the container."""
        return self.mounts is None or covering(self.mounts, self.followed(path)) is not None

    def visible(self, path: str) -> bool:
        """Return whether a job can find an absolute path, on the host or in the known parts of the image."""
        if self.mounted(path):
            return True
        inside = self.followed(path)
        if any(is_below(inside, clean(place)) for place in self.contains):
            return True
        return self.image is not None and os.path.lexists(self.image / inside.lstrip("/"))

    def leaves_the_run_folder(self, path: str) -> bool:
        """Return whether a relative path leads out of the run folder, to places that the container does not have."""
        return self.mounts is not None and posixpath.normpath(path).startswith("..")

    def followed(self, path: str) -> str:
        """Resolve the symbolic links of an absolute path, with their targets interpreted inside the container."""
        mounts = self.mounts or ()
        targets = {clean(mount.target) for mount in mounts}
        at, links = "/", 0
        pending = _parts(clean(path))
        while pending:
            name = pending.pop(0)
            if name == "..":
                at = posixpath.dirname(at)
                continue
            step = posixpath.join(at, name)
            link = None
            if step not in targets:  # a mount hides a link at its target, and the host resolves links in its source
                link = _link(on_host(mounts, step))
            if link is None or links == _MAX_LINKS:
                at = step
                continue
            links += 1
            if link.startswith("/"):
                at = "/"
            pending = _parts(link) + pending
        return at


def job_paths(loaded: LoadedRecipe, cluster: Cluster, runtime: Runtime | None = None) -> JobPaths:
    """Return the file system of a recipe's job. `runtime` defaults to the profile's runtime, or else to pyxis.

    Invalid mounts are skipped, because planning the job reports them.
    """
    container = loaded.recipe.container
    runtime = runtime or cluster.runtime or "pyxis"
    if container.image is None or runtime == "none":
        return JobPaths(None, promised=loaded.promised)
    texts = (text for text, _ in stated_mounts(loaded, cluster))
    mounts = (*_runtime_mounts(runtime, os.environ), *_parsed_mounts(texts))
    image = image_folder(container.image, cluster)
    return JobPaths(mounts, runtime, image, tuple(container.contains), loaded.promised)


def _runtime_mounts(runtime: Runtime, environment: Mapping[str, str]) -> tuple[Mount, ...]:
    """Return the mounts that a runtime adds to every container, as far as this machine can tell.

    Pyxis adds none: its /tmp is empty and is deleted with the container, and our jobs disable mounting the home folder.
    Charliecloud mounts /tmp. Apptainer mounts /tmp, the home folder, and the bind paths in its configuration.
    """
    if runtime == "charliecloud":
        return (Mount("/tmp", "/tmp"),)
    if runtime != "apptainer":
        return ()
    found = [Mount("/tmp", "/tmp"), Mount("/var/tmp", "/var/tmp")]
    home = environment.get("HOME", "")
    if home.startswith("/"):
        found.append(Mount(home, home))
    for config in _APPTAINER_CONFIGS:
        found += _apptainer_binds(config)
    return tuple(found)


_APPTAINER_CONFIGS = (
    Path("/etc/apptainer/apptainer.conf"),
    Path("/usr/local/etc/apptainer/apptainer.conf"),
    Path("/etc/singularity/singularity.conf"),
    Path("/usr/local/etc/singularity/singularity.conf"),
)


def _apptainer_binds(config: Path) -> list[Mount]:
    """Parse the site's `bind path = /source[:/target[:options]]` lines."""
    try:
        text = config.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return []
    return _parsed_mounts(re.findall(r"^[ \t]*bind path[ \t]*=[ \t]*(\S+)", text, re.M))


def _parsed_mounts(texts: Iterable[str]) -> list[Mount]:
    found = []
    for text in texts:
        with contextlib.suppress(UserError):
            found.append(parse_mount(text))
    return [mount for mount in found if mount is not None]


def _parts(path: str) -> list[str]:
    return [part for part in path.split("/") if part not in ("", ".")]


def _link(host: str | None) -> str | None:
    """Return the target of a symbolic link on this machine; None for anything else."""
    if host is None:
        return None
    try:
        return os.readlink(host)  # noqa: PTH115 a Path would normalize the target
    except (OSError, ValueError):
        return None


def is_remote(path: str) -> bool:
    """Return whether a path is an object store URL, such as s3://bucket/key."""
    return _REMOTE.match(path) is not None


def unexpanded(path: str) -> bool:
    """Return whether a path contains `~` or `$`. No shell expands them, because none reads Megatron's arguments."""
    return path.startswith(("~", "$")) or "/$" in path


def local_path_in(value: object) -> str | None:
    """Return a path that can be looked up; None for unset values, URLs, and paths that a shell would have to expand."""
    if not isinstance(value, str) or not value or is_remote(value) or unexpanded(value):
        return None
    return value


def nearest_existing(path: Path) -> Path:
    """Return the path, or the nearest folder above it that exists."""
    while kind_of(path) == "missing" and path != path.parent:
        path = path.parent
    return path


def kind_of(path: Path) -> Kind:
    """Return the kind of a path as this user sees it. A path that is invalid on the file system is "missing"."""
    try:
        mode = path.stat().st_mode
    except PermissionError:
        return "denied"
    except (OSError, ValueError):
        return "missing"
    if stat.S_ISDIR(mode):
        return "folder"
    return "file"


def entries(folder: Path) -> list[str]:
    """Return the sorted names in a folder; empty if the folder is missing or unreadable."""
    try:
        return sorted(entry.name for entry in folder.iterdir())
    except (OSError, ValueError):
        return []


def out_of_reach(
    what: str, text: str, where: str | None, paths: JobPaths, fix: str = "write an absolute path"
) -> Problem | None:
    """Return the problem of an input path that no job could find on any machine. `fix` is for relative paths."""
    if not text.startswith("/"):
        message = f"{what} '{text}' is relative to the run folder, which is new for each run and does not contain it"
        return Problem("error", "path-relative", message, where, fix)
    if not paths.visible(text):
        return not_mounted(what, text, where, paths, "read")
    return None


def missing_path(
    what: str, text: str, where: str | None, paths: JobPaths, wanted: Kind = "file", code: str = "file-missing"
) -> Problem | None:
    """Return the problem of a missing input path, or None if it exists or cannot be checked from here."""
    if problem := out_of_reach(what, text, where, paths):
        return problem
    here = paths.here(text)
    if here is None:
        return None
    found = kind_of(here)
    if found == wanted:
        return None
    states = {"missing": "does not exist", "denied": "is not readable by you"}
    state = states.get(found, f"is a {found}, not a {wanted}")
    return Problem("error", code, f"{what} {with_place_here(text, here)} {state}", where, "correct the path")


def with_place_here(text: str, here: Path) -> str:
    """Return a path of the job, with its path on this machine if that differs."""
    return text if str(here) == text else f"{text} (on this machine {here})"


def not_mounted(what: str, text: str, where: str | None, paths: JobPaths, access: Access) -> Problem:
    """Return the problem of a path that is missing in the job's container, with the mount that would add it."""
    led = paths.followed(text)
    place = text
    if led != clean(text):
        place = f"{text}, a link to {led},"
    if access == "write":
        state = "files that the run writes there are deleted with the container"
    elif os.path.lexists(led):
        state = "it exists on this machine, but the run will not find it"
    else:
        state = "the run will not find it"
    folder = _folder_to_mount(led, access)
    fix = f"mount it: `container: {{mounts: [{folder}]}}` in the recipe, or `mounts: [{folder}]` in the cluster profile"
    if access == "read":
        fix += f"; if the image itself contains it, `container: {{contains: [{text}]}}`"
    elif places := _mounted_places(paths.mounts or ()):
        fix += f"; or choose a folder below {places}"
    message = f"{what} {place} is not on a mount of the container: {state}"
    return Problem("error", "path-not-mounted", message, where, fix)


def _folder_to_mount(path: str, access: Access) -> str:
    """Return the nearest existing parent folder, or the first folder of the path if there is none."""
    root = Path("/")
    found = Path(path)
    if access == "read":
        found = found.parent
    while kind_of(found) != "folder" and found != root:
        found = found.parent
    if found != root:
        return str(found)
    return f"/{Path(path).parts[1]}"


def _mounted_places(mounts: tuple[Mount, ...]) -> str:
    # Do not suggest /tmp, because files in a node's /tmp do not last.
    kept = [mount.target for mount in mounts if not mount.read_only and mount.target not in ("/tmp", "/var/tmp")]
    return " or ".join(dict.fromkeys(kept[-3:]))


def why_not_writable(path: Path) -> str | None:
    """Return why this user cannot create or write to the folder `path`; None if it is writable."""
    found = nearest_existing(path)
    if kind_of(found) == "denied":
        return f"you have no access to {found.parent}"
    if kind_of(found) != "folder":
        return f"{found} is not a folder"
    if os.access(found, os.W_OK | os.X_OK):
        return None
    if found == path:
        return f"you cannot write to {found}"
    return f"you cannot create folders in {found}"

"""The host paths of paths inside a container."""

from __future__ import annotations

import posixpath
from collections.abc import Sequence

from fp8launch.job.job import Mount


def covering(mounts: Sequence[Mount], path: str) -> Mount | None:
    """The mount that an absolute path of the container leads into: of several, the one made last hides the others."""
    path = clean(path)
    for mount in reversed(mounts):
        if is_below(path, clean(mount.target)):
            return mount
    return None


def on_host(mounts: Sequence[Mount], path: str) -> str | None:
    """The host's path of an absolute path of the container; None where no mount brings it there."""
    mount = covering(mounts, path)
    if mount is None:
        return None
    rest = posixpath.relpath(clean(path), clean(mount.target))
    return clean(posixpath.join(mount.source, rest))


def clean(path: str) -> str:
    """An absolute path without `.`, `..`, and doubled slashes."""
    return "/" + posixpath.normpath(path).lstrip("/")


def is_below(path: str, folder: str) -> bool:
    """Whether `path` is `folder` or in it; both normalized."""
    return path == folder or path.startswith(folder.rstrip("/") + "/")

"""Folders for data and checkpoints that a cluster profile names, as paths on this machine."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from fp8launch.cluster.images import local_path
from fp8launch.diagnostics import error

if TYPE_CHECKING:
    from fp8launch.cluster.profile import Cluster

CHECKPOINTS = "cluster profile: storage.checkpoints"
DATA = "cluster profile: storage.data"


def stated_folder(text: str, name: str, where: str) -> Path:
    """Return a folder of a profile with `~` and variables of this shell expanded. Raises UserError for an unset one."""
    expanded = os.path.expandvars(text)
    if unset := re.findall(r"\$\{?(\w+)\}?", expanded):
        message = f"{name} {text} contains the variable {unset[0]}, which is not set in this shell"
        code = f"{name.removeprefix('the ').replace(' ', '-')}-variable"
        raise error(code, message, where, f"export {unset[0]}=..., or write the path without variables")
    return local_path(expanded, name)


def data_place(cluster: Cluster) -> Path | None:
    """Return where datasets are, for paths that are not absolute."""
    return _place(cluster.storage.data, DATA)


def checkpoint_place(cluster: Cluster) -> Path | None:
    """Return where checkpoints go, for a `checkpoint.dir` that is not absolute."""
    return _place(cluster.storage.checkpoints, CHECKPOINTS)


def _place(stated: str | None, where: str) -> Path | None:
    if not stated:
        return None
    return stated_folder(stated, "the storage place", where)


def storage_mounts(cluster: Cluster) -> Iterator[tuple[str, str]]:
    """Yield each place as the text of a mount to the same path, and the key that states it.

    A place that a mount of the profile already covers is left out, because that mount may be read-only.
    """
    for place, where in ((data_place(cluster), DATA), (checkpoint_place(cluster), CHECKPOINTS)):
        if place is not None and not any(_covers(mount, place) for mount in cluster.mounts):
            yield str(place), where


def _covers(mount: str, place: Path) -> bool:
    source, _, rest = mount.partition(":")
    target = rest.partition(":")[0] or source
    return source == target and place.is_relative_to(source)

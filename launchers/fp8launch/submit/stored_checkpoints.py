"""A run's checkpoints where the cluster profile stores them: the run folder has a link to a folder of its own there."""

from __future__ import annotations

import contextlib
import itertools
import os
from pathlib import Path, PurePath

from fp8launch.cluster.profile import Cluster
from fp8launch.cluster.storage import CHECKPOINTS, checkpoint_place
from fp8launch.diagnostics import MACHINE_LACKS, error
from fp8launch.recipe.schema import Recipe
from fp8launch.rundir.atomic_io import make_folders


def link_name(recipe: Recipe) -> str | None:
    """Return the name in the run folder that a relative `checkpoint.dir` begins with; None for any other."""
    stated = PurePath(os.path.normpath(recipe.checkpoint.dir or "/"))
    if stated.is_absolute() or stated.parts[:1] in ((), ("..",)):
        return None
    return stated.parts[0]


def checkpoint_links(recipe: Recipe, cluster: Cluster, run: Path) -> dict[str, Path]:
    """Make the folder for the checkpoints of a run, and return the links that its run folder needs.

    `run` is the run folder to be; one that it replaces gives its own, empty one back. Raises UserError (exit code 3)
    where the folder cannot be created.
    """
    place, name = checkpoint_place(cluster), link_name(recipe)
    if place is None:
        return {}
    try:
        make_folders(place)
        if name is None:
            return {}
        if name in ("code", "logs"):
            message = f"checkpoint.dir begins with '{name}', a folder that each run has for itself"
            raise error("checkpoint-dir", message, "checkpoint.dir", "choose another name, such as checkpoints")
        old = run / name
        if old.is_symlink() and old.readlink().parent == place:
            with contextlib.suppress(OSError):
                old.readlink().rmdir()
        return {name: _new_folder(place, run.name)}
    except OSError as exc:
        message = f"the folder for checkpoints below {place} cannot be created: {exc.strerror or exc}"
        raise error("storage", message, CHECKPOINTS, "choose a folder that you can write to", MACHINE_LACKS) from None


def _new_folder(place: Path, name: str) -> Path:
    """A folder that did not exist: runs of two studies may have one name, and none may find another's checkpoints."""
    for count in itertools.count(1):
        folder = place / name
        if count > 1:
            folder = place / f"{name}-{count}"
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o755)
            return folder
    raise AssertionError("unreachable")

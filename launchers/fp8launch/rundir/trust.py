"""Ownership of files: those that will be run or believed must be this user's own, and nobody else may change them.

The rules are those of ssh for its own files: an owner, a mode, and no link. A folder in which others may write is safe
only with the sticky bit, which keeps each of them from renaming what the others made.
"""

from __future__ import annotations

import grp
import os
import pwd
import stat
from collections.abc import Iterator
from pathlib import Path

from fp8launch.diagnostics import MACHINE_LACKS, error
from fp8launch.recipe.owners import SYSTEM_ACCOUNTS, user_name

# Files of a run folder that are run or believed when it is acted upon.
_BELIEVED = ("manifest.json", "survive.json", "attempts.json", "job.sbatch", "job.sh", "study.json", "submitit")


def why_not_own(path: Path) -> str | None:
    """Why a file or folder is not safely this user's own, in words; None when it is."""
    try:
        found = path.lstat()
    except OSError as exc:
        return f"{path} cannot be accessed: {exc.strerror}"
    if stat.S_ISLNK(found.st_mode):
        return f"{path} is a link"
    if not stat.S_ISDIR(found.st_mode) and not stat.S_ISREG(found.st_mode):
        return f"{path} is not a file or a folder"
    if found.st_uid != os.geteuid():
        return f"{path} belongs to {user_name(found.st_uid)}"
    writers = _other_writers(found)
    return f"{path} can be written by {writers}" if writers else None


def why_not_own_run(folder: Path) -> str | None:
    """Why the folder of a run or study is not safely this user's own: itself, its scripts, its code, its records."""
    inside = [folder / name for name in (*_BELIEVED, "arrays", "logs", "code")]
    there = [folder, *(path for path in inside if os.path.lexists(path))]
    return next(filter(None, map(why_not_own, [*there, *_below(folder / "code"), *_below(folder / "arrays")])), None)


def why_others_may_replace(folder: Path) -> str | None:
    """Why other users may replace what is in a folder that is there or will be made, in words; None when none may.

    That is so where they may write to it, or to a folder above it, and no sticky bit keeps them from renaming.
    """
    places = [folder.absolute(), folder.absolute().resolve()]
    for place in dict.fromkeys(part for start in places for part in (start, *start.parents)):
        try:
            found = place.lstat()
        except OSError:
            continue  # it will be made, by this user
        if stat.S_ISLNK(found.st_mode):
            continue  # where it leads to is looked at too
        if found.st_uid >= SYSTEM_ACCOUNTS and found.st_uid != os.geteuid():
            return f"{place} belongs to {user_name(found.st_uid)}"
        writers = _other_writers(found)
        if writers and not found.st_mode & stat.S_ISVTX:
            return f"{place} can be written by {writers} and has no sticky bit"
    return None


def need_safe_root(root: Path, trusted: bool) -> None:
    """Raises UserError (exit code 3) for a run root in which other users could replace the code of a waiting job.

    `trusted` is the user's own word that these others may run code under this account.
    """
    reason = why_others_may_replace(root)
    if reason is None or (trusted and "by everybody" not in reason):
        return
    raise error(
        "run-root-shared",
        f"other users could replace the code of a waiting job: {reason}",
        str(root),
        "choose a --run-root that only you can write to (chmod go-w), or ask its owner to set the sticky bit (chmod "
        "+t); if everybody in that group may run code as you, set `trust_run_root: true` in the cluster profile",
        MACHINE_LACKS,
    )


def _below(folder: Path) -> Iterator[Path]:
    if folder.is_symlink():
        return
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            yield Path(parent, name)


def _other_writers(found: os.stat_result) -> str | None:
    """The other users who may write to a file or folder; None if there are none."""
    if found.st_mode & stat.S_IWOTH:
        return "everybody"
    if found.st_mode & stat.S_IWGRP and not _is_private_group(found.st_gid):
        return f"the group {_group(found.st_gid)}"
    return None


def _is_private_group(gid: int) -> bool:
    """The group is this user's alone, as many distributions give each user one of the same name."""
    if gid == 0:
        return os.geteuid() == 0
    try:
        group, user = grp.getgrgid(gid), pwd.getpwuid(os.geteuid())
    except KeyError:
        return False
    return user.pw_gid == gid and group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}


def _group(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)

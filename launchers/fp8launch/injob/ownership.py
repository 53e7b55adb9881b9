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

# Accounts below this belong to the system: what they own was installed.
SYSTEM_ACCOUNTS = 1000


def user_name(uid: int) -> str:
    """Return how a message names a user."""
    try:
        return f"the user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"the user {uid}"


def foreign_owner(file: Path, trusted: Path | None = None) -> str | None:
    """Return the name of the other user who owns a file, or a link to it; None for one's own.

    Files of the system and of the owner of `trusted`, a file that the user chose, count as one's own.
    """
    known = {os.geteuid()}
    if trusted is not None:
        known.add(trusted.stat().st_uid)
    for uid in (file.lstat().st_uid, file.stat().st_uid):
        if uid not in known and uid >= SYSTEM_ACCOUNTS:
            return user_name(uid)
    return None


def leads_elsewhere(path: Path) -> str | None:
    """Return why a link of another user is not followed, in words; None for anything else. Raises OSError.

    It may lead to a file that only this user can read, in a place where what is read becomes public. A link to a file
    of its own owner is fine, as in a shared cache of the Hugging Face hub, and so is a link to a public system file.
    """
    link, target = path.lstat(), path.stat()
    if not stat.S_ISLNK(link.st_mode) or link.st_uid in (os.geteuid(), target.st_uid):
        return None
    is_public = target.st_uid < SYSTEM_ACCOUNTS and target.st_mode & stat.S_IROTH
    if link.st_uid < SYSTEM_ACCOUNTS or (is_public and target.st_uid != os.geteuid()):
        return None
    return f"{path} is a link of {user_name(link.st_uid)} to a file of {user_name(target.st_uid)}"


def why_not_own(path: Path, or_of_the_system: bool = False) -> str | None:
    """Why a file or folder is not safely this user's own, in words; None when it is."""
    try:
        found = path.lstat()
    except OSError as exc:
        return f"{path} cannot be accessed: {exc.strerror}"
    if stat.S_ISLNK(found.st_mode):
        return f"{path} is a link"
    if not stat.S_ISDIR(found.st_mode) and not stat.S_ISREG(found.st_mode):
        return f"{path} is not a file or a folder"
    if found.st_uid != os.geteuid() and not (or_of_the_system and found.st_uid < SYSTEM_ACCOUNTS):
        return f"{path} belongs to {user_name(found.st_uid)}"
    writers = other_writers(found)
    if not writers:
        return None
    return f"{path} can be written by {writers}"


def why_others_may_replace(folder: Path) -> str | None:
    """Why other users may replace what is in a folder that is there or will be made, in words; None when none may.

    That is so where they may write to it, or to a folder above it, and no sticky bit keeps them from renaming.
    """
    named = folder.absolute()
    real = named.resolve()
    for place in dict.fromkeys((named, *named.parents, real, *real.parents)):
        try:
            found = place.lstat()
        except OSError:
            continue  # it will be made, by this user
        if stat.S_ISLNK(found.st_mode):
            continue  # where it leads to is looked at too
        if found.st_uid >= SYSTEM_ACCOUNTS and found.st_uid != os.geteuid():
            return f"{place} belongs to {user_name(found.st_uid)}"
        writers = other_writers(found)
        if writers and not found.st_mode & stat.S_ISVTX:
            return f"{place} can be written by {writers} and has no sticky bit"
    return None


def why_others_may_change(place: Path) -> str | None:
    """Why other users may have written, may change or may replace a file, or a folder with all that is in it.

    None when they cannot. What the system owns counts as safe, and `place` itself may be a link.
    """
    real = place.resolve()
    reason = why_others_may_replace(place)
    if reason is not None:
        return reason
    for path in below(real):
        reason = why_not_own(path, or_of_the_system=True)
        if reason is not None:
            return reason
    return None


def make_private_folder(folder: Path) -> None:
    """Make a folder and those above it for this user alone, whatever the umask. Raises OSError."""
    for part in [*reversed(folder.parents), folder]:
        if not part.is_dir():
            part.mkdir(mode=0o700, exist_ok=True)


def take_write_permission(folder: Path) -> None:
    """Leave a file, or a folder with all that is in it, writable for its owner alone."""
    for path in (folder, *folder.rglob("*")):
        path.chmod(path.stat().st_mode & 0o755)


def below(folder: Path) -> Iterator[Path]:
    """Yield everything in a folder, at any depth; nothing for a link."""
    if folder.is_symlink():
        return
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            yield Path(parent, name)


def other_writers(found: os.stat_result) -> str | None:
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

"""Ownership of files: only this user may have written, or be able to change, files that are run or trusted.

The rules follow ssh's for its own files: an owner, a mode, and no link. A folder that others can write to is safe only
with the sticky bit, which keeps users from renaming each other's files.
"""

from __future__ import annotations

import grp
import os
import pwd
import stat
from collections.abc import Iterator
from pathlib import Path

# Accounts below this belong to the system, and own installed files.
SYSTEM_ACCOUNTS = 1000


def user_name(uid: int) -> str:
    """Return how a message names a user."""
    try:
        return f"the user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"the user {uid}"


def foreign_owner(file: Path, trusted: Path | None = None) -> str | None:
    """Return the name of another user who owns a file, or a link to it; None if this user owns both.

    System files count as the user's own, and so do files of the owner of `trusted`, a file that the user chose.
    """
    known = {os.geteuid()}
    if trusted is not None:
        known.add(trusted.stat().st_uid)
    for uid in (file.lstat().st_uid, file.stat().st_uid):
        if uid not in known and uid >= SYSTEM_ACCOUNTS:
            return user_name(uid)
    return None


def leads_elsewhere(path: Path) -> str | None:
    """Return why another user's link must not be followed; None for any other file. Raises OSError.

    Such a link may lead to a file that only this user can read, in a place where its content becomes public. A link to
    a file of the same owner is fine, as in a shared Hugging Face cache, and so is a link to a public system file.
    """
    link, target = path.lstat(), path.stat()
    if not stat.S_ISLNK(link.st_mode) or link.st_uid in (os.geteuid(), target.st_uid):
        return None
    is_public = target.st_uid < SYSTEM_ACCOUNTS and target.st_mode & stat.S_IROTH
    if link.st_uid < SYSTEM_ACCOUNTS or (is_public and target.st_uid != os.geteuid()):
        return None
    return f"{path} is a link of {user_name(link.st_uid)} to a file of {user_name(target.st_uid)}"


def why_not_own(path: Path, or_of_the_system: bool = False) -> str | None:
    """Return why a file or folder is not safely this user's own; None if it is."""
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
    return f"{path} can be written by {writers}" if writers else None


def why_others_may_replace(folder: Path) -> str | None:
    """Return why other users may replace the content of a folder that exists or will be made; None if nobody may.

    They may if they can write to it, or to a folder above it, and no sticky bit keeps them from renaming.
    """
    named = folder.absolute()
    real = named.resolve()
    for place in dict.fromkeys((named, *named.parents, real, *real.parents)):
        try:
            found = place.lstat()
        except OSError:
            continue  # this user will create it
        if stat.S_ISLNK(found.st_mode):
            continue  # its target is checked, too
        if found.st_uid >= SYSTEM_ACCOUNTS and found.st_uid != os.geteuid():
            return f"{place} belongs to {user_name(found.st_uid)}"
        writers = other_writers(found)
        if writers and not found.st_mode & stat.S_ISVTX:
            return f"{place} can be written by {writers} and has no sticky bit"
    return None


def why_others_may_change(place: Path) -> str | None:
    """Return why other users may have written, or may change or replace, a file or a folder with its content.

    None if they cannot. Files of the system count as safe, and `place` itself may be a link.
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


def take_write_permission(folder: Path) -> None:
    """Make a file, or a folder with its content, writable for its owner only."""
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
    """Return which other users may write to a file or folder; None if nobody may."""
    if found.st_mode & stat.S_IWOTH:
        return "everybody"
    if found.st_mode & stat.S_IWGRP and not _is_private_group(found.st_gid):
        return f"the group {_group(found.st_gid)}"
    return None


def _is_private_group(gid: int) -> bool:
    """Return whether only this user is in the group: many distributions give each user a group of the same name."""
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

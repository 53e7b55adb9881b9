"""Whose a recipe's file is: what a name leads to may have been put there by another user of the machine."""

from __future__ import annotations

import os
import pwd
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

"""The comment of a Slurm job: the key of its submission, then the cluster profile's `comment`.

If sbatch's answer was lost, the job is found again by its key. Some sites replace comments (job_submit.lua), so the key
is also in the command that Slurm records: as an argument of the script, or as a part of its path.
"""

from __future__ import annotations

import re
from collections.abc import Collection

_SUBMITTED = "fp8launch:"


def job_comment(key: str, text: str = "") -> str:
    """Return the comment of a job with this key; `text` is the cluster profile's own. A key has no spaces."""
    return f"{_SUBMITTED}{key} {text}".rstrip()


def key_in(comment: object) -> str | None:
    """Return the key in a job's comment; None for a comment that is not ours."""
    text = str(comment)
    if not text.startswith(_SUBMITTED):
        return None
    return text.removeprefix(_SUBMITTED).partition(" ")[0]


def key_in_command(command: str) -> str | None:
    """Return the key in the command line of an sbatch that we called; None for any other command line."""
    _, found, rest = command.partition(f"--comment={_SUBMITTED}")
    if not found:
        return None
    return rest.partition(" ")[0]


def find_key(text: str, keys: Collection[str]) -> str | None:
    """Return which of these keys a job's comment or command contains, as a word or as a part of a path."""
    for word in re.split(r"[\s/:|]+", text):
        if word.removesuffix(".sbatch") in keys:
            return word.removesuffix(".sbatch")
    return None


def text_in(comment: object) -> str:
    """Return the cluster profile's part of a comment."""
    text = str(comment or "")
    if not text.startswith(_SUBMITTED):
        return text
    return text.partition(" ")[2]

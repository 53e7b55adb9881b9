"""The comment of a Slurm job: the key of its submission, then what the cluster profile has as `comment`.

By the key a job is found again when the answer to sbatch was lost.
"""

from __future__ import annotations

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


def text_in(comment: object) -> str:
    """Return the cluster profile's part of a comment."""
    text = str(comment or "")
    if not text.startswith(_SUBMITTED):
        return text
    return text.partition(" ")[2]

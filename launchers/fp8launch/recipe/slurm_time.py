"""A time as Slurm reads it: the one parser."""

from __future__ import annotations

import re

_NUMBER = "([0-9]{1,18})"
_TIME = re.compile(rf"(?:{_NUMBER}-)?{_NUMBER}(?::{_NUMBER})?(?::{_NUMBER})?")


def slurm_seconds(text: str) -> int | None:
    """Seconds of a Slurm time; None for UNLIMITED and other text.

    Forms: minutes, minutes:seconds, hours:minutes:seconds, days-hours[:minutes[:seconds]].
    """
    match = _TIME.fullmatch(text.strip())
    if match is None:
        return None
    days, first, second, third = (int(part) if part is not None else None for part in match.groups())
    if days is not None:
        return ((days * 24 + (first or 0)) * 60 + (second or 0)) * 60 + (third or 0)
    if third is not None:
        return ((first or 0) * 60 + (second or 0)) * 60 + third
    return (first or 0) * 60 + (second or 0)

"""Parse Slurm's time formats."""

from __future__ import annotations

import re

_NUMBER = "([0-9]{1,18})"
_TIME = re.compile(rf"(?:{_NUMBER}-)?{_NUMBER}(?::{_NUMBER})?(?::{_NUMBER})?")


def slurm_seconds(text: str) -> int | None:
    """Convert a Slurm time to seconds. Return None for UNLIMITED and any other text.

    Formats: minutes, minutes:seconds, hours:minutes:seconds, days-hours[:minutes[:seconds]].
    """
    match = _TIME.fullmatch(text.strip())
    if match is None:
        return None
    days, first, second, third = map(int, match.groups("0"))
    if match[1] is not None:
        return ((days * 24 + first) * 60 + second) * 60 + third
    if match[4] is not None:
        return (first * 60 + second) * 60 + third
    return first * 60 + second

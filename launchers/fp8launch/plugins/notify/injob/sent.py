"""The record that a run's end was notified: an empty file next to the attempt's log, made by whoever sends first."""

from __future__ import annotations

import os
from pathlib import Path


def record_of(folder: Path, attempt: str) -> Path:
    """Return the record of a run folder whose last attempt is `attempt`."""
    return folder / "logs" / f"{attempt}.notified"


def claim(record: Path) -> bool:
    """Make the record. Return whether it was not there before. Raises OSError if it cannot be made."""
    try:
        os.close(os.open(str(record), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
    except FileExistsError:
        return False
    return True

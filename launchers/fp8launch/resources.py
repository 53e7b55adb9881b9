"""Locations of the files that come with fp8launch: next to the code in a checkout, else inside the package."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def pack_folder(name: str) -> Path:
    """Return the folder `recipes`, `clusters` or `containers` of this installation."""
    checkout = _PACKAGE.parents[1]
    if (checkout / "pyproject.toml").is_file() and (checkout / name).is_dir():
        return checkout / name
    return _PACKAGE / "pack" / name


def in_job_folder() -> Path:
    """Return the folder of the code that runs inside jobs; it is copied into each run folder."""
    return _PACKAGE / "injob"

"""Locations of the files that come with fp8launch: beside the code in a checkout, inside the package when installed."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def pack_folder(name: str) -> Path:
    """The folder `recipes`, `clusters` or `containers` of this installation."""
    checkout = _PACKAGE.parents[1]
    if (checkout / "pyproject.toml").is_file() and (checkout / name).is_dir():
        return checkout / name
    return _PACKAGE / "pack" / name


def in_job_folder() -> Path:
    """The folder with what runs inside the job; it is copied into each run folder."""
    return _PACKAGE / "injob"

"""Megatron-Core in the user's cache: found, or its wheel fetched once.

The wheel is 2 MB and is only read, never installed: its validators run with stand-ins for torch.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fp8launch.megatron.schema import load_schema
from fp8launch.megatron.validators import cache_folder, find_megatron
from fp8launch.megatron.versions import WHEELS
from fp8launch.wheels import NotFetched, Wheel, fetch


class NoMegatron(Exception):
    """There is no Megatron-Core to ask; the message says why."""


def megatron_for(version: str, say: Callable[[str], None] = lambda message: None) -> Path:
    """A wheel or folder with a Megatron-Core of this minor version; `say` hears of a download. Raises NoMegatron."""
    release = load_schema(version).version
    folder = cache_folder()
    try:
        return fetch(
            Wheel("megatron-core", release, WHEELS[release], "2 MB"),
            folder,
            find=lambda: find_megatron(version),
            keep=lambda wheel: _move(wheel, folder),
            say=say,
        )
    except NotFetched as exc:
        raise NoMegatron(str(exc)) from None


def _move(wheel: Path, folder: Path) -> None:
    wheel.replace(folder / wheel.name)

"""Make Megatron run on Python 3.11, and set arguments without a usable default. Standard library only."""

from __future__ import annotations

import typing


def install() -> None:
    """Let Python 3.11 import Megatron. Call this before anything imports it.

    Megatron's wheels require Python 3.12, but the code of 0.17 to 0.19 only lacks `typing.override` on 3.11. That
    decorator marks a method and does nothing else.
    """
    if not hasattr(typing, "override"):
        typing.override = lambda method, /: method  # type: ignore[attr-defined, unused-ignore]


def defaults(argv: list[str]) -> list[str]:
    """Return arguments for which Megatron has no usable default.

    `--eval-interval` defaulted to 1000 until 0.15. Since then the default is None, by which every run divides at its
    start, even if it never evaluates.
    """
    if any(argument.split("=", 1)[0] == "--eval-interval" for argument in argv):
        return []
    return ["--eval-interval", "1000"]

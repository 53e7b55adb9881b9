"""Names that Megatron imports and this Python lacks; standard library only, must run before Megatron is imported."""

from __future__ import annotations

import typing


def install() -> None:
    """Megatron's wheels ask for Python 3.12; what its 0.17-0.19 code misses on 3.11 is one decorator.

    `typing.override` (3.12) only marks a method, so the identity is a full replacement.
    """
    if not hasattr(typing, "override"):
        typing.override = lambda method, /: method  # type: ignore[attr-defined, unused-ignore]


def defaults(argv: list[str]) -> list[str]:
    """Arguments whose default Megatron lost and cannot do without.

    `--eval-interval` was 1000 until 0.15. Since then it is None, which a run divides by at its start, even one that
    never evaluates.
    """
    if any(argument.split("=", 1)[0] == "--eval-interval" for argument in argv):
        return []
    return ["--eval-interval", "1000"]

"""Axes of a study: keys that a recipe can have, a field of a section or any flag or variable."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fp8launch.diagnostics import nearest

# Sections with names of the user's or of Megatron's.
_FREE = ("model", "megatron", "env", "phases")


def refuse_unknown_axis(key: str, fields: Mapping[str, Sequence[str]]) -> None:
    """Raise ValueError for an axis that no recipe has; `fields` are those of each section."""
    section, field = key.split(".")[:2]
    if section in _FREE:
        return
    if section not in fields:
        raise ValueError(f"axis {key}: '{section}' is not a section{_or(section, [*fields, *_FREE])}")
    if field not in fields[section]:
        raise ValueError(f"axis {key}: {section} has no '{field}'{_or(field, fields[section])}")


def _or(name: str, known: Sequence[str]) -> str:
    near = nearest(name, known)
    if near is None:
        return ""
    return f"; did you mean '{near}'?"

"""Values as JSON reports have them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Protocol


class HasJson(Protocol):
    def as_json(self) -> Mapping[str, object]: ...


def json_list(items: Iterable[HasJson]) -> list[Mapping[str, object]]:
    return [item.as_json() for item in items]


def json_mapping(fields: Mapping[str, object]) -> dict[str, object]:
    return {str(name): _json_value(value) for name, value in fields.items()}


def _json_value(value: object) -> object:
    """Replace values that JSON cannot represent: NaN and infinity by None, anything else by its text."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Mapping):
        return json_mapping(value)
    if isinstance(value, list | tuple | set):
        return list(map(_json_value, value))
    if hasattr(value, "as_json"):
        return json_mapping(value.as_json())
    return str(value)

"""Our reading of an argument list against Megatron's own parser: the same lists are refused, the same values arrive."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from flag_values import value_mappings, wild_argv
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fp8launch.megatron.flag_problems import emit_argv
from fp8launch.megatron.schema import FlagSchema, load_schema
from fp8launch.plugins.importer.argv import parse_argv

pytestmark = pytest.mark.needs_plugin("validators")

Parse = Callable[[list[str]], dict[str, Any]]
SETTINGS = settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])


def namespace(argv: list[str], schema: FlagSchema) -> dict[str, Any] | None:
    """The attributes that Megatron's parser would make of it by our reading, or None where it would refuse."""
    values, problems = parse_argv(argv, schema)
    if problems:
        return None
    attributes: dict[str, Any] = {}
    for name, value in values.items():
        flag = schema.find(name)
        assert flag
        if flag.type == "pattern" and isinstance(value, str):
            value = as_json(eval(value))
        attributes[flag.dest] = value if flag.takes_value or flag.action == "boolean" else flag.const
    return attributes


def as_json(value: Any) -> Any:
    return [as_json(item) for item in value] if isinstance(value, (list, tuple)) else value


def agree(argv: list[str], schema: FlagSchema, real_parser: Parse) -> None:
    ours, theirs = namespace(argv, schema), real_parser(argv)
    assert theirs["ok"] == (ours is not None), theirs["message"]
    if ours is not None:
        # NaN is not equal to itself, its text is.
        assert {name: repr(theirs["args"][name]) for name in ours} == {
            name: repr(value) for name, value in ours.items()
        }


@SETTINGS
@given(data=st.data())
def test_what_we_write_is_read_alike(minor: str, real_parser: Parse, data: st.DataObject) -> None:
    schema = load_schema(minor)
    values = data.draw(value_mappings(schema))
    agree(list(emit_argv(values, schema)), schema, real_parser)


@SETTINGS
@given(data=st.data())
def test_what_megatron_refuses_we_refuse(minor: str, real_parser: Parse, data: st.DataObject) -> None:
    schema = load_schema(minor)
    agree(data.draw(wild_argv(schema)), schema, real_parser)

"""What we write into an argument list arrives in Megatron's own parser, with the types that we expect."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flag_values import value_mappings
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fp8launch.megatron.arguments import as_parsed, attributes
from fp8launch.megatron.flag_problems import check_values, emit_argv
from fp8launch.megatron.schema import load_schema

Parse = Callable[[list[str]], dict[str, Any]]


def as_json(value: Any) -> Any:
    return [as_json(item) for item in value] if isinstance(value, (list, tuple)) else value


def test_nothing_given_leaves_the_defaults_of_the_schema(minor: str, real_parser: Parse) -> None:
    schema, args = load_schema(minor), real_parser([])["args"]
    for flag in schema.flags():
        if flag.needs is None and flag.default is not None and len(schema.setting(flag.dest)) == 1:
            assert args[flag.dest] == flag.default
    dests = {flag.dest for flag in schema.flags() if flag.needs is None}
    assert set(args) == dests | set(schema.added_by_parse_args)


@settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_what_we_write_arrives(minor: str, real_parser: Parse, data: st.DataObject) -> None:
    schema = load_schema(minor)
    values = data.draw(value_mappings(schema))
    assert check_values(values, schema) == []
    theirs = real_parser(list(emit_argv(values, schema)))
    assert theirs["ok"], theirs["message"]
    patterns = {flag.dest for flag in schema.flags() if flag.type == "pattern"}
    for name, value in attributes(as_parsed(values, schema), schema).items():
        expected = as_json(eval(value)) if name in patterns and isinstance(value, str) else value
        # NaN is not equal to itself, its text is.
        assert repr(theirs["args"][name]) == repr(expected), name

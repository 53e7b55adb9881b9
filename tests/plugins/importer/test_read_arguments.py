"""Reading an argument list: what is written is read back, and what Megatron would refuse is a problem."""

from __future__ import annotations

import math
from typing import Any

import pytest
from flag_values import value_mappings
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8launch.megatron.arguments import as_parsed, emit_arguments
from fp8launch.megatron.flag_problems import emit_argv
from fp8launch.megatron.schema import load_schema, supported_versions
from fp8launch.plugins.importer.argv import parse_argv

SCHEMA = load_schema("0.19")


def as_read_back(value: Any, kind: str | None) -> Any:
    """What an emitted value is when it is read again: the flag's type decides, not the value's."""
    if isinstance(value, list) and kind not in ("ints", "pattern"):
        return [as_read_back(item, kind) for item in value]
    if kind == "float":
        return float(value)
    if kind == "pattern" and isinstance(value, list):
        return str(value).replace(" ", "")
    return value


@pytest.mark.parametrize("version", supported_versions())
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_what_is_emitted_is_read_back(version: str, data: st.DataObject) -> None:
    schema = load_schema(version)
    values = data.draw(value_mappings(schema))
    read, problems = parse_argv(emit_argv(values, schema), schema)
    assert problems == []
    assert list(read) == list(values)
    for name, value in values.items():
        flag = schema.find(name)
        assert flag
        expected = as_read_back(value, flag.type)
        if flag.type == "str":  # a number given for a text arrives as a text of that number
            for got, given_value in zip(
                read[name] if isinstance(read[name], list) else [read[name]],  # type: ignore[arg-type]
                expected if isinstance(expected, list) else [expected],
                strict=True,
            ):
                assert got == str(given_value) or float(got) == given_value
        else:
            assert read[name] == expected


@pytest.mark.parametrize("version", supported_versions())
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_typed_values_are_those_that_the_parser_reads(version: str, data: st.DataObject) -> None:
    schema = load_schema(version)
    values = data.draw(value_mappings(schema))
    read, _ = parse_argv(emit_argv(values, schema), schema)
    typed = as_parsed(values, schema)
    assert repr(typed) == repr(read)
    assert [argument.flag for argument in emit_arguments(values, schema)] == list(typed)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("yarn_correction_range_round_to_int", False),
        ("no_yarn_correction_range_round_to_int", False),
        ("inference_disable_ep_consensus", False),
        ("no_inference_disable_ep_consensus", True),
        ("inference_disable_ep_consensus", True),
    ],
)
def test_a_bare_flag_that_is_turned_off(name: str, value: bool) -> None:
    read, problems = parse_argv(emit_argv({name: value}, SCHEMA), SCHEMA)
    assert (as_parsed({name: value}, SCHEMA), problems) == (read, [])


@settings(deadline=None, max_examples=200)
@given(st.floats(allow_nan=False))
def test_a_float_arrives_exactly(value: float) -> None:
    assert parse_argv(emit_argv({"lr": value}, SCHEMA), SCHEMA) == ({"lr": value}, [])


def test_the_last_use_of_a_flag_counts() -> None:
    argv = ["--lr", "1", "--bf16", "--num-layers=2", "--lr", "3e-4"]
    values, problems = parse_argv(argv, SCHEMA)
    assert problems == []
    assert list(values.items()) == [("bf16", True), ("num_layers", 2), ("lr", 3e-4)]


@pytest.mark.parametrize(
    "argv", ["--lr", "--lr 1 2", "--bf16 1", "--bf16=1", "--num_layers 2", "--num-layer 2", "x", "-h"]
)
def test_an_argument_list_that_megatron_would_refuse(argv: str) -> None:
    assert len(parse_argv(argv.split(), SCHEMA)[1]) == 1


def test_nan_and_infinity_are_numbers() -> None:
    values, problems = parse_argv(emit_argv({"lr": math.nan, "min_lr": -math.inf}, SCHEMA), SCHEMA)
    assert problems == []
    assert isinstance(values["lr"], float) and math.isnan(values["lr"])
    assert values["min_lr"] == -math.inf

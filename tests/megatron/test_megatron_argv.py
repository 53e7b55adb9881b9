"""Reading, writing and checking Megatron's argument list, by the schemas alone."""

from __future__ import annotations

import math
from typing import Any

import pytest
from flag_values import value_mappings
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8launch.diagnostics import UserError
from fp8launch.megatron.arguments import as_parsed, emit_arguments
from fp8launch.megatron.flag_problems import check_values, emit_argv
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


@pytest.mark.parametrize(
    ("value", "text"), [(3e-4, "0.0003"), (1e-5, "1e-5"), (0.1, "0.1"), (1e22, "1e22"), (1, "1"), (1.0, "1.0")]
)
def test_a_float_is_written_as_a_person_would(value: float, text: str) -> None:
    assert emit_argv({"lr": value}, SCHEMA) == ("--lr", text)


@pytest.mark.parametrize(
    ("values", "argv"),
    [
        ({"num_layers": 32, "swiglu": True}, "--num-layers 32 --swiglu"),
        ({"--num-layers": 32, "hidden-size": 64}, "--num-layers 32 --hidden-size 64"),
        ({"fp8_format": "hybrid", "lr": None}, "--fp8-format hybrid"),
        ({"recompute_modules": ["mla_up_proj", "mlp"]}, "--recompute-modules mla_up_proj mlp"),
        ({"recompute_modules": "mlp"}, "--recompute-modules mlp"),
        ({"rl_partial_rollouts": False}, "--no-rl-partial-rollouts"),
        ({"no_rl_partial_rollouts": True}, "--no-rl-partial-rollouts"),
        ({"no_yarn_correction_range_round_to_int": False}, "--yarn-correction-range-round-to-int"),
        ({"disable_fp8_wgrad": True}, "--disable-fp8-wgrad"),
        ({"moe_layer_freq": [1, 0]}, "--moe-layer-freq [1,0]"),
        ({"window_size": [-1, 0]}, "--window-size=-1,0"),
        ({"num_layers": -1, "lr": -1e-5}, "--num-layers -1 --lr -0.00001"),
        ({"split": "-x"}, "--split=-x"),
        ({"data_path": ["-x"]}, "--data-path=-x"),
    ],
)
def test_values_become_words(values: dict[str, Any], argv: str) -> None:
    assert emit_argv(values, SCHEMA) == tuple(argv.split())


def test_text_is_one_word_whatever_it_holds() -> None:
    text = "a b;$(touch x)\n'\"--lr 3"
    assert emit_argv({"save": text}, SCHEMA) == ("--save", text)


def test_the_last_use_of_a_flag_counts() -> None:
    argv = ["--lr", "1", "--bf16", "--num-layers=2", "--lr", "3e-4"]
    values, problems = parse_argv(argv, SCHEMA)
    assert problems == []
    assert list(values.items()) == [("bf16", True), ("num_layers", 2), ("lr", 3e-4)]


@pytest.mark.parametrize(
    ("values", "message", "fix"),
    [
        ({"hiden_size": 64}, "Megatron-Core 0.19 has no flag --hiden-size", "hidden_size"),
        ({"use_legacy_models": True}, "0.17 of the supported 0.17, 0.18 and 0.19 has it", None),
        ({"muon_use_nesterov": True}, "0.17 of", "--muon-nesterov"),
        ({"use_custom_fsdp": True}, "no flag --use-custom-fsdp", "--use-megatron-fsdp"),
        ({"apply_rope_fusion": False}, "no flag --apply-rope-fusion", "--no-rope-fusion"),
        ({"fp8_recipe": "tensorwize"}, "choices are tensorwise, delayed, mxfp8", "write tensorwise"),
        ({"num_layers": 1.5}, "needs a whole number, got 1.5", None),
        ({"num_layers": 32.0}, "needs a whole number, got 32.0", "write 32"),
        ({"num_layers": "many"}, "needs a whole number, not 'many'", None),
        ({"lr": "fast"}, "needs a number, not 'fast'", None),
        ({"bf16": 1}, "--bf16 is a bare flag and takes no value, got 1", "true"),
        ({"bf16": False}, "cannot be false", "null"),
        ({"lr": True}, "--lr needs a value, got true", "null"),
        ({"lr": [1, 2]}, "takes one value, got 2", None),
        ({"rampup_batch_size": [1, 2]}, "needs 3 values, got 2", None),
        ({"recompute_modules": []}, "needs at least one value", None),
        ({"data_path": ["a", "-b"]}, "starts with a dash", None),
        ({"moe_layer_freq": "[1]+2"}, "list expression", None),
        ({"moe_layer_freq": "__import__('os')"}, "whole number", None),
        ({"save": "a\0b"}, "NUL", None),
        ({"fp8_format": "hybrid", "--fp8-format": "e4m3"}, "given twice", None),
        ({"no_rl_partial_rollouts": False}, "negative name", "rl_partial_rollouts: true"),
    ],
)
def test_what_megatron_would_refuse_is_a_problem(values: dict[str, Any], message: str, fix: str | None) -> None:
    problems = check_values(values, SCHEMA, lambda name: f"recipe.yaml:{len(name)}")
    assert len(problems) == 1
    assert message in problems[0].message
    assert problems[0].where == f"recipe.yaml:{len(list(values)[-1])}"
    if fix:
        assert problems[0].fix and fix in problems[0].fix
    with pytest.raises(UserError):
        emit_argv(values, SCHEMA)


def test_all_problems_are_reported_at_once() -> None:
    problems = check_values({"num_layers": 1.5, "lr": None, "hiden_size": 1, "bf16": 3}, SCHEMA)
    assert [problem.code for problem in problems] == ["flag-value", "flag-unknown", "flag-value"]


@pytest.mark.parametrize(
    "argv", ["--lr", "--lr 1 2", "--bf16 1", "--bf16=1", "--num_layers 2", "--num-layer 2", "x", "-h"]
)
def test_an_argument_list_that_megatron_would_refuse(argv: str) -> None:
    assert len(parse_argv(argv.split(), SCHEMA)[1]) == 1


def test_a_huge_pattern_is_not_evaluated() -> None:
    assert check_values({"moe_layer_freq": "[1]*999999999999"}, SCHEMA) == []


def test_nan_and_infinity_are_numbers() -> None:
    values, problems = parse_argv(emit_argv({"lr": math.nan, "min_lr": -math.inf}, SCHEMA), SCHEMA)
    assert problems == []
    assert isinstance(values["lr"], float) and math.isnan(values["lr"])
    assert values["min_lr"] == -math.inf

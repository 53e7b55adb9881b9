"""Flags that no schema knows: how a recipe passes them on, and which it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8launch import cli
from fp8launch.megatron.extra_flags import extra_arguments, name_of, option_of
from fp8launch.megatron.flag_problems import unknown_flag
from fp8launch.megatron.schema import load_schema

SCHEMA = load_schema("0.19")
RECIPE = """\
extends: [models/llama3_8b, precision/bf16, hardware/h100]
batch: {micro: 1, global: 8, sequence: 4096}
train: {iterations: 10, lr: 1.0e-4}
data: {kind: mock}
megatron_extra:
  ademamix_beta3: 0.9990
  "--under_score": "$(touch PWNED); 'x'"
  bare: true
  many: [1e-05, two]
  removed: null
"""
WORDS = [
    *("--ademamix-beta3", "0.9990"),
    *("--under_score", "$(touch PWNED); 'x'"),
    "--bare",
    *("--many", "1e-05", "two"),
]


def test_flags_are_passed_on_exactly_and_named_in_one_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "fork.yaml"
    file.write_text(RECIPE)
    assert cli.run(["render", str(file), "--as", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["megatron"]["argv"][-len(WORDS) :] == WORDS
    cli.run(["check", str(file), "--json"])
    problems = json.loads(capsys.readouterr().out)["problems"]
    (found,) = [one for one in problems if one["code"] == "unchecked-flags"]
    assert "--ademamix-beta3, --under_score, --bare, --many" in found["message"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lr": "3"}, "is a flag of Megatron-Core 0.19"),
        ({"--num-layers": "3"}, "is a flag of Megatron-Core 0.19"),
        ({"optimizer": "sgd"}, "is a flag of Megatron-Core 0.19"),
        ({"fork": False}, "cannot be false"),
        ({"fork": []}, "empty list"),
        ({"fork_a": "1", "--fork-a": "2"}, "given twice"),
        ({"fork": "a\0b"}, "NUL"),
        ({"fork": ["a", "--b"]}, "two dashes"),
    ],
)
def test_what_is_refused(values: dict[str, Any], message: str) -> None:
    _, problems = extra_arguments(values, SCHEMA, lambda name: name)
    assert [one.code for one in problems] == ["extra-flag"]
    assert message in problems[0].message


@pytest.mark.parametrize(("value", "words"), [("-x", ("--fork=-x",)), ("-1", ("--fork", "-1")), ("", ("--fork", ""))])
def test_one_value(value: str, words: tuple[str, ...]) -> None:
    arguments, problems = extra_arguments({"fork": value}, SCHEMA, lambda name: name)
    assert (arguments[0].words, problems) == (words, [])


def test_a_choice_that_megatron_lacks() -> None:
    arguments, problems = extra_arguments({"optimizer": "ademamix"}, SCHEMA, lambda name: name)
    assert (arguments[0].words, problems) == (("--optimizer", "ademamix"), [])


@given(st.from_regex(r"--[a-zA-Z][a-zA-Z0-9_.-]*", fullmatch=True))
def test_a_name_gives_its_option_back(option: str) -> None:
    assert option_of(name_of(option)) == option


@pytest.mark.parametrize(
    ("name", "guess"),
    [
        ("ademamix_beta3", None),
        ("num_layer", "num_layers"),
        ("fp8_recipee", "fp8_recipe"),
        ("numlayers", "num_layers"),
        ("micro_batch_sizes", "micro_batch_size"),
        ("zero_stage", None),
    ],
)
def test_suggestions_are_near_in_meaning(name: str, guess: str | None) -> None:
    assert unknown_flag(name, SCHEMA, None).fix == (f"did you mean {guess}?" if guess else None)

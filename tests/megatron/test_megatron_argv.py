"""Writing and checking Megatron's argument list, by the schemas alone."""

from __future__ import annotations

from typing import Any

import pytest

from fp8launch.diagnostics import UserError
from fp8launch.megatron.flag_problems import check_values, emit_argv
from fp8launch.megatron.schema import load_schema

SCHEMA = load_schema("0.19")


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


def test_a_huge_pattern_is_not_evaluated() -> None:
    assert check_values({"moe_layer_freq": "[1]*999999999999"}, SCHEMA) == []

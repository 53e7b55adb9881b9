"""Launch scripts of forks of Megatron-LM, whose flags and YAML files differ from Megatron-LM's."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from fp8launch import engines
from fp8launch.diagnostics import Problem, UserError
from fp8launch.megatron.flag_problems import unknown_flag
from fp8launch.plugins.importer import from_argv
from fp8launch.plugins.importer.from_argv import import_text
from fp8launch.recipe.load import LoadedRecipe
from fp8launch.recipe.schema import recipe_class
from fp8launch.recipe.yaml_source import parse_yaml

SHAPE = "--num-layers 2 --hidden-size 256 --num-attention-heads 4"


def imported(text: str, name: str = "job.sh") -> tuple[dict[str, Any], list[str]]:
    recipe, problems = import_text(text, name, None)
    assert not [one for one in problems if one.severity == "error"], problems
    return parse_yaml(recipe, "recipe").plain(), [f"{one.message}" for one in problems]


@pytest.mark.parametrize(
    ("flags", "extra"),
    [
        ("--xielu --ademamix-beta3 0.9999", {"xielu": True, "ademamix_beta3": 0.9999}),
        ("--deepspeed_config=a.json", {"--deepspeed_config": "a.json"}),
        ("--fork-rate 1e-5 --fork-size 010", {"fork_rate": "1e-5", "fork_size": "010"}),
        ("--fork-list 1 2 three", {"fork_list": [1, 2, "three"]}),
        ("--fork-shift -3 --fork-text 'a b;c'", {"fork_shift": -3, "fork_text": "a b;c"}),
        ("--fork 1 --fork 2", {"fork": 2}),
    ],
)
def test_unknown_flags_are_kept(flags: str, extra: dict[str, Any]) -> None:
    recipe, messages = imported(f"torchrun pretrain_gpt.py --bf16 {flags} {SHAPE}")
    assert recipe["megatron_extra"] == extra
    assert any("megatron_extra" in message for message in messages)


@pytest.mark.parametrize(
    ("flags", "extra"),
    [
        ("--optimizer ademamix", {"optimizer": "ademamix"}),
        ("--tokenizer-type=PretrainedFromHF", {"tokenizer_type": "PretrainedFromHF"}),
        ("--optimizer adam --optimizer ademamix", {"optimizer": "ademamix"}),
        ("--optimizer ademamix --position-embedding-type alibi --xielu",
         {"xielu": True, "optimizer": "ademamix", "position_embedding_type": "alibi"}),
    ],
)  # fmt: skip
def test_values_that_only_a_fork_has_are_kept(flags: str, extra: dict[str, Any]) -> None:
    text, problems = import_text(f"torchrun pretrain_gpt.py --bf16 {flags} {SHAPE}", "job.sh", None)
    assert {one.severity for one in problems} == {"warning"}
    assert parse_yaml(text, "recipe").plain()["megatron_extra"] == extra
    tree = parse_yaml(text, "recipe")
    translated = engines.engine_of(loaded := LoadedRecipe(recipe_class().from_node(tree), tree, ())).translate(loaded)
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in extra:
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, action="store_true") if name == "xielu" else parser.add_argument(option)
    words = [word for one in (*translated.arguments, *translated.own) for word in one.words]
    assert vars(parser.parse_known_args(words)[0]) == extra


@pytest.mark.parametrize(
    "flags", ["--optimizer ademamix --optimizer adam", "--optimizer", "--fp8-format e3m4", "--lr fast"]
)
def test_other_wrong_values_stay_errors(flags: str) -> None:
    _, problems = import_text(f"torchrun pretrain_gpt.py --bf16 {flags} {SHAPE}", "job.sh", None)
    assert "error" in {one.severity for one in problems}


def test_the_fork_reads_the_same_values() -> None:
    flags = ["--rate", "1e-5", "--names", "a b", "c", "--shift=-x", "--on", "--empty", ""]
    quoted = "--rate 1e-5 --names 'a b' c --shift=-x --on --empty ''"
    text, _ = import_text(f"torchrun pretrain_gpt.py --bf16 {quoted} {SHAPE}", "job.sh", None)
    tree = parse_yaml(text, "recipe")
    loaded = LoadedRecipe(recipe_class().from_node(tree), tree, ())
    words = [word for one in engines.engine_of(loaded).translate(loaded).own for word in one.words]
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in ("--rate", "--shift", "--empty"):
        parser.add_argument(name)
    parser.add_argument("--names", nargs="+")
    parser.add_argument("--on", action="store_true")
    assert parser.parse_args(words) == parser.parse_args(flags)


YAML = """\
common: &common
  --seq-length: 4096
  --bf16: true
  --lr: 1
MODEL_ARGS:
  <<: *common
  --num-layers: 61
  --hidden-size: 256
  --num-attention-heads: 4
  --lr: 2
  --moe-layer-freq: "'([0]*1+[1]*60)'"
  --num-experts: 8
  --moe-permute-fusion: ${FUSE}
  --moe-grouped-gemm: ${GROUPED:-true}
  --sequence-parallel: false
  --fork-flag: false
"""


def test_yaml_of_the_model_zoo() -> None:
    recipe, messages = imported(YAML, "zoo.yaml")
    assert recipe["model"]["moe_layer_freq"] == "([0]*1+[1]*60)"
    assert recipe["train"]["lr"] == 2
    assert recipe["batch"] == {"sequence": 4096} and recipe["precision"] == {"recipe": "bf16"}
    assert recipe["megatron"] == {"moe_grouped_gemm": True}
    assert "parallel" not in recipe and "megatron_extra" not in recipe
    assert [message for message in messages if "FUSE" in message] == [
        "`--moe-permute-fusion=${FUSE}` is omitted: ${FUSE} of line 13 is not set in the script"
    ]


def test_merge_keys_only_in_foreign_files() -> None:
    text = "a: &a {x: 1, y: 1}\nb: &b {y: 2, z: 2}\nc: {<<: [*a, *b], x: 3}\n"
    assert parse_yaml(text, "f", unique=False).plain()["c"] == {"x": 3, "y": 1, "z": 2}
    with pytest.raises(UserError, match="merge keys"):
        parse_yaml(text, "f")


def test_escapes_of_ansi_c_quotes() -> None:
    recipe, _ = imported(f"torchrun pretrain_gpt.py --bf16 --save $'/\\x41' --fork $'\\x41b' {SHAPE}")
    assert recipe["checkpoint"]["dir"] == "/A"
    assert recipe["megatron_extra"] == {"fork": "Ab"}


def test_a_script_of_unknown_flags_takes_no_longer_than_a_usual_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six thousand of them took ten seconds, in which similar names were looked for."""
    looked_up = []

    def counted(name: str, *rest: Any) -> Problem:
        looked_up.append(name)
        return unknown_flag(name, *rest)

    monkeypatch.setattr(from_argv, "unknown_flag", counted)
    flags = " ".join(f"--flag-{number} {number}" for number in range(3000))
    recipe, messages = imported(f"torchrun pretrain_gpt.py --bf16 {flags} {SHAPE}")
    assert len(recipe["megatron_extra"]) == 3000
    assert len(looked_up) <= from_argv.MOST_PROBLEMS
    assert any(message.endswith("and 2900 more; they are passed on under megatron_extra") for message in messages)

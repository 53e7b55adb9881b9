"""Flags of Megatron-LM's other training scripts in an argument list."""

from __future__ import annotations

import pytest

from fp8launch.plugins.importer.from_argv import import_text
from fp8launch.recipe.yaml_source import parse_yaml


def test_one_of_them_without_a_known_value_is_left_out_whole() -> None:
    recipe, problems = import_text("torchrun $M/examples/multimodal/train.py --bf16 --prompt-path $P/x", "j.sh", None)
    assert "prompt" not in parse_yaml(recipe, "r").plain().get("megatron", {})
    assert "`--prompt-path $P/x` is omitted" in problems[0].message
    assert not [p for p in problems if p.code == "flag-value"]


@pytest.mark.parametrize("script", ["/m/pretrain_vlm.py", "$M/pretrain_vlm.py", "pretrain_vlm.py"])
def test_an_import_states_them_as_flags(script: str) -> None:
    recipe, problems = import_text(f"torchrun {script} --num-layers 2 --bf16 --dataloader-seq-length 64", "j.sh", None)
    tree = parse_yaml(recipe, "r").plain()
    assert tree["megatron"] == {"dataloader_seq_length": 64}
    assert "arguments" not in tree["launch"]
    assert not [p for p in problems if p.severity == "error"]

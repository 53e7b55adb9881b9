"""Every problem of a recipe says what to write instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from fp8launch.diagnostics import UserError
from fp8launch.recipe.load import load_recipe


def refused(name: str, *overrides: str) -> list[str | None]:
    with pytest.raises(UserError) as caught:
        load_recipe(name, overrides)
    return [problem.fix for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("override", "fix"),
    [
        ("parallel.tp=two", "write a value such as tp: 8, or remove it"),
        ("train.iterations=0", "write iterations: 1 or more, or remove it"),
        ("train.warmup=-1", "write warmup: 0 or more, or remove it"),
        ("precision.recipe=tensorwize", "write tensorwise"),
        ("precision.recipe=xyz", "write one of bf16, fp16, fp32, delayed, tensorwise, blockwise"),
        ("precision.recipe=fp8", "write one of delayed, tensorwise, blockwise"),
        ("resources.gpu=v100", "write one of a100, h100, h200, b200, b300, gb200, gb300, vr200, r100, cpu"),
        ("train.lr=fast", "write a value such as lr: 1.0e-4, or remove it"),
        ("resources.time=soon", 'write for example time: "01:30:00"'),
        ("launch.script=12", 'quote it: script: "12"'),
        ("batch.micro=2.5", "write micro: 2"),
        ("batch.global=0.5", "write global: 1"),
        ("data={kind: indexed, blend: [[0.7, /d/a], [0.3, /d/b]]}", "write blend: [0.7, /d/a, 0.3, /d/b]"),
        ("nodes=[]", "add an entry, or remove the list"),
    ],
)
def test_a_bad_value_says_what_to_write(override: str, fix: str) -> None:
    assert refused("llama8b_fp8", override) == [fix]


@pytest.mark.parametrize(
    ("gpu", "fix"),
    [
        ("b200", "write one of delayed, tensorwise, blockwise, mxfp8"),
        ("a100", "write one of bf16, fp16, fp32"),
        ("h200", "write one of delayed, tensorwise, blockwise"),
    ],
)
def test_only_precisions_of_the_recipes_gpu_are_suggested(gpu: str, fix: str) -> None:
    assert refused("llama8b_fp8", f"resources.gpu={gpu}", "precision.recipe=fp8") == [fix]


@pytest.mark.parametrize("name", ["megatron", "transformer_engine", "cuda"])
def test_a_version_needs_no_quotes_that_a_shell_would_take(name: str, tmp_path: Path) -> None:
    loaded = load_recipe("llama8b_fp8", [f"software.{name}=0.20"])
    assert loaded.recipe.software.field(name) == "0.20"
    (tmp_path / "number.yaml").write_text(f"extends: llama8b_fp8\nsoftware: {{{name}: 0.20}}\n", encoding="utf-8")
    assert refused(str(tmp_path / "number.yaml")) == [f'quote it: {name}: "0.20"']


def test_text_that_is_not_yaml_says_where_to_look(tmp_path: Path) -> None:
    (tmp_path / "broken.yaml").write_text("name: x\n  parallel: {tp: 1\n", encoding="utf-8")
    [fix] = refused(str(tmp_path / "broken.yaml"))
    assert fix is not None
    assert "indentation" in fix


def test_a_recipe_that_is_not_there_has_a_near_name(tmp_path: Path) -> None:
    [fix] = refused("llama8b_fb8")
    assert fix is not None
    assert fix.startswith("did you mean llama8b_fp8?")
    (tmp_path / "mine_tensorwise.yaml").write_text("name: x\n", encoding="utf-8")
    [fix] = refused(str(tmp_path / "mine_tensorwize.yaml"))
    assert fix is not None
    assert "mine_tensorwise.yaml?" in fix
    assert all(f"{'x' * 5000}" not in str(f) for f in refused("x" * 5000 + "/y"))

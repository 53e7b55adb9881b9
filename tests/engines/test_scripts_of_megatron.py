"""Megatron-LM's other training scripts: their own flags are known by script."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support import only, refused

from fp8launch.diagnostics import ANSWER_IS_NO
from fp8launch.job.prepared import prepare
from fp8launch.megatron.schema import SCRIPTS, load_schema, megatron_script, supported_versions

Write = Callable[[str, str], str]


@pytest.mark.parametrize(
    ("path", "script"),
    [
        ("/opt/Megatron-LM/pretrain_vlm.py", "pretrain_vlm.py"),
        ("pretrain_t5.py", "pretrain_t5.py"),
        ("$M/examples/multimodal/train.py", "examples/multimodal/train.py"),
        ("/mine/train.py", None),
        ("/mine/my_pretrain_gpt.py", None),
    ],
)
def test_a_script_is_known_by_the_end_of_its_path(path: str, script: str | None) -> None:
    assert megatron_script(path) == script


@pytest.mark.parametrize("version", supported_versions())
def test_flags_of_a_script_are_there_with_it_only(version: str) -> None:
    flag = load_schema(version, "/m/pretrain_vlm.py").find("dataloader_seq_length")
    assert flag is not None and flag.type == "int"
    assert load_schema(version).find("dataloader_seq_length") is None
    assert load_schema(version, "/m/pretrain_bert.py").find("dataloader_seq_length") is None
    modelopt = load_schema(version, "/m/pretrain_gpt.py").find("export_te_mcore_model")
    assert modelopt is not None and modelopt.needs == "nvidia-modelopt"
    for script in SCRIPTS:
        assert load_schema(version, script).find("num_layers") == load_schema(version).find("num_layers")


def test_a_recipe_may_set_them(write: Write) -> None:
    text = "extends: tiny_cpu\nname: r\nlaunch: {script: /m/pretrain_vlm.py}\nmegatron: {dataloader_seq_length: %s}\n"
    assert prepare(write("r.yaml", text % "64")).args.argv[-2:] == ("--dataloader-seq-length", "64")
    problem = only(refused(prepare, write("b.yaml", text % "many"), exit_code=ANSWER_IS_NO))
    assert "needs a whole number" in problem.message


def test_fp8launchs_own_entry_does_not_know_them(write: Write) -> None:
    file = write("r.yaml", "extends: tiny_cpu\nname: r\nmegatron: {dataloader_seq_length: 64}\n")
    assert only(refused(prepare, file, exit_code=ANSWER_IS_NO)).code == "flag-unknown"

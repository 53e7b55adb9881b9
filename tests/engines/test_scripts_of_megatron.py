"""Megatron-LM's other training scripts: their own flags are known by script, and checks run without them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support import only, refused

from fp8launch.check.job_paths import job_paths
from fp8launch.check.resolved_run import resolve_run
from fp8launch.cluster.profile import Cluster
from fp8launch.diagnostics import ANSWER_IS_NO
from fp8launch.job.prepared import prepare
from fp8launch.megatron.schema import SCRIPTS, load_schema, megatron_script, supported_versions
from fp8launch.plugins.importer.from_argv import import_text
from fp8launch.plugins.validators.layer import request
from fp8launch.recipe.yaml_source import parse_yaml

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


def test_a_recipe_may_set_them_and_megatrons_validators_do_not_see_them(write: Write) -> None:
    text = "extends: tiny_cpu\nname: r\nlaunch: {script: /m/pretrain_vlm.py}\nmegatron: {dataloader_seq_length: %s}\n"
    one = prepare(write("r.yaml", text % "64"))
    assert one.args.argv[-2:] == ("--dataloader-seq-length", "64")
    assert "--dataloader-seq-length" not in request(resolve_run(one), job_paths(one.loaded, Cluster())).argv
    problem = only(refused(prepare, write("b.yaml", text % "many"), exit_code=ANSWER_IS_NO))
    assert "needs a whole number" in problem.message


def test_fp8launchs_own_entry_does_not_know_them(write: Write) -> None:
    file = write("r.yaml", "extends: tiny_cpu\nname: r\nmegatron: {dataloader_seq_length: 64}\n")
    assert only(refused(prepare, file, exit_code=ANSWER_IS_NO)).code == "flag-unknown"


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

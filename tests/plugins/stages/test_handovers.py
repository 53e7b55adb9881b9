"""Recipes with stages: what is refused before anything is submitted, with the stage, the values and the fix."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_models
from pack_support import STAGES
from support import only, refused

from fp8launch.check.checker import check_all
from fp8launch.cli import run
from fp8launch.cluster.profile import Cluster
from fp8launch.diagnostics import Problem
from fp8launch.job.prepared import prepare
from fp8launch.plugins.stages.linked import prepare as prepare_stages
from fp8launch.recipe.load import read_recipe
from fp8launch.submit.recipe_kinds import Part

SIZES = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **tiny_models.SIZES}
SAVES = {"checkpoint": {"dir": "ckpt", "interval": 5}, "model": {"vocab_size": 511, "norm_epsilon": 1e-5}}
FRESH = {**SAVES, "megatron": {"finetune": True}}


def stages(folder: Path, *found: dict[str, Any], sets: tuple[str, ...] = ()) -> tuple[Part, ...]:
    (folder / "model").mkdir(exist_ok=True)
    (folder / "model" / "config.json").write_text(json.dumps(SIZES))
    file = folder / "recipe.yaml"
    file.write_text(json.dumps({"name": "some", "stages": list(found)}))
    return prepare_stages(read_recipe(str(file)), sets, Cluster(), folder / "runs", None).parts


def first(**more: Any) -> dict[str, Any]:
    return {"name": "one", "recipe": "tiny_cpu", "set": {**SAVES, **more}}


def second(**more: Any) -> dict[str, Any]:
    return {"name": "two", "recipe": "tiny_cpu", "from": "one", "set": {**FRESH, **more}}


def convert(**more: Any) -> dict[str, Any]:
    return {"name": "hf", "convert": "one", "model": "./model", **more}


def problems(parts: tuple[Part, ...]) -> list[Problem]:
    results = check_all([part.prepared for part in parts], Cluster(), layers=("rules", "machine"))
    found = [problem for part in parts for problem in part.problems]
    return found + [problem for result in results for problem in result.problems if problem.severity == "error"]


def test_every_stage_starts_from_the_result_of_the_stage_that_it_names(tmp_path: Path) -> None:
    evaluate = {"name": "scores", "evaluate": "hf", "tasks": ["fp8launch_tiny"]}
    sft = {
        "name": "sft", "recipe": "bridge:llama32_1b_sft_1gpu_h100_bf16_config", "from": "hf",
        "set": {"bridge.data": "mock"},
    }  # fmt: skip
    parts = stages(tmp_path, first(), second(), convert(convert="two"), evaluate, sft)
    assert not problems(parts)
    _, two, hf, scores, tuned = (part.prepared.args for part in parts)
    folders = [tmp_path / "runs" / parts_study(parts) / part.run_id for part in parts]
    assert two.values["load"] == str(folders[0] / "ckpt")
    assert hf.values["checkpoint"] == str(folders[1] / "ckpt" / "iter_0000020")
    assert scores.values["model"] == hf.values["out"] == str(folders[2] / "model")
    assert scores.values["run"] == str(folders[1])
    assert f"checkpoint.pretrained_checkpoint={folders[2] / 'model'}" in " ".join(tuned.argv).replace("'", "")
    assert f"--model={tmp_path / 'model'}" in tuned.argv


def parts_study(parts: tuple[Part, ...]) -> str:
    return f"some-stages-{parts[0].run_id.rpartition('-')[2]}"


@pytest.mark.parametrize(
    ("found", "code", "words"),
    [
        ((first(checkpoint={"dir": None}), second()), "stage-checkpoint", "writes no checkpoints"),
        ((first(), second(model={"vocab_size": 1000})), "stage-vocabulary", "1024 tokens, but 512 in stage one"),
        ((first(), second(**{"model.num_layers": 4})), "stage-model", "num_layers from 2 to 4"),
        ((first(), second(**{"megatron.finetune": None})), "stage-iterations", "at iteration 20 of one"),
        ((first(), second(**{"megatron.finetune": None, "train": {"iterations": 40, "lr": 1e-3, "min_lr": 1e-4}})),
         "checkpoint-learning-rate", "lr is 0.001, but 0.01"),
        ((first(**{"megatron.ckpt_format": "torch"}), convert()), "stage-format", "ckpt_format is torch"),
        ((first(**{"model.norm_epsilon": 1e-6}), convert()), "stage-model", "norm_epsilon is 1e-05"),
        ((first(**{"model.vocab_size": 1000}), convert()), "stage-vocabulary", "1024 with padding"),
    ],
)  # fmt: skip
def test_hand_overs_that_cannot_work(tmp_path: Path, found: Any, code: str, words: str) -> None:
    problem = next(one for one in problems(stages(tmp_path, *found)) if one.code == code)
    assert words in problem.message and problem.fix


@pytest.mark.parametrize(
    ("found", "sets", "code", "words"),
    [
        ((first(), {**second(), "from": "none"}), (), "bad-value", "no earlier stage (one)"),
        ((first(), first()), (), "bad-value", "two stages are called one"),
        ((first(), {"name": "two", "from": "one"}), (), "bad-value", "needs one of recipe, convert, evaluate"),
        ((first(), convert(tasks=["x"])), (), "bad-value", "does not take tasks"),
        ((first(), {"name": "hf", "convert": "one"}), (), "stage-model", "stage hf: the Hugging Face model"),
        ((first(), convert(), {**second(), "from": "hf"}), (), "stage-format", "only Megatron-Bridge loads"),
        ((first(), second(**{"checkpoint.load": "/x"})), (), "stage-load", "checkpoint.load is /x"),
        ((first(),), ("three.train.lr=1",), "stages-override", "'three' is not a stage"),
    ],
)
def test_recipes_that_are_refused(tmp_path: Path, found: Any, sets: tuple[str, ...], code: str, words: str) -> None:
    problem = only(refused(lambda: stages(tmp_path, *found, sets=sets)))
    assert (problem.code, words in problem.message) == (code, True), problem


def test_keys_of_an_ordinary_recipe_beside_stages_are_one_problem(tmp_path: Path) -> None:
    """A recipe that extended an ordinary one used to get an error for every inherited key."""
    file = tmp_path / "recipe.yaml"
    file.write_text(json.dumps({"extends": ["tiny_cpu"], "train": {"iterations": 5}, "stages": [first()]}))
    problem = only(refused(lambda: prepare_stages(read_recipe(str(file)), (), Cluster(), tmp_path, None)))
    assert problem.code == "stages-keys" and "model" in problem.message and "`set`" in str(problem.fix)


def test_every_stage_that_cannot_be_prepared_is_reported(tmp_path: Path) -> None:
    """The report ended with the first stage from whose result a later one starts."""
    found = (
        {**first(), "recipe": "./missing.yaml"},
        {**second(), "set": {**FRESH, "parallel.tp": 3}},
        {**second(), "name": "three", "from": "two"},
        {**convert(convert="three"), "model": None},
        {**second(), "name": "four", "from": "hf"},
        {**second(), "name": "five", "from": "one", "set": {**FRESH, "train.lr": -1}},
    )
    problems = refused(lambda: stages(tmp_path, *found))
    assert [(problem.message.partition(":")[0], problem.code) for problem in problems] == [
        ("stage one", "recipe-not-found"), ("stage two", "world-size"), ("stage four", "stage-format"),
        ("stage five", "bad-value"),
    ]  # fmt: skip


def test_an_override_is_for_one_stage(tmp_path: Path) -> None:
    one, two = stages(tmp_path, first(), second(), sets=("two.train.iterations=7",))
    assert (one.prepared.args.values["train_iters"], two.prepared.args.values["train_iters"]) == (20, 7)


def test_a_folder_that_no_stage_promises_is_still_missing(tmp_path: Path) -> None:
    (part,) = stages(tmp_path, first(**{"checkpoint.load": str(tmp_path / "runs" / "elsewhere")}))
    assert "checkpoint-missing" in [problem.code for problem in problems((part,))]
    assert prepare("tiny_cpu").loaded.promised == {}


@pytest.mark.parametrize("file", STAGES, ids=lambda file: file.stem)
def test_the_stages_of_the_pack_pass(file: Path, tmp_path: Path) -> None:
    assert not problems(prepare_stages(read_recipe(str(file)), (), Cluster(), tmp_path, None).parts)


def test_a_dry_run_lists_the_stages(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["submit", "stages/tiny_cpu", "--backend", "sbatch", "--dry-run"]) == 0
    heading, *rows = capsys.readouterr().err.splitlines()
    assert heading.split()[:2] == ["run", "size"], "stages are no points of a grid"
    assert [row.partition("-")[0] for row in rows[:2]] == ["pretrain", "anneal"]

"""Recipes of Bridge's library, and fine-tuning: what they need, and what a run and its resume get."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from support import only, refused

from fp8launch import schedulers
from fp8launch.check.checker import check, check_all
from fp8launch.cli import run
from fp8launch.cluster.profile import Cluster
from fp8launch.diagnostics import UserError
from fp8launch.job.prepared import Prepared, prepare
from fp8launch.megatron.arguments import words_of
from fp8launch.plugins.bridge.index import find, recipes_of, releases
from fp8launch.submit.rendering import rendered_job

SFT = "bridge:llama32_1b_sft_1gpu_h100_bf16_config"
LORA = "bridge:llama32_1b_peft_1gpu_h100_bf16_config"
BASE = "checkpoint.pretrained_checkpoint=/base"


def argv(recipe: str, *sets: str) -> list[str]:
    return list(prepare(recipe, sets).args.argv)


def outcomes(sets: Sequence[str]) -> dict[tuple[str, str], int]:
    """Count the recipes of the library and for fine-tuning by task and by the code that refuses them."""
    found: dict[tuple[str, str], int] = {}
    runs: list[tuple[str, Prepared]] = []
    for recipe in recipes_of(releases()[-1]).values():
        if recipe.task == "pretrain" and not recipe.library:
            continue
        try:
            given = sets if recipe.task != "pretrain" else ()
            runs.append((recipe.task, prepare(f"bridge:{recipe.name}", given)))
        except UserError as error:
            key = recipe.task, min(problem.code for problem in error.problems)
            found[key] = found.get(key, 0) + 1
    checked = check_all([one for _, one in runs], layers=("rules",))
    for (task, one), report in zip(runs, checked, strict=True):
        _, script = schedulers.cluster().script(rendered_job(one, Cluster(), None, False))
        assert one.args.argv[0] in script
        code = min((problem.code for problem in report.problems if problem.severity == "error"), default="rendered")
        found[task, code] = found.get((task, code), 0) + 1
    return found


def test_every_library_and_fine_tuning_recipe_renders_or_is_refused_with_a_reason() -> None:
    """With a checkpoint, those are left that name no data, or whose layout, batch or GPU does not work."""
    assert outcomes([BASE]) == {
        ("pretrain", "rendered"): 95,
        ("pretrain", "bridge-model"): 1,
        ("pretrain", "expert-grid"): 5,
        ("pretrain", "mxfp8-needs-blackwell"): 3,
        ("pretrain", "nvfp4-needs-blackwell"): 1,
        ("sft", "rendered"): 112,
        ("sft", "batch-size"): 2,
        ("sft", "bridge-data"): 4,
        ("sft", "expert-grid"): 2,
        ("sft", "fsdp-average"): 1,
        ("sft", "mxfp8-needs-blackwell"): 1,
        ("peft", "rendered"): 91,
        ("peft", "batch-size"): 2,
        ("peft", "bridge-data"): 2,
        ("peft", "expert-grid"): 1,
        ("peft", "mxfp8-needs-blackwell"): 1,
    }


def test_every_fine_tuning_recipe_says_that_it_needs_a_checkpoint() -> None:
    for recipe in recipes_of(releases()[-1]).values():
        if recipe.task != "pretrain":
            codes = {problem.code for problem in refused(prepare, f"bridge:{recipe.name}", exit_code=1)}
            assert "bridge-checkpoint" in codes <= {"bridge-checkpoint", "bridge-data"}, recipe.name


def test_a_fine_tuning_run_has_its_task_and_starts_from_nothing_of_another_run() -> None:
    words = argv(SFT, BASE)
    assert words[:4] == [
        "--recipe=megatron.bridge.recipes.llama.h100.llama3:llama32_1b_sft_1gpu_h100_bf16_config",
        "--step=megatron.bridge.training.gpt_step:forward_step",
        f"--release={releases()[-1]}",
        "--task=sft",
    ]
    # The recipe would save to and load from nemo_experiments in the current folder.
    assert sorted(words[4:]) == [
        "checkpoint.load=null",
        BASE,
        "checkpoint.save=null",
        "logger.tensorboard_dir=null",
    ]


@pytest.mark.parametrize(
    ("recipe", "sets", "code", "words"),
    [
        (
            SFT,
            [],
            "bridge-checkpoint",
            "set checkpoint.pretrained_checkpoint to a checkpoint of Megatron, or to a folder",
        ),
        (SFT, ["checkpoint.pretrained_checkpoint=null"], "bridge-checkpoint", "meta-llama/Llama-3.2-1B"),
        # Adapters need the model itself, also where Bridge's finetune would take a run's own checkpoint.
        (LORA, ["checkpoint.load=/base"], "bridge-checkpoint", "at every start"),
        (LORA, ["bridge.data=mock"], "bridge-checkpoint", "at every start"),
        (SFT, [BASE, "dataset.dataset_root=/data"], "bridge-data", "write bridge.data=FOLDER"),
        ("bridge:qwen3_vl_8b_peft_1gpu_h100_bf16_energon_config", [BASE], "bridge-data", "set dataset.path"),
        ("bridge:glm52_sft_608gpu_h100_bf16_200k_config", [BASE], "bridge-data", "training.jsonl"),
        ("bridge:qwen25_vl_3b_sft_1gpu_h100_bf16_config", [BASE, "bridge.data=/d"], "bridge-data", "is for text"),
        ("bridge:llama32_1b_pretrain_1gpu_h100_bf16_config", ["bridge.data=/d"], "bridge-data", "dataset.blend"),
        ("bridge:vanilla_gpt_pretrain_1gpu_h100_bf16_config", [], "bridge-model", "model.num_layers"),
        ("bridge:qwen3_next_80b_a3b_peft_1gpu_h100_bf16_config", [BASE], "bridge-task", "Bridge 0.6.2 refuses"),
        ("bridge:llama3_8b_sft_8gpu_h100_bf16_config", [BASE, "bridge.release=0.5.0"], "bridge-task", "0.5.0"),
    ],
)
def test_what_is_missing_is_named(recipe: str, sets: list[str], code: str, words: str) -> None:
    name = recipe
    if "bridge.release=0.5.0" in sets:
        sets = [*sets, "bridge.recipe=" + next(one for one in recipes_of("0.5.0") if "_sft_" in one)]
    problem = only(refused(prepare, name, sets, exit_code=1))
    assert problem.code == code
    assert words in f"{problem.message}; {problem.fix}"


@pytest.mark.parametrize(
    ("recipe", "sets"),
    [
        (SFT, ["checkpoint.load=/base"]),
        (SFT, ["bridge.data=mock"]),
        ("bridge:vanilla_gpt_pretrain_1gpu_h100_bf16_config", ["model.num_layers=2", "model.hidden_size=64"]),
        ("bridge:glm52_sft_608gpu_h100_bf16_200k_config", [BASE, "bridge.data=/d"]),
        ("bridge:glm52_sft_608gpu_h100_bf16_200k_config", [BASE, "dataset.dataset_root=/d"]),
        ("bridge:qwen3_vl_8b_peft_1gpu_h100_bf16_energon_config", [BASE, "dataset.path=/d"]),
    ],
)
def test_what_is_missing_can_be_given(recipe: str, sets: list[str]) -> None:
    if "vanilla" in recipe:
        sets = [*sets, "model.num_attention_heads=4"]
    assert argv(recipe, *sets)


def test_a_resume_of_adapters_reads_the_pretrained_weights_again() -> None:
    """Bridge adds adapters to the weights of `pretrained_checkpoint` at every start (training/setup.py of 0.6.2)."""
    sets = [BASE, "checkpoint.dir=ckpt", "checkpoint.interval=5"]
    for recipe, at_every_start in ((LORA, True), (SFT, False)):
        one = prepare(recipe, sets)
        attempts = one.engine.attempts(one.args)
        assert attempts is not None
        assert words_of(attempts.resume) == ("--resume=ckpt",)
        assert "checkpoint.load=null" in words_of(attempts.first_start)
        assert (BASE in words_of(attempts.always)) == at_every_start
        assert (BASE in words_of(attempts.first_start)) != at_every_start


def test_an_alias_is_its_recipe() -> None:
    assert argv("bridge:llama32_1b_sft_config", BASE) == argv(SFT, BASE)
    assert prepare("bridge:llama32_1b_sft_config", [BASE]).loaded.recipe.name == SFT.partition(":")[2]


def test_two_recipes_of_one_name_have_a_name_each() -> None:
    """Bridge's own runner takes the performance recipe under the name that both have."""
    name = "llama3_70b_sft_32gpu_h100_bf16_config"
    assert not find(name).library
    library = find("llama3_70b_sft_config")
    assert library.library and library.function == name


def test_the_library_keeps_its_batch_on_other_gpus() -> None:
    """Bridge's runner scales the batch of performance recipes only (`_apply_benchmark_weak_scaling`)."""
    name = "bridge:llama3_8b_sft_2gpu_h100_bf16_config"
    assert prepare(name, [BASE], nodes=2).layout.global_batch == find(name.partition(":")[2]).global_batch
    scaled = prepare(name, [BASE, "batch.scaling=weak"], nodes=2)
    assert scaled.layout.global_batch == 2 * find(name.partition(":")[2]).global_batch


@pytest.mark.needs_plugin("estimate")
def test_adapters_are_not_estimated_as_training_of_all_weights() -> None:
    """Llama 3 70B on one node does not fit if all of its weights are trained."""
    name = "bridge:llama3_70b_peft_config"
    codes = {problem.code for problem in check(prepare(name, [BASE]), layers=("memory",)).problems}
    assert not codes


def test_the_check_says_what_data_are_read_from_the_hub() -> None:
    def warned(*sets: str) -> str:
        found = check(prepare(SFT, [BASE, *sets]), layers=("rules",)).problems
        return "; ".join(problem.message for problem in found if problem.code == "hub-data")

    assert "squad" in warned()
    assert not warned("bridge.data=/data") and not warned("bridge.data=mock")


def test_a_tokenizer_in_the_folder_of_the_model_is_not_downloaded(tmp_path: Path) -> None:
    def tokenizer() -> list[str]:
        found = check(prepare(SFT, [BASE, f"bridge.model={tmp_path}"]), layers=("rules",)).problems
        return [str(problem.fix) for problem in found if problem.code == "hub-tokenizer"]

    # Words that are only numbers, which mock data for pre-training need, are none for text.
    assert len(tokenizer()) == 1 and "NullTokenizer" not in tokenizer()[0]
    (tmp_path / "tokenizer.json").write_text("{}")
    assert not tokenizer()


def test_the_folder_of_the_data_must_have_its_first_file(tmp_path: Path) -> None:
    def codes() -> list[str]:
        sets = [f"checkpoint.pretrained_checkpoint={tmp_path}", f"bridge.data={tmp_path}"]
        found = check(prepare(SFT, sets), layers=("machine",)).problems
        return [problem.code for problem in found if problem.severity == "error"]

    assert codes() == ["data-missing"]
    (tmp_path / "training.jsonl").write_text("")
    assert codes() == []


def test_the_command_explains_a_recipe_for_adapters(capsys: pytest.CaptureFixture[str], home: object) -> None:
    assert run(["recipes", LORA]) == 0
    shown = capsys.readouterr().out
    assert "peft" in shown and "squad, packed to 4096 tokens" in shown
    assert run(["recipes", LORA, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["peft"]["class"] == "LoRA" and record["tokenizer"] == "meta-llama/Llama-3.2-1B"


def write_chat_folder(folder: Path, template: str = "T") -> Path:
    """Write what `data build --chat` leaves: 90 conversations of 100 tokens and 10 of 5,000, packed at 4,096."""
    model = folder / "model"
    model.mkdir()
    (model / "tokenizer.json").write_text("{}")
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    (folder / "training.jsonl").write_text("{}\n")
    manifest = {
        "format": 1,
        "splits": {"training": {"lengths": [[100, 90], [5000, 10]]}},
        "packed": {"size": 4096, "multiple": 1, "training": {}},
        "tokenizer": {
            "file": "/built/tokenizer.json",
            "sha256": hashlib.sha256(b"{}").hexdigest(),
            "template_sha256": hashlib.sha256(b"T").hexdigest(),
        },
    }
    (folder / "chat.manifest.json").write_text(json.dumps(manifest))
    return model


@pytest.mark.parametrize(
    ("sets", "expected"),
    [
        (["dataset.seq_length=8192"], {"chat-packing": "--sequence 8192 --pack --pad-to 1"}),
        (["model.context_parallel_size=2", "resources.gpus_per_node=2"], {
            "chat-length": "leaves them out", "chat-packing": "--pad-to 4",
        }),
        (
            ["dataset.enable_offline_packing=false", "dataset.offline_packing_specs=null"],
            {"chat-length": "10 of 100 conversations are longer than the run's 4,096 tokens, and are cut"},
        ),
    ],
)  # fmt: skip
def test_conversations_are_compared_with_the_run(sets: list[str], expected: dict[str, str], tmp_path: Path) -> None:
    model = write_chat_folder(tmp_path)
    words = [BASE, f"bridge.data={tmp_path}", f"tokenizer.tokenizer_model={model}", *sets]
    found = chat_warnings(words)
    assert found.keys() == expected.keys()
    for code, text in expected.items():
        assert text in found[code]


def chat_warnings(sets: Sequence[str]) -> dict[str, str]:
    report = check(prepare(SFT, sets), layers=("rules",))
    return {one.code: f"{one.message}; {one.fix}" for one in report.problems if one.code.startswith("chat-")}


def test_conversations_of_another_template_or_a_stale_index_are_reported(tmp_path: Path) -> None:
    model = write_chat_folder(tmp_path, "another template")
    index = tmp_path / "training.jsonl.idx.npy"
    index.write_bytes(b"")
    os.utime(index, (1, 1))
    sets = [BASE, f"bridge.data={tmp_path}", f"tokenizer.tokenizer_model={model}", "dataset.seq_length=4096"]
    found = chat_warnings(sets)
    assert found.keys() == {"chat-tokenizer", "chat-index", "chat-length"}
    assert "another chat template" in found["chat-tokenizer"]
    (model / "tokenizer.json").write_text("[]")
    assert "another tokenizer" in chat_warnings(sets)["chat-tokenizer"]
    (tmp_path / "chat.manifest.json").write_text("[]")
    assert chat_warnings(sets).keys() == {"chat-manifest", "chat-index"}

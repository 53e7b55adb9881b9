"""The engine `bridge`: a recipe of Megatron-Bridge by its name, from its keys to the batch script."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import only, refused

from fp8launch import schedulers
from fp8launch.check.checker import check, check_all
from fp8launch.cli import run
from fp8launch.cluster.profile import Cluster
from fp8launch.diagnostics import UserError
from fp8launch.hardware.gpus import GPUS
from fp8launch.job.prepared import Prepared, prepare
from fp8launch.megatron.arguments import words_of
from fp8launch.megatron.schema import load_schema
from fp8launch.plugins.bridge.attributes import PARTS, of_run
from fp8launch.plugins.bridge.fields import ATTRIBUTES, fields_of, flat, hydra, refused_value
from fp8launch.plugins.bridge.index import recipes_of, releases
from fp8launch.plugins.bridge.published import recipe_of, rows
from fp8launch.recipe.load import load_recipe
from fp8launch.submit.rendering import rendered_job

LLAMA = "bridge:llama3_8b_pretrain_8gpu_h100_fp8cs_config"
OLDER = "bridge:llama3_8b_pretrain_8gpu_h100_fp8cs_v1_config"
BF16 = "bridge:llama3_8b_pretrain_8gpu_h100_bf16_config"

# Their functions set the layout of a larger run (perf_recipes of Bridge 0.6: "1024-GPU layout").
OF_MORE_GPUS = {
    "deepseek_v3_pretrain_128gpu_vr200_bf16_config",
    "deepseek_v3_pretrain_128gpu_vr200_fp8cs_config",
    "deepseek_v3_pretrain_128gpu_vr200_fp8mx_config",
    "deepseek_v3_pretrain_128gpu_vr200_nvfp4_config",
    "deepseek_v3_pretrain_64gpu_h100_bf16_config",
    "deepseek_v3_pretrain_64gpu_h100_fp8cs_config",
    "qwen3_235b_a22b_pretrain_64gpu_gb200_fp8cs_config",
    "qwen3_235b_a22b_pretrain_64gpu_gb200_fp8mx_config",
    "qwen3_235b_a22b_pretrain_64gpu_gb200_nvfp4_config",
    "qwen3_235b_a22b_pretrain_64gpu_gb200_nvfp4_full_iteration_config",
    "qwen3_235b_a22b_pretrain_64gpu_gb300_bf16_config",
    "qwen3_235b_a22b_pretrain_64gpu_gb300_fp8cs_config",
    "qwen3_235b_a22b_pretrain_64gpu_gb300_fp8mx_config",
    "qwen3_235b_a22b_pretrain_64gpu_gb300_nvfp4_config",
    "qwen3_235b_a22b_pretrain_64gpu_gb300_nvfp4_full_iteration_config",
}

Write = Callable[[str, str], str]


def argv(one: Prepared) -> list[str]:
    return list(one.args.argv)


def test_a_name_is_a_recipe() -> None:
    one = prepare(LLAMA)
    recipe = one.loaded.recipe
    assert (one.engine.name, recipe.name) == ("bridge", LLAMA.partition(":")[2])
    assert (recipe.resources.gpu, recipe.resources.nodes, recipe.resources.gpus_per_node) == ("h100", 1, 8)
    assert recipe.environment["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"
    assert (one.layout.dp, one.layout.global_batch, one.layout.microbatches) == (8, 128, 16)
    assert argv(one)[:3] == [
        "--recipe=megatron.bridge.perf_recipes.llama.h100.llama3:llama3_8b_pretrain_8gpu_h100_fp8cs_config",
        "--step=megatron.bridge.training.gpt_step:forward_step",
        f"--release={releases()[-1]}",
    ]
    # Recipes save into their own folder unless configured otherwise.
    assert argv(one)[3:] == ["checkpoint.save=null"]


def test_gb200_nodes_have_four_gpus() -> None:
    recipe = prepare("bridge:qwen3_30b_a3b_pretrain_8gpu_gb200_fp8mx_config").loaded.recipe
    assert (recipe.resources.nodes, recipe.resources.gpus_per_node) == (2, 4)


@pytest.mark.parametrize("name", sorted(recipes_of(releases()[-1]))[::7])
def test_every_recipe_for_a_gpu_that_is_known_can_be_planned(name: str) -> None:
    found = recipes_of(releases()[-1])[name]
    if found.library or found.task != "pretrain":
        return  # test_every_library_and_fine_tuning_recipe_renders_or_is_refused_with_a_reason
    if found.gpu not in GPUS:
        assert f"not '{found.gpu}'" in only(refused(prepare, f"bridge:{name}")).message
        return
    if name.startswith("nemotronh_56b_pretrain_256gpu_") and found.precision == "bf16":
        # 192 sequences, which 128 replicas cannot share.
        assert only(refused(prepare, f"bridge:{name}", exit_code=1)).code == "batch-size"
        return
    one = prepare(f"bridge:{name}")
    assert one.layout.world == found.gpus and one.layout.global_batch == found.global_batch
    errors = {p.code for p in check(one, layers=("rules",)).problems if p.severity == "error"}
    expected = {"dataset-cache-folder"} if name.startswith("gpt_oss_20b_pretrain_") else set()
    assert errors == ({"expert-grid"} if name in OF_MORE_GPUS else expected)


def test_every_pretraining_recipe_of_the_newest_release_renders_or_is_refused_with_a_reason() -> None:
    """Each refusal was compared with the recipe and the source of Megatron-Core 0.19.2 that refuses it."""
    names = []
    for recipe in recipes_of(releases()[-1]).values():
        if recipe.task == "pretrain" and not recipe.library:
            names.append(recipe.name)
    assert len(names) == 419
    refusals: dict[str, set[str]] = {}
    runs = []
    for name in names:
        try:
            runs.append(prepare(f"bridge:{name}"))
        except UserError as error:
            refusals.setdefault(only(error.problems).code, set()).add(name)
    for one, found in zip(runs, check_all(runs, layers=("rules",)), strict=True):
        for problem in found.problems:
            if problem.severity == "error":
                assert problem.fix, one.loaded.recipe.name
                refusals.setdefault(problem.code, set()).add(one.loaded.recipe.name)
        _, script = schedulers.cluster().script(rendered_job(one, Cluster(), None, False))
        assert one.args.argv[0] in script
    assert refusals.pop("expert-grid") == OF_MORE_GPUS
    assert {code: len(found) for code, found in refusals.items()} == {
        "batch-size": 2,  # 192 sequences, which 128 replicas cannot share
        "dataset-cache-folder": 13,
        "full-graph-pipeline": 1,  # DeepSeek-V4 Flash on B300: four stages without virtual stages
        "moe-dispatcher-sms": 1,
        "op-fuser-experts": 1,  # DeepSeek-V3 in NVFP4 on VR200 lacks NVTE_CUTEDSL_FUSED_GROUPED_MLP
        "pipeline-layout": 2,
    }


@pytest.mark.parametrize("name", sorted(OF_MORE_GPUS))
def test_recipes_of_bridge_that_need_more_gpus_than_their_name_says(name: str) -> None:
    """They keep the layout of 128 to 1024 GPUs on 64, where their groups of experts do not fit."""
    errors = [p for p in check(prepare(f"bridge:{name}"), layers=("rules",)).problems if p.severity == "error"]
    assert [p.code for p in errors] == ["expert-grid"]


@pytest.mark.parametrize(
    ("recipe", "sets", "code"),
    [
        (LLAMA, ["model.calculate_per_token_loss=true", "ddp.average_in_collective=true"], "per-token-loss-average"),
        (LLAMA, ["parallel.pp=2", "parallel.vp=3"], "pipeline-split"),
        ("bridge:qwen3_30b_a3b_pretrain_16gpu_h100_fp8cs_config", ["parallel.ep=32"], "expert-grid"),
    ],
)
def test_rules_of_megatron_core_hold_for_bridge(recipe: str, sets: list[str], code: str) -> None:
    assert code in {p.code for p in check(prepare(recipe, sets), layers=("rules",)).problems}


def test_a_recipe_of_an_engine_is_named_by_keys_instead(write: Write) -> None:
    problem = only(refused(load_recipe, write("r.yaml", "extends: [bridge:llama3_8b]\n")))
    assert "only files can be extended" in problem.message
    assert "write `engine: bridge` and `bridge: {recipe: llama3_8b}`" in (problem.fix or "")


def test_the_model_of_a_recipe_is_the_packs_with_all_that_it_extends() -> None:
    """The part of Llama 3.1 405B extends the part of 8B."""
    one = prepare("bridge:llama31_405b_pretrain_1024gpu_h100_fp8cs_config")
    assert one.args.attributes["num_query_groups"] == 8
    assert one.args.attributes["vocab_size"] == 128256
    one = prepare("bridge:qwen3_30b_a3b_pretrain_16gpu_h100_fp8cs_config")
    assert (one.args.attributes["qk_layernorm"], one.args.attributes["num_experts"]) == (True, 128)


def test_the_key_of_a_file_means_the_same(write: Write) -> None:
    name = LLAMA.partition(":")[2]
    file = write("mine.yaml", f"engine: bridge\nbridge: {{recipe: {name}, release: 0.6.2}}\nname: mine\n")
    assert argv(prepare(file)) == argv(prepare(LLAMA))
    assert prepare(file).loaded.recipe.name == "mine"


@pytest.mark.parametrize(
    "text",
    [
        "train: {train_iters: 5}",
        "train: {iterations: 5}",
        "bridge: {overrides: {train: {train_iters: 5}}}",
        "bridge: {overrides: {train.train_iters: 5}}",
    ],
)
def test_a_field_may_be_written_in_any_of_its_places(text: str, write: Write) -> None:
    file = write("mine.yaml", f"engine: bridge\n{text}\n")
    one = prepare(file, ["bridge.recipe=" + LLAMA.partition(":")[2]])
    assert argv(one)[3] == "train.train_iters=5"
    assert one.loaded.recipe.train.iterations == 5
    assert one.args.attributes["train_iters"] == 5
    assert str(one.args.places["train.train_iters"]).endswith("mine.yaml:2")


def test_overrides_of_bridges_own_sections(write: Write) -> None:
    sets = ["train.train_iters=50", "ddp.overlap_grad_reduce=false", "model.recompute_granularity=null"]
    one = prepare(LLAMA, sets)
    assert argv(one)[3:] == [
        "train.train_iters=50",
        "ddp.overlap_grad_reduce=false",
        "model.recompute_granularity=null",
        "checkpoint.save=null",
    ]
    assert one.args.attributes["overlap_grad_reduce"] is False
    assert "recompute_granularity" not in one.args.attributes


def test_the_batch_grows_with_the_replicas_as_in_bridges_own_runner() -> None:
    assert prepare(LLAMA, nodes=2).layout.global_batch == 256
    on_two = prepare(LLAMA, ["resources.gpus_per_node=2", "resources.gpu=h200"])
    assert (on_two.layout.global_batch, on_two.layout.microbatches) == (32, 16)
    assert "train.global_batch_size=32" in argv(on_two)
    assert prepare(LLAMA, ["batch.scaling=strong"], nodes=2).layout.global_batch == 128
    # The bf16 recipe divides its contexts by two: without that it has twice the replicas.
    assert prepare(BF16, ["parallel.cp=1"]).layout.global_batch == 256
    assert prepare(BF16, ["parallel.cp=1", "train.global_batch_size=16"]).layout.global_batch == 16
    # Up to 0.5 by GPUs alone.
    assert prepare(OLDER, ["parallel.tp=2"]).layout.global_batch == 128
    assert prepare(OLDER, ["parallel.tp=2"], nodes=2).layout.global_batch == 256


def test_bridges_own_runner_has_a_default_for_bf16() -> None:
    assert "optimizer.use_precision_aware_optimizer=true" in argv(prepare(BF16))
    off = prepare(BF16, ["optimizer.use_precision_aware_optimizer=false"])
    assert "optimizer.use_precision_aware_optimizer=true" not in argv(off)


@pytest.mark.parametrize(
    ("recipe", "sets", "code", "words"),
    [
        ("bridge:llama3_8b_pretrain_8gpu_h100_fp8c_config", [], "unknown-bridge-recipe", "fp8cs_config"),
        (LLAMA, ["bridge.release=0.9.0"], "unknown-bridge-release", ", ".join(releases())),
        (LLAMA, ["train.train_itres=5"], "unknown-bridge-field", "did you mean 'train.train_iters'?"),
        (LLAMA, ["bridge.overrides.dpp.bucket_size=5"], "unknown-bridge-field", "did you mean 'ddp'?"),
        (OLDER, ["model.num_layer=5"], "unknown-bridge-field", "did you mean 'model.num_layers'?"),
        (LLAMA, ["comm_overlap=null"], "unknown-bridge-field", "write comm_overlap.FIELD=VALUE"),
        (LLAMA, ["mixed_precision=bf16_mixed"], "unknown-bridge-field", "write mixed_precision.FIELD=VALUE"),
        (LLAMA, ["model.num_layers=abc"], "bridge-value", 'a whole number or null, not "abc"'),
        (LLAMA, ["ddp.overlap_grad_reduce=null"], "bridge-value", "true or false, not null"),
        (LLAMA, ["model.num_layers.x=3"], "bridge-value", "not a field 'x'"),
        (OLDER, ["ddp.overlap_grad_reduce=maybe"], "bridge-value", "true or false"),
        (LLAMA, ["bridge.overrides.+model.num_layers=4.5"], "bridge-value", "a whole number or null, not 4.5"),
        (LLAMA, ["model.recompute_granularity=ful"], "bridge-value", "full or selective or null"),
        (LLAMA, ["model.pipeline_model_parallel_layout=[[1,2],[3]]"], "bridge-value", "words from embedding, decoder"),
        (
            LLAMA,
            ["dataset.blend=[/d]"],
            "bridge-value",
            "or [[PATH, ...], [WEIGHT, ...]], one positive weight per path",
        ),
        (LLAMA, ["dataset.blend=[[/d],[0.5,0.5]]"], "bridge-value", "one positive weight per path"),
        (LLAMA, ["precision.recipe=bf16"], "key-of-other-engine", "mixed_precision"),
        (LLAMA, ["megatron.lr=1"], "key-of-other-engine", "SECTION.FIELD"),
        (LLAMA, ["parallel.fsdp=megatron"], "key-of-other-engine", "ddp"),
        (LLAMA, ["engine=megatron_lm"], "key-of-other-engine", "engine: bridge"),
        pytest.param(
            LLAMA,
            ["launch.tensor_stats=3"],
            "no-such-evidence",
            "tensor statistics",
            marks=pytest.mark.needs_plugin("measure"),
        ),
        (LLAMA, ["train.iterations=5", "train.train_iters=6"], "flag-set-twice", "keep train.iterations"),
    ],
)
def test_what_cannot_be_is_refused_with_the_way_out(recipe: str, sets: list[str], code: str, words: str) -> None:
    problems = refused(prepare, recipe, sets)
    assert {problem.code for problem in problems} == {code}
    assert words in f"{problems[0].message} {problems[0].fix}"


def test_a_recipe_of_an_older_release_is_a_function_with_arguments() -> None:
    name = "bridge:llama3_70b_pretrain_64gpu_h100_fp8cs_v1_config"
    one = prepare(name, ["bridge.release=0.5.0", "batch.sequence=4096"])
    assert argv(one)[0] == "--recipe=configs.llama.llama3_llm_pretrain:llama3_70b_pretrain_config_h100"
    assert "--arguments=config_variant=v1,precision=fp8_cs" in argv(one)
    assert one.args.version == "0.18.0"
    assert one.loaded.recipe.environment["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    # The field had another name; the settings that its launcher added to the recipe are set.
    assert "dataset.sequence_length=4096" in argv(one)
    assert "optimizer.overlap_param_gather_with_optimizer_step=true" in argv(one) and "train.manual_gc=true" in argv(
        one
    )
    assert "dataset.seq_length=4096" in argv(prepare(LLAMA, ["batch.sequence=4096"]))


def test_an_engine_without_a_recipe_says_where_the_names_are(write: Write) -> None:
    problem = only(refused(prepare, write("r.yaml", "engine: bridge\n")))
    assert problem.fix is not None and "fp8launch recipes --engine bridge" in problem.fix


@pytest.mark.parametrize(
    ("sets", "warned"),
    [
        ([], True),
        (["secrets=[HF_TOKEN]"], False),
        (["bridge.model=/models/llama"], False),
        (["env.HF_HOME=/models"], False),
    ],
)
def test_the_check_says_what_is_read_from_the_hub(sets: list[str], warned: bool) -> None:
    found = {p.code: p for p in check(prepare(LLAMA, sets), layers=("rules",)).problems}
    assert ("hub-model" in found) == warned
    if warned:
        assert "meta-llama/Meta-Llama-3-8B" in found["hub-model"].message
        assert found["hub-model"].severity == "warning"


@pytest.mark.parametrize(("folder", "warned"), [([], True), (["checkpoint.dir=c"], False)])
def test_an_interval_without_a_folder_has_no_effect(folder: list[str], warned: bool) -> None:
    found = check(prepare(LLAMA, ["checkpoint.interval=5", *folder]), layers=("rules",)).problems
    assert any(p.code == "flag-without-effect" and "checkpoint.interval" in p.message for p in found) == warned


QWEN_NEXT = "bridge:qwen3_next_80b_a3b_pretrain_128gpu_h100_bf16_config"
NO_TOKENIZER = ["tokenizer.tokenizer_type=NullTokenizer", "tokenizer.vocab_size=151936"]


@pytest.mark.parametrize(
    ("recipe", "sets", "warned"),
    [
        (LLAMA, [], False),  # NVIDIA's recipe has a tokenizer without files
        (LLAMA, ["tokenizer.tokenizer_type=HuggingFaceTokenizer", "tokenizer.tokenizer_model=meta-llama/X"], True),
        (QWEN_NEXT, [], True),
        (QWEN_NEXT, ["bridge.model=/models/qwen"], True),
        (QWEN_NEXT, ["secrets=[HF_TOKEN]", "env.HF_HUB_OFFLINE=1"], True),
        (QWEN_NEXT, ["secrets=[HF_TOKEN]"], False),
        (QWEN_NEXT, ["env.HF_HOME=/models", "env.HF_HUB_OFFLINE=1"], False),
        (QWEN_NEXT, ["tokenizer.tokenizer_model=/models/qwen"], False),
        (QWEN_NEXT, NO_TOKENIZER, False),
        (QWEN_NEXT, ["bridge.release=0.6.0", "bridge.model=/models/qwen"], True),
    ],
)
def test_the_check_names_a_tokenizer_that_the_job_would_download(recipe: str, sets: list[str], warned: bool) -> None:
    found = {p.code: p for p in check(prepare(recipe, sets), layers=("rules",)).problems}
    assert ("hub-tokenizer" in found) == warned
    if warned and recipe == QWEN_NEXT:
        problem = found["hub-tokenizer"]
        assert "tokenizer of Qwen/Qwen3-Next-80B-A3B-Instruct" in problem.message and problem.severity == "warning"
        assert all(f"--set {words}" in str(problem.fix) for words in NO_TOKENIZER)


LIBRARY = "bridge:llama3_8b_pretrain_2gpu_h100_bf16_config"


@pytest.mark.parametrize(
    ("recipe", "sets", "words", "warned"),
    [
        (LIBRARY, [], 32000, True),
        (LIBRARY, ["tokenizer.vocab_size=128256"], 128256, False),
        (LIBRARY, ["tokenizer.use_tokenizer_vocab_size=false"], 128256, False),
        (LIBRARY, ["tokenizer.tokenizer_type=HuggingFaceTokenizer", "tokenizer.tokenizer_model=/x"], 128256, False),
        ("bridge:llama2_7b_pretrain_2gpu_h100_bf16_config", [], 32000, True),
        ("bridge:llama2_7b_pretrain_2gpu_h100_bf16_config", ["tokenizer.vocab_size=32000"], 32000, False),
        (LLAMA, [], 128256, False),
        ("bridge:nemotronh_56b_pretrain_64gpu_h100_fp8cs_config", [], 32000, False),  # Bridge knows no other size
    ],
)
def test_a_tokenizer_without_words_gives_the_model_its_size(
    recipe: str, sets: list[str], words: int, warned: bool
) -> None:
    """Llama-3.2 3B trained with 32,000 words on a GPU, and was compared with a run that had 128,256."""
    run = prepare(recipe, sets)
    assert run.args.attributes["vocab_size"] == words
    found = {problem.code: problem for problem in check(run, layers=("rules",)).problems}
    assert ("bridge-vocabulary" in found) == warned
    if recipe == LIBRARY and warned:
        assert "32,000, but meta-llama/Meta-Llama-3-8B has 128,256" in found["bridge-vocabulary"].message
        assert "--set tokenizer.vocab_size=128256" in str(found["bridge-vocabulary"].fix)


def test_a_configuration_on_the_disk_states_the_vocabulary(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 128256}))
    run = prepare("bridge:llama32_3b_pretrain_1gpu_h100_bf16_config", [f"bridge.model={tmp_path}"])
    problem = only([p for p in check(run, layers=("rules",)).problems if p.code == "bridge-vocabulary"])
    assert "meta-llama/Llama-3.2-3B has 128,256" in problem.message


def test_files_that_bridge_reads_must_exist(tmp_path: Path) -> None:
    """Such mistakes ended the job after its wait in the queue, as mistakes in Megatron-LM's flags would."""
    folder, prefix = str(tmp_path), f"{tmp_path}/docs"
    (tmp_path / "config.json").write_text("{}")
    for end in ("bin", "idx"):
        Path(f"{prefix}.{end}").write_bytes(b"")

    def codes(*sets: str) -> list[str]:
        found = check(prepare(LLAMA, sets), layers=("machine",)).problems
        return [problem.code for problem in found if problem.severity == "error"]

    for key, right, wrong, code in (
        ("bridge.model={}", folder, "/no/model", "file-missing"),
        ("checkpoint.load={}", folder, "/no/checkpoint", "checkpoint-missing"),
        ("checkpoint.pretrained_checkpoint={}", folder, "/no/checkpoint", "checkpoint-missing"),
        ("dataset.blend=[[{}],null]", prefix, "/no/docs", "data-missing"),
        ("dataset.blend=[[{}],[1.0]]", prefix, "/no/docs", "data-missing"),
    ):
        assert codes(key.format(right)) == [], key
        assert set(codes(key.format(wrong))) == {code}, key
        assert set(codes(key.format("here"))) == {"path-relative"}, key
        assert set(codes(key.format("~/there"))) == {"path-not-expanded"}, key
    assert codes("checkpoint.load=s3://bucket/run") == []
    new = f"{folder}/new"
    saved = codes(f"checkpoint.load={new}", f"checkpoint.dir={new}", "checkpoint.interval=9")
    assert "checkpoint-missing" not in saved
    assert codes("checkpoint.dir=~/new", "checkpoint.interval=9") == ["path-not-expanded"]


@pytest.mark.parametrize(
    ("sets", "code"),
    [
        (["model.pipeline_model_parallel_layout=Et*16|t*16L"], []),
        (["model.pipeline_model_parallel_layout=Et*16|t*15L"], ["pipeline-layout"]),
        (["model.pipeline_model_parallel_layout=t*16|t*16L"], ["pipeline-layout"]),
        (["model.pipeline_model_parallel_layout=Et*16|t*8|t*8L"], ["pipeline-layout"]),
        (["model.pipeline_model_parallel_layout=[[embedding,decoder],[decoder,loss]]"], ["pipeline-layout"]),
        (["model.pipeline_model_parallel_layout=stages"], ["pipeline-layout"]),
        (["model.pipeline_model_parallel_layout=Et*8|t*8|t*8|t*8L", "parallel.vp=2"], []),
        (["model.pipeline_model_parallel_layout=Et*8|t*8|t*8|t*8L", "parallel.vp=4"], ["pipeline-layout"]),
        (["model.num_layers=31"], ["pipeline-split"]),
        (["model.num_layers=31", "model.num_layers_in_first_pipeline_stage=15"], []),
    ],
)
def test_stages_without_a_validator_of_megatron(sets: list[str], code: list[str]) -> None:
    """Megatron-LM's validators refuse these in a recipe for its command line."""
    found = check(prepare(LLAMA, ["parallel.pp=2", *sets]), layers=("rules",)).problems
    assert [problem.code for problem in found if problem.severity == "error"] == code


@pytest.mark.parametrize(
    ("recipe", "code", "fix"),
    [
        (
            "gpt_oss_20b_pretrain_72gpu_gb200_nvfp4_config",
            "dataset-cache-folder",
            ["bridge.overrides.dataset.path_to_cache=/caches"],
        ),
        (
            "gpt_oss_20b_pretrain_72gpu_gb200_nvfp4_config",
            "dataset-cache-folder",
            [f"bridge.overrides.dataset.{flag}=false" for flag in ("fast_cache_load", "defer_npy_index_mmap")],
        ),
        (
            "qwen3_235b_a22b_pretrain_128gpu_b200_fp8mx_deepep_dev_config",
            "moe-dispatcher-sms",
            ["bridge.overrides.model.moe_flex_dispatcher_num_sms=20"],
        ),
        ("deepseek_v3_pretrain_256gpu_gb200_fp8mx_partial_cg_dev_config", "pipeline-layout", ["parallel.vp=4"]),
    ],
)
def test_recipes_that_bridge_itself_refuses(recipe: str, code: str, fix: list[str]) -> None:
    """Bridge 0.6.0 raises while it sets these up, and with the fix it does not (run on a CPU)."""

    def errors(*sets: str) -> list[str]:
        found = check(prepare(f"bridge:{recipe}", list(sets)), layers=("rules",)).problems
        return [problem.code for problem in found if problem.severity == "error"]

    assert errors() == [code]
    assert errors(*fix) == []


def test_sizes_of_bridge_are_checked() -> None:
    for key in ("model.num_layers", "model.hidden_size", "model.ffn_hidden_size", "model.vocab_size"):
        found = check(prepare(LLAMA, [f"{key}=-16"]), layers=("rules",)).problems
        assert [problem.code for problem in found if problem.severity == "error"] == ["model-size"], key


def test_a_recipe_that_reads_a_file_which_the_wheel_lacks() -> None:
    name = "bridge:nemotron_3_super_pretrain_64gpu_b200_nvfp4_config"
    for release in ("0.6.0", "0.6.2"):
        problems = check(prepare(name, [f"bridge.release={release}"]), layers=("rules",)).problems
        message = only([p for p in problems if p.code == "bridge-file-missing"]).message
        assert "te_quant.cfg" in message and release in message
    older_name = name.replace("_config", "_v1_config")
    older = check(prepare(older_name, ["bridge.release=0.5.0"]), layers=("rules",)).problems
    assert "bridge-file-missing" not in {p.code for p in older}


def test_a_gpu_without_the_precision_is_refused() -> None:
    found = check(prepare(LLAMA, ["resources.gpu=a100"]), layers=("rules",)).problems
    assert "fp8-needs-newer-gpu" in [p.code for p in found]


@pytest.mark.needs_plugin("estimate")
def test_memory_is_estimated_and_no_key_of_megatron_lm_is_advised() -> None:
    sets = ["resources.gpus_per_node=1", "train.global_batch_size=16", "model.recompute_granularity=null"]
    problem = only(check(prepare(LLAMA, sets), layers=("memory",)).problems)
    assert problem.code == "does-not-fit"
    assert problem.fix is not None and problem.fix.startswith("divide the model over more GPUs")


@pytest.mark.needs_plugin("estimate")
def test_every_run_that_nvidia_publishes_fits_by_the_estimate() -> None:
    """They ran: 100 figures of models that the pack has. The fullest GPU is estimated at 96.5 % of its memory."""
    from fp8launch.plugins.estimate.memory import LIMIT, estimate

    parts = {}
    for row in rows():
        recipe = recipe_of(row)
        if recipe is None or recipe.task != "pretrain" or not recipe.hub or not set(recipe.hub) <= set(PARTS):
            continue
        args = of_run(recipe, {})
        split = math.prod(recipe.layout.get(axis) or 1 for axis in ("tp", "pp", "cp"))
        steps = row.global_batch // (row.micro_batch * (row.gpus // split))
        found = estimate(args, row.gpus, steps, GPUS[recipe.gpu])
        assert found is not None, recipe.name
        parts[row.number] = found.total / (GPUS[recipe.gpu].memory_gib * 2**30)
    assert len(parts) == 100
    assert max(parts.values()) < 0.97
    assert sum(part > LIMIT for part in parts.values()) == 12


def test_a_release_may_read_less_of_a_model() -> None:
    """`aux_loss_alpha` of DeepSeek-V3's configuration is read since 0.6 (deepseek_v3_bridge.py)."""
    name = "bridge:deepseek_v3_pretrain_256gpu_b200_bf16_v2_config"
    assert prepare(name, ["bridge.release=0.4.0"]).args.attributes["moe_aux_loss_coeff"] == 1e-4
    newer = "bridge:deepseek_v3_pretrain_256gpu_gb200_fp8mx_config"
    assert prepare(newer, ["bridge.release=0.6.0"]).args.attributes["moe_aux_loss_coeff"] == 1e-3


def test_a_pipeline_layout_of_lists_is_megatrons_text() -> None:
    """Without it the memory of DeepSeek-V3 in many stages was not estimated."""
    one = prepare("bridge:deepseek_v3_pretrain_256gpu_gb200_fp8mx_config")
    assert one.args.attributes["pipeline_model_parallel_layout"] == "Etttt|" + "tttt|" * 14 + "tmL"
    assert one.layout.vp == 4


def test_the_sizes_of_a_local_model_count(tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    one = prepare(LLAMA, [f"bridge.model={tmp_path}"])
    assert f"--model={tmp_path}" in argv(one)
    assert (one.args.attributes["num_layers"], one.args.attributes["kv_channels"]) == (2, 16)
    # Where it is not to be seen from here, it is taken for the model that the recipe names.
    assert prepare(LLAMA, ["bridge.model=/not/here"]).args.attributes["num_layers"] == 32


def test_fsdp_saves_in_the_only_format_that_bridge_takes_for_it() -> None:
    """`_validate_and_apply_megatron_fsdp_configs` refused every recipe with FSDP that had a folder for checkpoints."""
    fsdp = "bridge:llama3_70b_pretrain_64gpu_gb200_fp8cs_config"
    given = "checkpoint.ckpt_format=fsdp_dtensor"
    assert given in argv(prepare(fsdp, ["checkpoint.dir=ckpt"]))
    assert given not in argv(prepare(fsdp)) and given not in argv(prepare(LLAMA, ["checkpoint.dir=ckpt"]))
    stated = prepare(fsdp, ["checkpoint.dir=ckpt", "checkpoint.ckpt_format=torch_dist"])
    assert "checkpoint.ckpt_format=torch_dist" in argv(stated)


def test_a_resume_takes_the_runs_own_checkpoint() -> None:
    sets = ["checkpoint.dir=ckpt", "checkpoint.interval=5", "checkpoint.load=/base"]
    one = prepare(LLAMA, sets)
    attempts = one.engine.attempts(one.args)
    assert attempts is not None and attempts.save == "ckpt"
    assert words_of(attempts.first_start) == ("checkpoint.load=/base",)
    assert words_of(attempts.resume) == ("--resume=ckpt",)
    assert words_of(attempts.always)[-1] == "train.exit_signal_handler=true"
    assert "checkpoint.load=/base" not in words_of(attempts.always)
    assert {"checkpoint.save=ckpt", "checkpoint.save_interval=5"} <= set(words_of(attempts.always))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        (True, "true"),
        (3, "3"),
        (1e-05, "1e-05"),
        ("selective", "selective"),
        ("/data/a b", '"/data/a b"'),
        ("true", '"true"'),
        ("1.0", '"1.0"'),
        ('say "x"', '"say \\"x\\""'),
        (["a", 1], "[a,1]"),
        ({"a": None}, "{a:null}"),
    ],
)
def test_values_in_hydras_syntax(value: Any, text: str) -> None:
    assert hydra("model.x", value) == f"model.x={text}"


@pytest.mark.parametrize("release", releases())
def test_what_the_recipes_set_are_values_that_the_fields_take(release: str) -> None:
    known = fields_of(release)
    for recipe in recipes_of(release).values():
        for section, values in {"model": recipe.settings, **recipe.sections}.items():
            for name, value in values.items():
                assert refused_value(known[section].get(name, ""), value) is None, (recipe.name, section, name)


def test_hydra_reads_the_values_back() -> None:
    """Bridge parses overrides with Hydra's parser."""
    parser = pytest.importorskip("hydra.core.override_parser.overrides_parser").OverridesParser.create()
    for value in (None, True, 3, 1e-05, "selective", "/data/a b", "true", "1.0", 'say "x"', "back\\", ["a", 1, "b c"]):
        assert parser.parse_override(hydra("model.x", value)).value() == value


def test_overrides_are_flat_however_they_are_nested() -> None:
    found = {field: value for field, _, value in flat({"a": {"b": 1, "c": {"d": 2}}, "e.f": 3, "g": {}})}
    assert found == {"a.b": 1, "a.c.d": 2, "e.f": 3, "g": {}}


def test_attributes_of_other_names_are_those_of_megatrons_arguments() -> None:
    known = {flag.dest for flag in load_schema("0.19").flags()}
    assert set(ATTRIBUTES.values()) <= known
    one = prepare(LLAMA, ["model.layernorm_epsilon=0.01"])
    assert one.args.attributes["layernorm_epsilon"] == 0.01 and "norm_epsilon" not in one.args.attributes


def test_the_fields_of_the_release_are_known() -> None:
    known = fields_of("0.6.0")
    assert {"train_iters", "exit_duration_in_mins"} <= known["train"].keys()
    assert {"num_layers", "recompute_granularity", "seq_length"} <= known["model"].keys()
    assert {"save", "ckpt_step"} <= known["checkpoint"].keys()


def test_the_figure_that_nvidia_publishes_stands_beside_its_recipe() -> None:
    name = "bridge:deepseek_v3_pretrain_256gpu_gb300_fp8mx_config"
    figure = prepare(name).loaded.recipe.reference
    assert figure is not None
    assert (figure.tokens_per_s_per_gpu, figure.tflops_per_gpu, figure.gpus) == (6288, 1635, 256)
    assert "26.08" in figure.source
    assert prepare(name, ["train.train_iters=50"]).loaded.recipe.reference == figure
    # Another layout, batch or GPU is another run.
    for other in ("resources.gpu=gb200", "parallel.pp=4", "train.global_batch_size=2048"):
        assert prepare(name, [other]).loaded.recipe.reference is None, other
    # The published 8B run sharded by FSDP, so its figure belongs to no recipe of this release.
    assert prepare(LLAMA).loaded.recipe.reference is None


def test_the_commands(capsys: pytest.CaptureFixture[str], home: object) -> None:
    assert run(["submit", LLAMA, "--backend", "sbatch", "--dry-run", "--set", "train.train_iters=50"]) == 0
    script = capsys.readouterr().out
    assert 'plugins/bridge/injob/bridge.py"' in script or "--worker=bridge.py" in script
    assert "train.train_iters=50" in script and "NVTE_FWD_LAYERNORM_SM_MARGIN=20" in script


@pytest.mark.needs_plugin("estimate")
def test_estimate_counts_the_parameters(capsys: pytest.CaptureFixture[str], home: object) -> None:
    assert run(["estimate", LLAMA, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["parameters"]["total"] == 8_030_261_248


@pytest.mark.needs_plugin("diff")
def test_diff_with_a_recipe_of_the_pack_compares_what_both_know(
    capsys: pytest.CaptureFixture[str], home: object
) -> None:
    assert run(["diff", LLAMA, "llama8b_fp8", "--json"]) == 0
    found = {d["name"]: (d["a"], d["b"]) for d in json.loads(capsys.readouterr().out) if d["part"] == "arguments"}
    assert found["recompute_num_layers"] == (5, 8)
    # The same model, though Bridge's comes from the hub and ours from the pack.
    assert not {"num_layers", "hidden_size", "rotary_base", "swiglu", "seq_length", "global_batch_size"} & found.keys()
    # Defaults of Megatron-LM's parser say nothing of Bridge.
    assert "enable_msc" not in found


@pytest.mark.parametrize("key", ["parallel.vp", "model.virtual_pipeline_model_parallel_size"])
def test_null_takes_the_virtual_stages_of_a_recipe_away(key: str) -> None:
    """It was dropped, and the job ran with the recipe's own."""
    name = "bridge:llama3_70b_pretrain_64gpu_h100_fp8cs_config"
    assert prepare(name).layout.vp == 5
    without = prepare(name, [f"{key}=null"])
    assert without.layout.vp == 1
    assert "model.virtual_pipeline_model_parallel_size=null" in without.args.argv


@pytest.mark.parametrize(
    ("words", "seeds"),
    [
        (("--seeds", "1,2"), (1, 2)),
        (("--repeat", "2", "--vary-seed"), (1234, 1235)),
        (("--repeat", "2", "--vary-seed", "--set", "rng.seed=7"), (7, 8)),
    ],
)
def test_seeds_of_a_bridge_recipe_are_in_its_own_field(
    words: tuple[str, ...], seeds: tuple[int, ...], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """`--set megatron.seed=1` was refused, with the advice to write Bridge's fields."""
    recipe = "bridge:llama3_8b_pretrain_8gpu_h100_bf16_config"
    assert (
        run(["submit", recipe, "--run-root", str(tmp_path), "--backend", "sbatch", "--dry-run", "--json", *words]) == 0
    )
    found = json.loads(capsys.readouterr().out)["points"]
    assert [point["point"] for point in found] == [f"seed={seed}, repeat 1" for seed in seeds]

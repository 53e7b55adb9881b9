"""Every recipe and every study passes the check, and says what it is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pack_support import HEADLINE, PACK, PEERS, STAGES, STUDIES, name_of, runs

from fp8launch.check.checker import check_all
from fp8launch.hardware.quantization import precision_names
from fp8launch.job.prepared import prepare
from fp8launch.megatron.flops import flops_per_token
from fp8launch.recipe.load import load_recipe


@pytest.mark.parametrize("file", HEADLINE, ids=name_of)
def test_a_recipe_has_a_published_figure_or_says_why_not(file: Path) -> None:
    loaded = load_recipe(str(file))
    recipe = loaded.recipe
    measured = any("as measured in benchmarks/" in part.read_text(encoding="utf-8") for part in loaded.files)
    if recipe.resources.gpu == "cpu" or measured:
        return
    silent = any(note.startswith("No published figure: ") for note in recipe.notes)
    assert (recipe.reference is None) == silent
    if recipe.reference is not None:
        assert recipe.reference.gpus == recipe.resources.world_size


@pytest.mark.parametrize("file", HEADLINE, ids=name_of)
def test_published_figures_agree_with_the_model(file: Path) -> None:
    """Tokens/s times our FLOP per token are the published TFLOP/s: figure, model and sequence belong together."""
    prepared = prepare(str(file))
    reference = prepared.loaded.recipe.reference
    if reference is None or reference.tflops_per_gpu is None:
        return
    flop = flops_per_token(prepared.args.values)
    assert flop is not None
    computed = reference.tokens_per_s_per_gpu * flop / 1e12
    if "gpt_oss" in prepared.loaded.recipe.name:
        # NVIDIA counts its gated activation's third matrix and the windows of its attention; Megatron's formula, which
        # ours repeats, knows the gate from --swiglu alone and counts every layer's attention in full.
        assert 0.80 < computed / reference.tflops_per_gpu < 1.06
    else:
        assert computed == pytest.approx(reference.tflops_per_gpu, rel=0.005)


@pytest.mark.parametrize("file", [*HEADLINE, *STUDIES], ids=name_of)
def test_names_say_what_is_inside(file: Path) -> None:
    recipe = load_recipe(str(file)).recipe
    assert recipe.description
    if file in HEADLINE:
        assert recipe.name == file.stem
        precision = recipe.precision.recipe if recipe.precision else ""
        if re.search(r"_(h|b|gb)\d+$", file.stem) and "4layers" not in file.stem:
            assert file.stem.endswith(f"_{precision}_{recipe.resources.gpu}")


def test_nothing_needs_a_tokenizer_of_its_own() -> None:
    for file in [*HEADLINE, *STUDIES]:
        args = prepare(str(file)).args.values
        assert (args.get("tokenizer_type"), args.get("tokenizer_model")) == ("NullTokenizer", None)


@pytest.mark.needs_plugin("accelerate")
def test_every_part_is_used_or_offered() -> None:
    """A part that no recipe extends must be one that a user picks: a model, a piece of hardware, data, a long run."""
    recipes = [*HEADLINE, *PEERS, *STUDIES]
    used = {name_of(file) for recipe in recipes for file in load_recipe(str(recipe)).files}
    parts = {name_of(file) for file in set(PACK.rglob("*.yaml")).difference(recipes, STAGES)}
    offered = {"models/gpt_oss_20b", "models/kimi_k2", "data/mock", "data/indexed_example", "moe/layer_graphs"}
    offered |= {
        "models/qwen3_next_80b_a3b",
        "models/deepseek_v3_2",
        "models/glm4_5",
        "models/glm4_5_air",
        "models/llama4_scout",
        "models/llama4_maverick",
    }
    # `--set precision.recipe=...` picks any of these.
    chosen = {f"precision/{name}" for name in precision_names()}
    assert parts - used - chosen == offered


@pytest.mark.parametrize("file", HEADLINE, ids=name_of)
def test_norms_leave_room_for_the_dispatcher(file: Path) -> None:
    """20 multiprocessors with DeepEP and HybridEP, else 16 (scripts/performance/perf_plugins.py of Bridge 0.5.0)."""
    one = prepare(str(file))
    if one.loaded.recipe.resources.gpu == "cpu":
        return
    flex = one.args.attributes.get("moe_token_dispatcher_type") == "flex"
    for direction in ("FWD", "BWD"):
        margin = one.loaded.recipe.environment[f"NVTE_{direction}_LAYERNORM_SM_MARGIN"]
        assert margin == ("20" if flex else "16"), direction


def test_phases_follow_one_schedule() -> None:
    phases = prepare("studies/fp8_phases_llama3_2_1b").phases
    assert [(p.begin, p.end, p.args.values.get("fp8_format")) for p in phases] == [
        (0, 100, None), (100, 900, "hybrid"), (900, 1000, None),
    ]  # fmt: skip
    own = {"fp8_format", "fp8_recipe", "exit_interval"}
    common = [{k: v for k, v in p.args.values.items() if k not in own} for p in phases]
    assert common[0] == common[1] == common[2]
    assert common[0]["train_iters"] == 1000


@pytest.mark.parametrize(
    "files",
    [
        pytest.param([*HEADLINE, *STUDIES], id="pack"),
        pytest.param(PEERS, id="peers", marks=pytest.mark.needs_plugin("accelerate")),
    ],
)
def test_check_finds_nothing_wrong(files: list[Path]) -> None:
    """All layers but the machine's, on every run. A warning that stays must be one that the recipe's notes explain."""
    # The second: ZeRO 1, by the memory of Megatron's distributed optimizer.
    explained = {("llama8b_fp8", "tight-memory"), ("peer_zero_stages", "tight-memory")}
    prepared = [run for file in files for run in runs(file)]
    results = check_all(prepared, layers=("schema", "rules", "memory"))
    # test_pack_advisories.py has the known bugs of Megatron.
    found = set()
    for run, result in zip(prepared, results, strict=True):
        found |= {(run.loaded.recipe.name, p.code) for p in result.problems if p.kind != "advisory"}
    assert found <= explained, found - explained

"""The index of Megatron-Bridge's performance recipes, and the published figures that belong to them."""

from __future__ import annotations

import json
import math
import re

import pytest
from support import only, refused

from fp8launch.cli import run
from fp8launch.hardware.gpus import GPUS
from fp8launch.megatron.parameters import parameters
from fp8launch.plugins.bridge.attributes import PARTS, of_recipe
from fp8launch.plugins.bridge.index import BridgeRecipe, find, recipes_of, releases, select
from fp8launch.plugins.bridge.published import recipe_of, rows, rows_of, unattributed, why_unattributed
from fp8launch.resources import pack_folder


def test_each_release_has_its_recipes() -> None:
    assert releases()[:4] == ("0.4.0", "0.5.0", "0.6.0", "0.6.2")
    measured, library = [], []
    for release in releases():
        of_library = [recipe.library for recipe in recipes_of(release).values()]
        library.append(sum(of_library))
        measured.append(len(of_library) - sum(of_library))
    assert (measured, library) == ([347, 402, 428, 450], [0, 0, 293, 293])


def test_a_name_says_what_its_recipe_is() -> None:
    """Some recipes of the library have no GPU in their name: they call one that does."""
    for release in releases():
        for name, recipe in recipes_of(release).items():
            if recipe.library and "gpu_" not in name:
                assert name.startswith(recipe.model) and recipe.gpu in GPUS and recipe.gpus
                continue
            assert f"{recipe.model}_{recipe.task}_{recipe.gpus}gpu_{recipe.gpu}_{recipe.precision}" in name


def divides(recipe: BridgeRecipe) -> bool:
    shard = math.prod(recipe.layout.get(axis) or 1 for axis in ("tp", "pp", "cp"))
    return recipe.gpus % shard == 0 and recipe.global_batch % (recipe.micro_batch * (recipe.gpus // shard)) == 0


def test_layout_and_batch_divide_the_gpus() -> None:
    """Two recipes of 0.6 take over the batch of one for 64 GPUs, 192, which 128 replicas cannot share."""
    odd = []
    for release in releases():
        odd += [name for name, one in recipes_of(release).items() if not one.library and not divides(one)]
    assert odd == 2 * [
        "nemotronh_56b_pretrain_256gpu_b200_bf16_config",
        "nemotronh_56b_pretrain_256gpu_gb300_bf16_config",
    ]


def test_a_recipe_has_what_its_function_sets() -> None:
    """Read in megatron/bridge/perf_recipes/llama/h100/llama3.py of 0.6.2."""
    recipe = find("llama3_8b_pretrain_8gpu_h100_fp8cs_config")
    assert (recipe.release, recipe.module) == (releases()[-1], "megatron.bridge.perf_recipes.llama.h100.llama3")
    assert recipe.hub == ("meta-llama/Meta-Llama-3-8B",)
    assert (recipe.micro_batch, recipe.global_batch, recipe.sequence) == (1, 128, 8192)
    assert recipe.settings["recompute_num_layers"] == 5
    assert recipe.environment["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"
    assert recipe.sections["mixed_precision"]["fp8_param_gather"] is True
    assert find("llama3_8b_pretrain_8gpu_h100_bf16_config").layout["cp"] == 2


def test_a_recipe_of_another_gpu_under_a_name_of_its_own_is_one() -> None:
    """Read in perf_recipes/llama/b300/llama31.py of 0.6.0, which takes the functions of GB300 for 256 B300."""
    recipe = find("llama31_405b_pretrain_256gpu_b300_nvfp4_config")
    other = find("llama31_405b_pretrain_256gpu_gb300_nvfp4_config")
    assert recipe.module.endswith("llama.b300.llama31") and recipe.function == recipe.name
    assert (recipe.gpu, recipe.layout, recipe.environment) == ("b300", other.layout, other.environment)


def test_an_older_recipe_says_how_its_function_is_called() -> None:
    recipe = find("llama3_70b_pretrain_64gpu_gb300_fp8mx_v1_config", "0.5.0")
    assert recipe.function == "llama3_70b_pretrain_config_gb300"
    assert recipe.arguments == {"precision": "fp8_mx", "config_variant": "v1"}
    assert (recipe.layout["pp"], recipe.layout["vp"]) == (4, 5)


def test_a_model_with_one_variant_is_in_the_older_releases_too() -> None:
    """Its constants end with the precision: KIMI_K2_PRETRAIN_CONFIG_GB300_FP8_MX."""
    recipe = find("kimi_k2_pretrain_256gpu_gb300_fp8mx_config", "0.5.0")
    assert recipe.arguments == {"precision": "fp8_mx"}
    assert [row.container for row in rows_of(recipe)] == ["26.06"]


def test_older_recipes_have_the_environment_of_their_launcher() -> None:
    """Read in scripts/performance/utils/executors.py and perf_plugins.py of 0.5.0."""
    found = find("llama3_70b_pretrain_64gpu_gb300_fp8mx_v1_config", "0.5.0").environment
    assert found["CUDA_DEVICE_MAX_CONNECTIONS"] == "32" and found["NVTE_FWD_LAYERNORM_SM_MARGIN"] == "16"
    assert found["NCCL_P2P_NET_CHUNKSIZE"] == "2097152" and "NVTE_NORM_FWD_USE_CUDNN" not in found
    assert not {"HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"} & found.keys()
    tp = find("llama3_70b_pretrain_64gpu_h100_fp8cs_v1_config", "0.4.0").environment
    assert tp["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    # run_script.py of 0.5.0: with user buffers NCCL may use NVLink's switches.
    buffers = find("llama3_70b_pretrain_64gpu_gb300_bf16_v2_config", "0.5.0").environment
    assert (buffers["NCCL_NVLS_ENABLE"], buffers["NCCL_CTA_POLICY"]) == ("1", "1")
    assert find("llama3_70b_pretrain_64gpu_gb300_bf16_v2_config", "0.4.0").environment["NCCL_NVLS_ENABLE"] == "0"


def test_an_unknown_recipe_is_refused_with_the_nearest() -> None:
    problem = only(refused(find, "llama3_8b_pretrain_8gpu_h100_fp8c_config"))
    assert problem.fix is not None and "llama3_8b_pretrain_8gpu_h100_fp8cs_config" in problem.fix
    assert ", ".join(releases()) in only(refused(recipes_of, "0.7.0")).fix  # type: ignore[operator]


def test_a_published_figure_belongs_to_the_recipe_that_ran() -> None:
    shown = {
        row.container: row.tokens_per_s_per_gpu
        for row in rows_of(find("qwen3_30b_a3b_pretrain_8gpu_gb200_fp8mx_config"))
    }
    assert shown == {"26.08": 39936}
    for row in rows():
        recipe = recipe_of(row)
        if recipe is not None:
            assert (recipe.gpus, recipe.micro_batch, recipe.global_batch) == (
                row.gpus,
                row.micro_batch,
                row.global_batch,
            )


def test_almost_every_figure_of_the_releases_is_attributed() -> None:
    """What is left ran with a batch or layout that no recipe of its release has, or has no recipe there."""
    left = [(row.container, row.model, row.gpu, row.global_batch) for row in unattributed() if row.release]
    assert left == [
        ("26.06", "DeepSeekV3", "gb300", 15360),
        ("26.04.01", "DeepSeekV3", "b300", 4096),
        ("26.04.01", "DeepSeekV3", "b200", 4096),
    ]
    assert sum(recipe_of(row) is not None for row in rows()) == 161


def test_every_published_figure_is_attributed_or_left_out_with_its_reason() -> None:
    """The 18 rows of Bridge's performance summary and the 260 of its archive, 14 of them with two figures."""
    attributed = [row for row in rows() if recipe_of(row) is not None]
    left = unattributed()
    assert (len(rows()), len(attributed), len(left)) == (292, 161, 131)
    assert sorted(row.number for row in [*attributed, *left]) == list(range(292))
    assert not [row for row in attributed if why_unattributed(row) is not None]
    reasons = {(row.container, row.model, row.gpu, row.global_batch): why_unattributed(row) for row in left}
    assert all(reasons.values())
    older = {row.container for row in left if row.release is None}
    assert older == {"25.09", "25.11", "26.02", "26.02.01"}
    assert reasons["26.06", "DeepSeekV3", "gb300", 15360] == (
        "deepseek_v3_pretrain_256gpu_gb300_fp8mx_v1_config of 0.5.0 has global batch 2048"
    )


def test_a_figure_of_a_variant_of_the_model_is_none_of_the_model() -> None:
    """`DeepSeekV3 (tokendrop)` beside two figures: the second ran with tokens dropped."""
    assert {row.model for row in rows() if "tokendrop" in row.model} == {
        "DeepSeekV3 (tokendrop)",
        "Qwen3_30B_a3B (tokendrop)",
        "Qwen3_235B_a22B (tokendrop)",
    }


def test_the_command_lists_all_published_figures(capsys: pytest.CaptureFixture[str], home: object) -> None:
    assert run(["recipes", "--engine", "bridge", "--published", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found) == 292
    assert sum(one["recipe"] is not None for one in found) == 161
    assert all((one["recipe"] is None) == bool(one["why_none"]) for one in found)
    assert run(["recipes", "--engine", "bridge", "--published", "--gpu", "GB300", "--model", "deepseek"]) == 0
    out, err = capsys.readouterr()
    assert "published figures" in err and "DeepSeekV3" in out and "none: " in out and "LLAMA" not in out
    assert run(["recipes", "--engine", "bridge", "--published", "--release", "0.6.0"]) == 0
    assert capsys.readouterr().err.startswith("18 published figures")


@pytest.mark.parametrize(
    ("filters", "count"), [({"gpu": "GB200", "model": "qwen3-30b"}, 9), ({"precision": "FP8-CS", "gpu": "r100"}, 1)]
)
def test_filters(filters: dict[str, str], count: int) -> None:
    found = select(**filters)
    assert len(found) == count
    assert {one.gpu for one in found} == {filters["gpu"].lower()}


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert run(["recipes", *words]) == 0
    return capsys.readouterr().out


def test_the_command_lists_and_explains(capsys: pytest.CaptureFixture[str], home: object) -> None:
    listed = printed(capsys, "--engine", "bridge", "--gpu", "gb200", "--model", "qwen3_30b")
    assert "qwen3_30b_a3b_pretrain_8gpu_gb200_fp8mx_config" in listed and "39,936" in listed
    name = "bridge:qwen3_30b_a3b_pretrain_8gpu_gb200_fp8mx_config"
    explained = printed(capsys, name)
    assert "Qwen/Qwen3-30B-A3B" in explained and "published, 26.08" in explained
    record = json.loads(printed(capsys, name, "--json"))
    assert record["layout"]["ep"] == 8 and record["published"][0]["tokens_per_s_per_gpu"] == 39936


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--engine", "bridge", "--gpu", "gb20"], "did you mean 'gb200'?"),
        (["--engine", "bridge", "--model", "deepseek_v3", "--gpu", "h100", "--precision", "nvfp4"], "leave out one"),
        (["--engine", "bridge", "--release", "9"], f"use one of {', '.join(releases())}"),
        (["bridge:llama"], "fp8launch recipes --engine bridge"),
        (["--release", "0.6.0"], "--release needs --engine bridge"),
        (["--published"], "--published needs --engine bridge"),
        (["--engine", "bridge", "--published", "--release", "9"], f"use one of {', '.join(releases())}"),
        (["bridge:llama", "--published"], "leave out the name"),
    ],
)
def test_the_command_refuses_what_is_not_there(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str], home: object
) -> None:
    assert run(["recipes", *words]) == 2
    assert message in capsys.readouterr().err


def test_the_pack_is_filtered_too(capsys: pytest.CaptureFixture[str], home: object) -> None:
    shown = printed(capsys, "--gpu", "gb200", "--precision", "mxfp8")
    assert "deepseek_v3_mxfp8_gb200" in shown and "llama8b" not in shown
    assert run(["recipes", "--gpu", "gb200", "--model", "nothing"]) == 0
    assert "fits these filters" in capsys.readouterr().err


def test_nemotron_3_has_the_parameters_of_its_model_cards() -> None:
    """Nano 31.6 B, 3.6 B of them active with the embedding; Super 120 B and 12 B, Ultra 550 B and 55 B, without MTP."""
    found = {}
    for name in ("nano_pretrain_8gpu_gb300", "super_pretrain_64gpu_gb300", "ultra_pretrain_256gpu_gb300"):
        args = of_recipe(find(f"nemotron_3_{name}_fp8mx_config"))
        found[name.partition("_")[0]] = parameters({**args, "mtp_hybrid_override_pattern": None}, 256)
    assert found["nano"] and found["super"] and found["ultra"]
    assert round(found["nano"].total / 1e9, 1) == 31.6 and round(found["nano"].active / 1e9, 1) == 3.6
    assert found["super"].total == pytest.approx(120e9, rel=0.01) and 12e9 < found["super"].active < 13e9
    assert found["ultra"].total == pytest.approx(550e9, rel=0.01)
    assert found["ultra"].active == pytest.approx(55e9, rel=0.02)


def test_models_of_the_pack_give_recipes_their_shapes() -> None:
    """Every hub model that a performance recipe reads, and whose configuration a model of the pack cites."""
    models = {file.stem: file.read_text() for file in (pack_folder("recipes") / "models").glob("*.yaml")}
    recipes = [recipe for release in releases() for recipe in recipes_of(release).values() if not recipe.library]
    read = {hub for recipe in recipes for hub in recipe.hub}
    cited = {hub for hub in read for text in models.values() if re.search(rf"configuration of {hub}[ .;,]", text)}
    assert cited <= PARTS.keys() <= read
    assert set(PARTS.values()) <= models.keys()
    shape = of_recipe(find("qwen3_next_80b_a3b_pretrain_128gpu_h100_bf16_config"))
    assert (shape["hidden_size"], shape["num_experts"], shape["linear_num_value_heads"]) == (2048, 512, 32)

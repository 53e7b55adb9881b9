"""Models of the pack have as many parameters as their published configurations give, and can be proven."""

from __future__ import annotations

from pathlib import Path

import pytest

from fp8launch.job.prepared import Prepared, prepare
from fp8launch.megatron.model_arithmetic import why_not_counted
from fp8launch.megatron.parameters import parameters
from fp8launch.resources import pack_folder


def run_of(model: str, folder: Path, *overrides: str) -> Prepared:
    recipe = folder / "run.yaml"
    recipe.write_text(
        f"extends: [models/{model}, parts/pretrain, parts/benchmark, parts/distributed_optimizer, precision/bf16, "
        "hardware/h100, moe/alltoall]\n"
        "name: run\nbatch: {micro: 1, global: 64, sequence: 4096}\nresources: {nodes: 8}\n"
    )
    return prepare(str(recipe), overrides)


def with_experts(
    layers: int, dense: int, hidden: int, ffn: int, heads: int, groups: int, experts: int, width: int, shared: int,
    words: int, per_layer: int,
) -> int:  # fmt: skip
    """Return the parameters of a gated model with heads of 128 and `per_layer` biases and norms of queries and keys."""
    attention = 2 * hidden * heads * 128 + 2 * hidden * groups * 128 + per_layer
    mixture = 3 * hidden * (experts * width + shared) + hidden * experts
    return (
        2 * words * hidden + hidden + layers * (attention + 2 * hidden) + dense * 3 * hidden * ffn
        + (layers - dense) * mixture
    )  # fmt: skip


# The sizes in the models' config.json. Both GLM models add a layer of multi-token prediction.
GLM = with_experts(92, 3, 5120, 12288, 96, 8, 160, 1536, 1536, 151552, 12288 + 2 * 1024 + 2 * 128)
GLM_AIR = with_experts(46, 1, 4096, 10944, 96, 8, 128, 1408, 1408, 151552, 12288 + 2 * 1024)
SCOUT = with_experts(48, 0, 5120, 16384, 40, 8, 16, 8192, 8192, 202048, 0)
MAVERICK = with_experts(48, 24, 5120, 16384, 40, 8, 128, 8192, 8192, 202048, 0)


@pytest.mark.parametrize(
    ("model", "total", "billions"),
    [
        ("glm4_5", GLM, 353),
        ("glm4_5_air", GLM_AIR, 107),
        ("llama4_scout", SCOUT, 108),
        ("llama4_maverick", MAVERICK, 401),
    ],
)
def test_parameters_are_those_of_the_published_model(model: str, total: int, billions: int, tmp_path: Path) -> None:
    one = run_of(model, tmp_path, "model.mtp_num_layers=null")
    counted = parameters(one.args.attributes, one.layout.world)
    assert counted is not None
    assert counted.total == total
    assert round(counted.total / 1e9) == billions


@pytest.mark.parametrize("model", ["glm4_5", "glm4_5_air", "llama4_scout", "llama4_maverick"])
def test_the_first_line_of_a_model_states_its_parameters(model: str, tmp_path: Path) -> None:
    one = run_of(model, tmp_path)
    counted = parameters(one.args.attributes, one.layout.world)
    assert counted is not None
    text = (pack_folder("recipes") / "models" / f"{model}.yaml").read_text()
    assert f"{counted.total:,}".replace(",", " ") in text.splitlines()[0]


@pytest.mark.parametrize("model", ["qwen3_next_80b_a3b", "deepseek_v3_2"])
def test_models_with_experimental_attention_are_not_counted_by_guess(model: str, tmp_path: Path) -> None:
    one = run_of(model, tmp_path)
    assert parameters(one.args.attributes, one.layout.world) is None
    assert "linear or sparse attention" in str(why_not_counted(one.args.attributes))

"""CUDA_DEVICE_MAX_CONNECTIONS follows the layout: what Megatron asks for before Blackwell, with no line to remember."""

from __future__ import annotations

from pathlib import Path

import pytest

from fp8launch.check.checker import check
from fp8launch.job.prepared import prepare


@pytest.mark.parametrize(
    ("recipe", "overrides", "connections"),
    [
        ("llama8b_fp8", [], "32"),
        ("llama8b_fp8", ["parallel.tp=2", "parallel.sequence=auto"], "1"),
        ("llama8b_fp8", ["parallel.cp=2"], "1"),
        ("llama8b_fp8", ["parallel.tp=null", "megatron.tensor-model-parallel-size=2"], "1"),
        ("llama8b_fp8", ["parallel.cp=2", "parallel.fsdp=megatron"], "32"),
        ("llama8b_fp8", ["parallel.tp=2", "env.CUDA_DEVICE_MAX_CONNECTIONS=8"], "8"),
        ("llama8b_mxfp8_b200", ["parallel.tp=2"], "32"),
        ("llama70b_tensorwise_h100", [], "1"),
        ("llama8b_bf16", [], "1"),
    ],
)
def test_connections_follow_the_layout(recipe: str, overrides: list[str], connections: str) -> None:
    assert prepare(recipe, overrides).loaded.recipe.environment["CUDA_DEVICE_MAX_CONNECTIONS"] == connections


@pytest.mark.parametrize("gpu", ["h100", "h200"])
def test_tensor_parallelism_on_hopper_needs_no_line_of_its_own(gpu: str, tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(
        f"extends: [models/llama3_8b, precision/tensorwise, hardware/{gpu}, data/mock, parts/benchmark]\nname: mine\n"
        "parallel: {tp: 2, sequence: auto}\nbatch: {micro: 1, global: 128, sequence: 8192}\n"
        "train: {iterations: 50, lr: 1.0e-4, warmup: 0}\n",
        encoding="utf-8",
    )
    result = check(prepare(str(recipe)), layers=("schema", "megatron", "rules"))
    assert [p.code for p in result.problems if p.severity == "error"] == []

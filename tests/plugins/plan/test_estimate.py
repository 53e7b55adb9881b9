"""The step time that `fp8launch estimate` predicts next to a run's memory."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from fp8launch.cli import run

RECIPE = """
extends: [models/llama3_8b, parts/pretrain, parts/distributed_optimizer, precision/tensorwise, hardware/h200]
name: measured
batch: {micro: 1, global: 32, sequence: 8192}
train: {iterations: 20, lr: 3.0e-4, min_lr: 3.0e-5, warmup: 2}
resources: {nodes: 1, gpus_per_node: 4, time: "01:30:00"}
"""


@pytest.fixture
def recipe(write: Callable[[str, str], str]) -> str:
    return write("measured.yaml", RECIPE)


def output(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run(["estimate", *arguments]) == 0
    return capsys.readouterr().out


def test_a_prediction_is_called_one_and_its_terms_add_up(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(output(capsys, recipe, "--json"))
    predicted, throughput = found["predicted"], found["throughput"]
    assert not throughput["known"] and "predicted" in throughput["basis"]
    assert throughput["tokens_per_s_per_gpu"] == predicted["tokens_per_s_per_gpu"]
    assert found["step_time_ms"] == pytest.approx(predicted["step_time_ms"])
    assert sum(term["ms"] for term in found["terms"]) == pytest.approx(predicted["step_time_ms"])
    # The measured run took 4318 ms a step.
    assert predicted["step_time_ms"] == pytest.approx(4318, rel=0.05)
    assert predicted["tflops_per_gpu"] == pytest.approx(predicted["tokens_per_s_per_gpu"] * 5.147e10 / 1e12, rel=1e-3)
    assert predicted["peak_memory_gib"] == pytest.approx(found["memory"]["peak_allocated_mib"] / 1024, rel=1e-4)


def test_what_is_stated_leaves_the_prediction_as_it_is(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    alone = json.loads(output(capsys, recipe, "--json"))
    stated = json.loads(output(capsys, recipe, "--json", "--tokens-per-second-per-gpu", "100"))
    assert stated["predicted"] == alone["predicted"] and stated["terms"] == alone["terms"]
    assert stated["throughput"]["known"]


@pytest.mark.parametrize(
    ("more", "known"),
    [
        ([], True),
        (["--nodes", "4"], True),
        (["--set", "train.iterations=900", "--set", "train.lr=1.0e-5"], True),
        (["--nodes", "4", "--set", "batch.scaling=strong"], False),
        (["--set", "parallel.cp=2"], False),
        (["--set", "precision.recipe=bf16"], False),
        (["--set", "model.num_layers=16"], False),
        (["--set", "batch.sequence=4096"], False),
        (["--gpu", "b200"], False),
    ],
)
def test_a_published_speed_is_only_that_of_its_own_settings(
    capsys: pytest.CaptureFixture[str], more: list[str], known: bool
) -> None:
    """Runs with other settings got the GPU-hours, cost and finish date of the published run."""
    found = json.loads(output(capsys, "llama8b_fp8", *more, "--json"))
    assert found["throughput"]["known"] == known
    if not known:
        assert found["step_time_ms"] == pytest.approx(found["predicted"]["step_time_ms"])


def test_a_recipe_that_extends_another_has_its_published_speed_only_unchanged(
    write: Callable[[str, str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    longer = write("longer.yaml", "extends: llama8b_fp8\nname: longer\ntrain: {iterations: 500}\n")
    smaller = write("smaller.yaml", "extends: llama8b_fp8\nname: smaller\nmodel: {num_layers: 16}\n")
    known = [json.loads(output(capsys, recipe, "--json"))["throughput"]["known"] for recipe in (longer, smaller)]
    assert known == [True, False]


def test_text_shows_the_terms_of_a_step(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, recipe, "--set", "parallel.pp=2")
    for words in (
        "GEMM fc1",
        "tensorwise, 8192 x 28672 x 4096",
        "pipeline bubble",
        "PP communication (NVLink)",
        "GPU-hours",
    ):
        assert words in text


def test_every_supported_gpu_has_a_prediction(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a100", "h100", "h200", "b200", "b300", "gb200", "gb300", "vr200", "r100", "cpu"):
        options = ("--set", "precision.recipe=bf16") if name in ("a100", "cpu") else ()
        found = json.loads(output(capsys, recipe, "--json", "--gpu", name, *options))
        assert (found["predicted"] is None) == (name == "cpu")


def test_a_prediction_for_a_gpu_that_nobody_measured_says_so(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("vr200", "r100"):
        shown = output(capsys, recipe, "--gpu", name)
        assert f"no measured run on {name.upper()}" in shown
        assert "of 268.2 GiB, never measured" in shown and "± 5%" not in shown
        known, unmeasured = (
            json.loads(output(capsys, recipe, "--json", "--gpu", gpu))["predicted"]["uncertainty"]
            for gpu in ("b200", name)
        )
        assert unmeasured > known

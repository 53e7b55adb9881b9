"""What the check says of a run's memory, and what `fp8launch estimate` prints."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from published import listed_values, published_arguments

from fp8launch.check.resolved_run import ResolvedRun, resolve_run
from fp8launch.cli import run
from fp8launch.hardware.gpus import gpu
from fp8launch.job.prepared import prepare
from fp8launch.megatron.schema import load_schema
from fp8launch.plugins.estimate.fit import CODES, problems, run_estimate
from fp8launch.plugins.estimate.memory import MIB
from fp8launch.recipe.write_yaml import write_yaml

ROOT = Path(__file__).parents[3]
PUBLISHED = published_arguments()

# Combines published parts, but nobody published a run of it: with every layer's activations kept, 8B blockwise misses
# 80 GB by a fifth. NVIDIA recomputes five layers in tensorwise FP8 and splits the context in two in bf16.
NEVER_PUBLISHED = {"llama3_8b_h100_fp8_sc"}

RECIPE = """
extends: [models/llama3_8b, parts/pretrain, parts/distributed_optimizer, precision/tensorwise, hardware/h200]
name: memory
batch: {micro: 1, global: 32, sequence: 8192}
train: {iterations: 20, lr: 3.0e-4, min_lr: 3.0e-5, warmup: 2}
resources: {nodes: 1, gpus_per_node: 4, time: "01:30:00"}
"""


def told(recipe: str, *overrides: str) -> tuple[ResolvedRun, list[tuple[str, str]]]:
    seen = resolve_run(prepare(recipe, overrides))
    found = list(problems(seen))
    assert all(CODES[p.code] == p.severity for p in found)
    return seen, [(p.code, f"{p.message} | {p.where} | {p.fix}") for p in found]


@pytest.fixture
def recipe(write: Callable[[str, str], str]) -> str:
    return write("memory.yaml", RECIPE)


# --- problems


def test_a_run_that_fits_has_no_problem(recipe: str) -> None:
    assert told(recipe)[1] == []


def test_a_run_that_cannot_fit_is_an_error_that_says_what_helps(recipe: str) -> None:
    _, [(code, text)] = told(recipe, "batch.micro=4")
    assert code == "does-not-fit" and "will not fit" in text
    assert "140.4 GiB" in text and "activations" in text and "parallel.tp: 2" in text
    assert "--set batch.micro=4" in text


def test_a_run_beyond_the_limit_by_less_than_the_estimate_promises_is_a_warning(recipe: str) -> None:
    """Measured: this one ended out of memory on H200, with 4 % more predicted than there is."""
    _, [(code, text)] = told(recipe, "batch.micro=2")
    assert code == "tight-memory" and "will probably not fit" in text and "batch.micro: 1" in text


def test_estimate_and_check_share_the_limit(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    for gradients in ("fp32", "bf16"):
        words = ("precision.recipe=delayed", "batch.micro=2", "optimizer={exp_avg: bf16, exp_avg_sq: bf16}")
        words = (*words, f"optimizer.grad_reduce={gradients}")
        found = json.loads(output(capsys, recipe, "--json", *(part for word in words for part in ("--set", word))))
        memory = found["memory"]
        assert memory["fits"] == (memory["total_mib"] <= memory["limit_mib"]) == (not told(recipe, *words)[1])
    too_large = output(capsys, recipe, "--set", "precision.recipe=delayed", "--set", "batch.micro=2")
    assert "above the limit of 94%" in too_large and "above the limit" not in output(capsys, recipe)
    small = json.loads(output(capsys, recipe, "--json"))["memory"]
    assert small["fits"] and small["limit_mib"] == pytest.approx(0.94 * small["device_mib"], abs=1)


def test_remedies_are_estimates_of_the_same_model(recipe: str) -> None:
    """The number behind a remedy is what the check would say of the run with that remedy."""
    _, [(_, text)] = told(recipe, "batch.micro=2")
    promised = re.search(r"batch.micro: 1 \(([\d.]+) GiB\)", text)
    assert promised is not None
    found = run_estimate(told(recipe)[0])
    assert found is not None
    assert float(promised[1]) == pytest.approx(found.total / 2**30, abs=0.06)


def test_a_run_at_the_limit_is_a_warning(recipe: str) -> None:
    states = "{grad_reduce: bf16, exp_avg: bf16, exp_avg_sq: bf16, main_grads: bf16}"
    [(code, text)] = told(recipe, "precision.recipe=delayed", "batch.micro=2", f"optimizer={states}")[1]
    assert code == "tight-memory" and "may not fit" in text


def test_a_warning_that_the_recipe_silences_is_not_told_by_the_estimate_either(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    states = "optimizer={grad_reduce: bf16, exp_avg: bf16, exp_avg_sq: bf16, main_grads: bf16}"
    tight = ["--set", "precision.recipe=delayed", "--set", "batch.micro=2", "--set", states]
    assert run(["estimate", recipe, *tight]) == 0
    assert "tight-memory" in capsys.readouterr().err
    assert run(["estimate", recipe, *tight, "--set", "silence.tight-memory=tried there"]) == 0
    assert "tight-memory" not in capsys.readouterr().err


def test_a_larger_gpu_or_a_cpu_settles_it(recipe: str) -> None:
    assert told(recipe, "batch.micro=2", "resources.gpu=b200")[1] == []
    assert told(str(ROOT / "recipes/tiny_cpu.yaml"))[1] == []


def test_the_fullest_pipeline_stage_is_named(recipe: str) -> None:
    overrides = ("parallel.pp=2", "batch.micro=4", "resources.gpu=h100")
    [(code, text)] = told(recipe, *overrides)[1]
    assert code == "does-not-fit" and "on pipeline stage 0" in text


def published(path: Path) -> dict[str, Any]:
    where = re.search(r" on (\d+) (\w+)", path.read_text(encoding="utf-8").partition("\n")[0])
    assert where is not None
    gpus = int(where[1])
    return {
        "name": path.stem,
        "resources": {"gpu": where[2].lower(), "nodes": max(1, gpus // 8), "gpus_per_node": min(8, gpus)},
        "megatron": listed_values(path, load_schema("0.19")),
    }


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.stem)
def test_what_nvidia_published_is_no_error(path: Path, write: Callable[[str, str], str]) -> None:
    """All of them ran, except one: see NEVER_PUBLISHED."""
    codes = {code for code, _ in told(write(f"{path.stem}.yaml", write_yaml(published(path))))[1]}
    assert ("does-not-fit" in codes) == (path.stem in NEVER_PUBLISHED)


# --- the command


def output(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run(["estimate", *arguments]) == 0
    return capsys.readouterr().out


def test_json_has_every_term(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(output(capsys, recipe, "--json"))
    memory = found["memory"]
    assert found["parameters"]["total"] == 8_030_261_248
    assert sum(term["bytes"] for term in memory["terms"]) / MIB == pytest.approx(memory["total_mib"], abs=1)
    assert memory["peak_allocated_mib"] == pytest.approx(107804, rel=0.002) and memory["fits"]
    assert found["flop_per_token"] == pytest.approx(5.147e10, rel=1e-3)
    assert found["tokens"] == 20 * 32 * 8192
    assert found["gpu_hours_at_most"] == 4 * 1.5
    again = ("survive.attempts=3", "checkpoint.dir=c", "checkpoint.interval=10")
    found = json.loads(output(capsys, recipe, "--json", *(word for one in again for word in ("--set", one))))
    assert found["gpu_hours_at_most"] == 3 * 4 * 1.5


def test_gpu_hours_rest_on_what_is_stated(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(output(capsys, recipe, "--json", "--tokens-per-second-per-gpu", "15178"))
    assert found["throughput"] == {
        "tokens_per_s_per_gpu": 15178.0,
        "basis": "stated by --tokens-per-second-per-gpu",
        "known": True,
    }
    # The measured run took 4318 ms a step.
    assert found["step_time_ms"] == pytest.approx(4318, rel=0.001)
    assert found["gpu_hours"] == pytest.approx(20 * 4.318 * 4 / 3600, rel=0.001)


def test_the_time_limit_does_not_belong_to_another_number_of_tokens(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    speed = ("--tokens-per-second-per-gpu", "15178")
    assert "GPU-hours at most" in output(capsys, recipe, *speed)
    assert "GPU-hours at most" not in output(capsys, recipe, *speed, "--tokens", "15e12")
    found = json.loads(output(capsys, recipe, *speed, "--tokens", "15e12", "--json"))
    assert found["gpu_hours"] == pytest.approx(15e12 / 15178 / 3600) and found["gpu_hours_at_most"] is None


def test_a_time_limit_that_is_too_short_for_the_steps_says_so(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    speed = ("--tokens-per-second-per-gpu", "15178")
    assert "less than the steps need" not in output(capsys, recipe, *speed)
    assert "less than the steps need" in output(capsys, recipe, *speed, "--set", "train.iterations=20000")


def test_a_run_that_leaves_early_costs_less(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(output(capsys, recipe, "--json", "--set", "megatron.exit_interval=5"))
    assert (found["steps"], found["tokens"]) == (5, 5 * 32 * 8192)
    assert json.loads(output(capsys, recipe, "--json", "--set", "megatron.exit_interval=100"))["steps"] == 20


def test_a_partial_last_batch_is_no_step(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    """As in Megatron's `update_train_iters`; it was counted as a whole one."""
    samples = ("--set", "train.iterations=null", "--set", "train.warmup=null", "--set", "megatron.train_samples=100")
    assert json.loads(output(capsys, recipe, "--json", *samples))["steps"] == 100 // 32


def test_another_gpu_and_more_nodes(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(output(capsys, recipe, "--json", "--gpu", "h100", "--nodes", "2"))
    assert found["gpu"] == "h100" and found["gpus"] == 8 and not found["memory"]["fits"]
    assert found["memory"]["device_mib"] == round(gpu("h100").memory_gib * 1024)


def test_text_shows_parameters_memory_and_cost(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, recipe, "--set", "parallel.pp=2")
    for words in ("8,030,261,248", "stage 1", "activations", "2 micro batches in flight", "█", "GPU-hours"):
        assert words in text


def test_what_is_not_counted_is_said(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["estimate", recipe, "--set", "megatron.hybrid_layer_pattern=M*MG"]) == 0
    shown = capsys.readouterr()
    assert "are not estimated" in shown.err and "tokens per step" in shown.out


def test_every_supported_gpu_can_be_asked(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a100", "h100", "h200", "b200", "b300", "gb200", "gb300", "vr200", "r100", "cpu"):
        options = ("--set", "precision.recipe=bf16") if name in ("a100", "cpu") else ()
        found = json.loads(output(capsys, recipe, "--json", "--gpu", name, *options))
        assert (found["memory"] is None) == (name == "cpu")

"""`diff`: every difference once, with what it touches."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from fp8launch.cli import run


def diff(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, dict[str, Any]]:
    assert run(["diff", *arguments, "--json"]) == 0
    return {f"{d['part']}.{d['name']}": d for d in json.loads(capsys.readouterr().out)}


def test_a_recipe_does_not_differ_from_itself(capsys: pytest.CaptureFixture[str], home: object) -> None:
    assert diff(capsys, "llama8b_fp8", "llama8b_fp8") == {}


def test_precision_touches_numerics_and_layout_speed(capsys: pytest.CaptureFixture[str], home: object) -> None:
    found = diff(capsys, "llama8b_fp8", "llama8b_bf16")
    assert (
        found["arguments.fp8_recipe"] | {"a": "tensorwise", "b": None, "effect": "numerics"}
        == found["arguments.fp8_recipe"]
    )
    assert found["topology.dp"]["effect"] == "speed"
    assert found["environment.CUDA_DEVICE_MAX_CONNECTIONS"]["effect"] == "speed"
    assert found["slurm.job-name"]["effect"] == "neutral"


@pytest.mark.parametrize(
    ("flag", "effect"),
    [
        ("lr", "numerics"),
        ("seed", "numerics"),
        ("weight_decay", "numerics"),
        ("grad_reduce_in_bf16", "numerics"),
        ("log_interval", "neutral"),
        ("save_interval", "neutral"),
        ("ddp_bucket_size", "speed"),
        ("recompute_granularity", "speed"),
        ("tp_comm_overlap", "speed"),
        ("cuda_graph_impl", "speed"),
        ("tensor_model_parallel_size", "speed"),
        ("a_flag_that_nobody_knows", "numerics"),
    ],
)
def test_what_a_flag_touches(flag: str, effect: str) -> None:
    from fp8launch.plugins.diff.differences import _of_flag

    assert _of_flag(flag) == effect


@pytest.mark.parametrize(
    ("variable", "effect"),
    [
        ("NVTE_NVFP4_4OVER6", "numerics"),
        ("NVTE_NVFP4_DISABLE_RHT", "numerics"),
        ("NVTE_BACKWARD_OVERRIDE", "numerics"),
        ("NVTE_A_SWITCH_OF_THE_NEXT_RELEASE", "numerics"),
        ("NVIDIA_TF32_OVERRIDE", "numerics"),
        ("NVTE_FWD_LAYERNORM_SM_MARGIN", "speed"),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "speed"),
        ("NVTE_DEBUG_LEVEL", "neutral"),
        ("NCCL_DEBUG", "neutral"),
    ],
)
def test_what_a_variable_touches(
    capsys: pytest.CaptureFixture[str], write: Callable[[str, str], str], variable: str, effect: str
) -> None:
    recipes = [write(f"{value}.yaml", f"extends: tiny_cpu\nname: r\nenv: {{{variable}: {value}}}\n") for value in "01"]
    assert diff(capsys, *recipes)[f"environment.{variable}"]["effect"] == effect


def test_another_program_differs(capsys: pytest.CaptureFixture[str], write: Callable[[str, str], str]) -> None:
    text = "extends: tiny_cpu\nname: r\nlaunch: {{script: {script}, health_check: {check}}}\n"
    recipes = [write("a.yaml", text.format(script="/m/a.py", check="true")),
               write("b.yaml", text.format(script="/m/b.py", check="false"))]  # fmt: skip
    found = diff(capsys, *recipes)
    assert (found["launch.script"]["b"], found["launch.script"]["effect"]) == ("/m/b.py", "numerics")
    assert found["launch.health_check"]["effect"] == "neutral"


def test_a_scripts_own_arguments_count(capsys: pytest.CaptureFixture[str], write: Callable[[str, str], str]) -> None:
    text = "extends: tiny_cpu\nname: r\nlaunch: {{script: /m/train.py, arguments: [--my-flag, {value}]}}\n"
    recipes = [write(f"{value}.yaml", text.format(value=value)) for value in (3, 4)]
    found = diff(capsys, *recipes)
    assert found["arguments.my_flag"]["a"] == "3"
    assert found["arguments.my_flag"]["b"] == "4"

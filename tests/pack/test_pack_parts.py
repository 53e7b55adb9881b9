"""Parts are what their names say, and models have the published number of parameters."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from pack_support import HEADLINE, MODELS, PACK, STUDIES, long_run, recipe_of, runs

from fp8launch.check.resolved_run import resolve_run
from fp8launch.cluster.images import catalogue
from fp8launch.hardware.gpus import GPUS
from fp8launch.job.prepared import prepare
from fp8launch.megatron.model_arithmetic import why_not_counted
from fp8launch.megatron.parameters import parameters
from fp8launch.recipe.load import load_recipe


def header(model: str) -> str:
    text = (PACK / "models" / f"{model}.yaml").read_text(encoding="utf-8")
    return " ".join(line[1:].strip() for line in text.splitlines() if line.startswith("#"))


@pytest.mark.parametrize("model", MODELS)
def test_a_model_has_the_published_number_of_parameters(model: str, write: Callable[[str, str], str]) -> None:
    """Digit for digit where the published configuration gives an exact count, else to the published rounding."""
    prepared = prepare(write("one.yaml", recipe_of([f"models/{model}", "parts/pretrain", "precision/bf16"])))
    run = resolve_run(prepared)
    counted = parameters({**run.defaults, **run.given}, 8)
    if why_not_counted({**run.defaults, **run.given}):
        assert counted is None
        return
    assert counted is not None
    exact = re.search(r"(\d{1,3}(?: \d{3}){3,}) parameters", header(model))
    if exact:
        assert counted.total == int(exact[1].replace(" ", ""))
        return
    stated = [float(number) for number in re.findall(r"([\d.]+) billion", header(model))]
    total = sum(stated[:2]) if model == "deepseek_v3" else stated[0]  # its prediction layer is counted apart
    assert counted.total / 1e9 == pytest.approx(total, rel=0.002)


@pytest.mark.parametrize("model", MODELS)
def test_a_model_names_its_source(model: str) -> None:
    assert re.search(r"Source: \S", header(model))


@pytest.mark.parametrize("data", sorted(f.stem for f in (PACK / "data").glob("*.yaml")))
@pytest.mark.parametrize("optimizer", sorted(f.stem for f in (PACK / "optimizer").glob("*.yaml")))
def test_a_long_run_loads_what_it_saves(optimizer: str, data: str, write: Callable[[str, str], str]) -> None:
    run = prepare(write("one.yaml", long_run(optimizer, data)))
    assert run.args.values["save"] == run.args.values["load"] == "checkpoints"
    assert run.args.values["exit_signal_handler"] is True


def test_optimizer_levels_hold_what_they_say(write: Callable[[str, str], str]) -> None:
    """Bytes of optimizer states for each parameter: 12 in fp32 with the master copy, and what each level leaves."""
    width = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
    left = {}
    for file in (PACK / "optimizer").glob("*.yaml"):
        level = write("one.yaml", recipe_of(["precision/tensorwise", f"optimizer/{file.stem}"]))
        states = load_recipe(level).recipe.optimizer
        left[file.stem] = sum(width[s or "fp32"] for s in (states.exp_avg, states.exp_avg_sq, states.main_params))
    assert left == {"bf16_moments": 8, "msamp_o1": 12, "msamp_o2": 7, "msamp_o3": 5}


@pytest.mark.parametrize("file", sorted((PACK / "hardware").glob("*.yaml")), ids=lambda file: file.stem)
def test_hardware_is_what_its_name_says(file: Path) -> None:
    need = load_recipe(str(file)).recipe.resources
    assert need.gpu == file.stem
    assert need.gpu in GPUS
    if need.gpu != "cpu":
        # A GB200 or GB300 NVL72 tray has 4 GPUs, every other node 8.
        assert need.gpus_per_node == (4 if need.gpu.startswith("gb") else 8)


@pytest.mark.parametrize("file", sorted((PACK / "precision").glob("*.yaml")), ids=lambda file: file.stem)
def test_precision_is_what_its_name_says(file: Path) -> None:
    precision = load_recipe(str(file)).recipe.precision
    assert precision is not None and precision.recipe == file.stem


def test_low_precision_states_meet_only_the_scaling_that_trains_them() -> None:
    """Seen on H200 (Megatron 0.19.2, TE 2.20.2), after the validators had passed: with FP8 weights, an fp32 master
    copy and states below fp32 fail in the first step of delayed scaling, an FP16 master copy with other scalings."""
    for file in [*HEADLINE, *STUDIES]:
        for run in runs(file):
            values = run.args.values
            if "use_precision_aware_optimizer" in values and "fp8_param_gather" in values:
                half = values.get("main_params_dtype") == "fp16"
                assert (values["fp8_recipe"] == "delayed") == half, file


@pytest.mark.parametrize("file", sorted((PACK / "images").glob("*.yaml")), ids=lambda file: file.stem)
def test_an_image_part_says_what_the_catalogue_says(file: Path) -> None:
    recipe = load_recipe(str(file)).recipe
    known = catalogue()[str(recipe.container.image)]
    for package in ("megatron", "transformer_engine", "cuda"):
        stated = getattr(recipe.software, package)
        assert known[package] == stated or known[package].startswith(f"{stated}."), package
    assert recipe.software.megatron == known["megatron"], "the patch level decides what is legal"

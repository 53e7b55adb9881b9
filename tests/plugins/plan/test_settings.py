"""Settings that are no arguments of Megatron and change a predicted step: environment variables, `launch.config`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fp8launch.check.resolved_run import resolve_run
from fp8launch.cli import run
from fp8launch.cluster.profile import load_cluster
from fp8launch.job.prepared import prepare
from fp8launch.plugins.plan.plans import PlanRequest, plan_layouts
from fp8launch.plugins.plan.settings import CUTLASS_GROUPED_GEMM, timed_arguments
from fp8launch.plugins.plan.step_time import StepTime, step_time

RECIPES = Path(__file__).resolve().parents[3] / "benchmarks" / "h200" / "recipes"
EXPERTS = str(RECIPES / "qwen3_30b_6layers_x1.yaml")
TUNED = str(RECIPES / "qwen3_30b_6layers_x1_tuned.yaml")
GROUPED = f"env.{CUTLASS_GROUPED_GEMM}=1"
NOT_GROUPED = f"env.{CUTLASS_GROUPED_GEMM}=null"
BALANCED = "megatron.moe_router_force_load_balancing=true"


def predicted(recipe: str, *overrides: str) -> StepTime:
    found = resolve_run(prepare(recipe, overrides))
    step = step_time(timed_arguments(found), found.layout.world, found.layout.global_batch, found.gpu)
    assert step is not None
    return step


def gain(recipe: str, *overrides: str) -> float:
    return predicted(recipe, *overrides, NOT_GROUPED).ms / predicted(recipe, *overrides, GROUPED).ms


@pytest.mark.parametrize(
    ("recipe", "overrides", "measured"),
    [
        (TUNED, ("batch.global=16",), 1.153),
        (
            EXPERTS,
            (
                *("model.num_layers=2", "batch.micro=2", "resources.gpu=h100", BALANCED),
                "launch.config.cross_entropy_fusion_impl=te",
            ),
            1.205,
        ),
    ],
    ids=["H200", "H100"],
)
def test_grouped_gemms_are_worth_what_was_measured(recipe: str, overrides: tuple[str, ...], measured: float) -> None:
    assert gain(recipe, *overrides) == pytest.approx(measured, rel=0.04)


@pytest.mark.parametrize(
    "overrides",
    [
        ("precision.recipe=tensorwise", "precision.format=hybrid"),
        ("resources.gpu=b200",),
        ("resources.gpu=a100",),
        ("model.moe_ffn_hidden_size=800",),
    ],
    ids=["FP8", "Blackwell", "Ampere", "odd width"],
)
def test_grouped_gemms_change_nothing_where_transformer_engine_lacks_them(overrides: tuple[str, ...]) -> None:
    assert gain(EXPERTS, *overrides) == 1
    assert predicted(EXPERTS, f"env.{CUTLASS_GROUPED_GEMM}=0").ms == predicted(EXPERTS).ms


def test_grouped_gemms_do_not_change_a_step_that_waits_for_no_host() -> None:
    assert gain(EXPERTS, "batch.sequence=16384", "batch.micro=4", BALANCED) == 1


def test_weight_gradients_still_wait_for_the_host() -> None:
    """With one sequence, the host limits both passes. Half of the launches of a backward pass remain."""
    grouped = predicted(EXPERTS, BALANCED, GROUPED)
    assert any(term.name == "host" for term in grouped.terms)


def test_estimate_and_plan_know_the_variable(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["estimate", TUNED, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["predicted"]["step_time_ms"] == predicted(TUNED, GROUPED).ms
    plans = [plan_layouts(PlanRequest(TUNED, (setting,), top=1)) for setting in (NOT_GROUPED, GROUPED)]
    plain, grouped = (found.found.layouts[0].step.ms for found in plans)
    assert grouped < 0.95 * plain
    own = plans[1].own
    assert own is not None and own.step.ms == predicted(TUNED, GROUPED).ms


def test_variables_of_the_cluster_profile_count_like_the_recipe_s(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "site.yaml"
    file.write_text(f"env: {{{CUTLASS_GROUPED_GEMM}: 1, CUDA_DEVICE_MAX_CONNECTIONS: 1}}\n")
    assert run(["estimate", TUNED, "--cluster", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["predicted"]["step_time_ms"] == predicted(TUNED, GROUPED).ms
    profile = load_cluster(str(file))
    found = plan_layouts(PlanRequest(TUNED, top=1, cluster=profile))
    assert found.found.layouts[0].step.ms == plan_layouts(PlanRequest(TUNED, (GROUPED,), top=1)).layouts[0].step.ms
    # Tensor parallelism on Hopper needs the variable that this profile sets.
    split = ("env.CUDA_DEVICE_MAX_CONNECTIONS=null", "parallel.tp=2", "megatron.tp_comm_overlap=null")
    words = [word for one in split for word in ("--set", one)]
    assert run(["estimate", "llama70b_tensorwise_h100", *words]) == 0
    assert "`check` refuses this run" in capsys.readouterr().err
    assert run(["estimate", "llama70b_tensorwise_h100", *words, "--cluster", str(file)]) == 0
    assert "`check` refuses this run" not in capsys.readouterr().err
    request = PlanRequest("llama70b_tensorwise_h100", split[:1], top=1, cluster=profile)
    assert not any("CUDA_DEVICE_MAX_CONNECTIONS" in why for why in plan_layouts(request).refused)


def test_fields_of_launch_config_count_like_flags() -> None:
    recipe = str(RECIPES / "llama3b_x1.yaml")
    one_kernel = predicted(recipe, "launch.config.fused_single_qkv_rope=true")
    assert 1.005 < predicted(recipe).ms / one_kernel.ms < 1.02
    # A script of the user's own does not read them.
    scripted = ("launch.script=train.py", "launch.config.fused_single_qkv_rope=true")
    assert predicted(recipe, *scripted).ms == predicted(recipe, "launch.script=train.py").ms

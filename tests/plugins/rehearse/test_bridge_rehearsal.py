"""Recipes of Megatron-Bridge, rehearsed through Megatron-LM's command line on a machine without Bridge."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import pytest

from fp8launch.check.checker import check, check_all
from fp8launch.check.resolved_run import resolve_run
from fp8launch.cli import run
from fp8launch.cluster.profile import Cluster
from fp8launch.diagnostics import MACHINE_LACKS, UserError
from fp8launch.engines.base import NotRehearsable, StepArguments
from fp8launch.hardware.gpus import GPUS
from fp8launch.job.prepared import Prepared, prepare
from fp8launch.megatron.flag_problems import check_values
from fp8launch.megatron.schema import load_schema
from fp8launch.plugins.bridge.fields import fields_of
from fp8launch.plugins.bridge.index import recipes_of, releases
from fp8launch.plugins.bridge.injob import bridge_release
from fp8launch.plugins.rehearse import rehearse
from fp8launch.plugins.rehearse.layer import LAYER, plan_of, with_rehearsal
from fp8launch.plugins.rehearse.rehearse import roles_of
from fp8launch.plugins.rehearse.shrink import shrink

needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")

LLAMA = "bridge:llama3_8b_pretrain_8gpu_h100_fp8cs_config"
QWEN = "bridge:qwen3_30b_a3b_pretrain_64gpu_h100_bf16_config"
RECIPES = sorted(
    name
    for name, each in recipes_of(releases()[-1]).items()
    if each.task == "pretrain" and not each.library and each.gpu in GPUS
)


@pytest.fixture(autouse=True)
def without_bridge(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without Bridge, also where PYTHONPATH names its source: `test_bridge_own_code` has the other."""
    monkeypatch.setattr(bridge_release, "installed", lambda: None)


def step(one: Prepared) -> StepArguments:
    return one.engine.rehearsal(one.args, one.layout, one.loaded)


def flags(name: str, *sets: str) -> Mapping[str, Any]:
    return step(prepare(name, sets)).args.values


@pytest.mark.parametrize("name", RECIPES[::9])
def test_every_setting_of_a_recipe_is_a_flag_or_a_field_of_megatrons(name: str) -> None:
    one = prepare(f"bridge:{name}")
    try:
        found = step(one)
    except NotRehearsable as reason:
        assert "hidden_size" not in one.args.attributes or "models" in str(reason)
        return
    schema = load_schema(found.args.version)
    assert check_values(found.args.values, schema) == []
    known = fields_of(releases()[-1])
    fields = {*schema.config_only, *known["model"], *known["ddp"], *known["optimizer"]}
    assert found.config.keys() - fields == set()
    # The sizes and the layout go through as they are.
    for name_ in ("num_layers", "hidden_size", "num_attention_heads", "num_experts", "tensor_model_parallel_size"):
        assert found.args.attributes.get(name_, one.args.attributes.get(name_)) == one.args.attributes.get(name_)


def test_what_bridge_fills_in_is_there() -> None:
    found = flags(LLAMA)
    assert found["overlap_grad_reduce"] is True and found["overlap_param_gather"] is True
    assert (found["fp8_format"], found["fp8_recipe"]) == ("hybrid", "tensorwise")
    assert "sequence_parallel" not in found and "tp_comm_overlap" not in found
    # Its command line refuses this value, which Megatron-Core takes.
    assert "cross_entropy_fusion_impl" not in found
    assert step(prepare(LLAMA)).config["cross_entropy_fusion_impl"] == "te"


def test_layers_are_offloaded_where_the_switch_is_on() -> None:
    name = "bridge:gpt_oss_20b_pretrain_8gpu_gb300_nvfp4_config"
    assert prepare(name).args.attributes["cpu_offloading_num_layers"] == 95
    assert "cpu_offloading_num_layers" not in flags(name)
    assert flags(name, "model.cpu_offloading=true")["cpu_offloading_num_layers"] == 95


def test_stages_and_graphs_have_megatron_lms_spelling() -> None:
    found = flags("bridge:deepseek_v3_pretrain_256gpu_gb200_fp8mx_config")
    assert found["cuda_graph_impl"] == "full_iteration" and "cuda_graph_modules" not in found
    stages = found["pipeline_model_parallel_layout"]
    assert isinstance(stages, str) and stages.count("t") == 61 and stages.endswith("mL")
    assert "num_virtual_stages_per_pipeline_rank" not in found


def test_fields_without_a_flag_reach_the_processes() -> None:
    one = prepare(QWEN, ["model.fused_single_qkv_rope=true"])
    plan = plan_of(one, resolve_run(one), Cluster())
    assert json.loads(plan.environment["FP8LAUNCH_CONFIG"])["fused_single_qkv_rope"] is True
    assert plan.translated


@needs_torch
@pytest.mark.train
def test_a_recipe_of_nvidia_passes_and_says_what_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check", LLAMA, "--rehearse", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["rehearsal"]
    assert [role["result"] for role in found["roles"]] == ["passed", "passed"]
    assert found["not_rehearsed"][0].startswith("Megatron-Bridge's own code") and found["program"] is None
    assert found["not_rehearsed"][0].endswith(": not in this Python")


@needs_torch
@pytest.mark.train
def test_what_megatron_core_refuses_is_said_in_bridges_names(
    unlearned: None, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "--set",
        "model.moe_router_load_balancing_type=quantile_balancing",
        "--set",
        "model.moe_router_fusion=true",
    ]
    assert run(["check", QWEN, *words, "--rehearse"]) == 1
    shown = capsys.readouterr().out
    assert (
        "Quantile balancing routing does not support moe_router_fusion. (megatron/core/transformer/moe/router.py:"
        in shown
    )
    assert "fix: change moe_router_fusion" in shown


@needs_torch
@pytest.mark.train
def test_megatron_lms_command_line_is_no_verdict_on_bridge() -> None:
    without = ["ddp.use_distributed_optimizer=false", "optimizer.use_distributed_optimizer=false"]
    one = prepare(LLAMA, [*without, "ddp.overlap_param_gather=true"])
    [result] = with_rehearsal([one], check_all([one], layers=("schema",)), Cluster())
    assert "Megatron-LM's command line, which the run does not use, refuses it" in result.layers[LAYER]
    assert result.exit_code == MACHINE_LACKS


def test_what_only_the_command_line_refuses_goes_past_it() -> None:
    one = step(prepare("bridge:deepseek_v3_pretrain_1024gpu_h100_fp8sc_config"))
    assert "overlap_param_gather" not in one.args.values and one.config["overlap_param_gather"] is True
    muon = step(prepare("bridge:kimi_k2_pretrain_1024gpu_h100_fp8cs_config"))
    assert "fp8_param_gather" not in muon.args.values and muon.config["fp8_param_gather"] is True
    assert flags(LLAMA)["overlap_param_gather"] is True


def test_nvidias_fp4_recipe_that_gathers_parameters_passes_the_check() -> None:
    """The optimizer's recipe of FP8 is that of MixedPrecisionConfig, tensorwise, unless the recipe states one."""
    found = check(prepare("bridge:deepseek_v3_pretrain_256gpu_gb300_nvfp4_config"), layers=("rules",))
    assert not [problem for problem in found.problems if problem.severity == "error"]


@needs_torch
@pytest.mark.train
@pytest.mark.parametrize(("run_of", "roles"), [("256gpu_gb200_fp8mx", 2), ("256gpu_gb300_nvfp4", 1)])
def test_a_recipe_with_muon_passes_in_a_pipeline_with_experts(
    run_of: str, roles: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks of Megatron's layer-wise optimizer own whole weights, and gather different numbers of elements.

    It reads the values of weights in FP4, which Transformer Engine moves to the GPU first, on each rank alike.
    """
    monkeypatch.setattr(rehearse, "roles_of", lambda layout: roles_of(layout)[-roles:])
    one = prepare(f"bridge:kimi_k2_pretrain_{run_of}_config")
    [result] = with_rehearsal([one], check_all([one], layers=("schema",)), Cluster())
    assert result.ok and result.layers[LAYER] == "ran", result.problems
    assert "Muon's iterations" in result.extra["rehearsal"].not_rehearsed


@needs_torch
@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("qwen3_vl_30b_a3b_pretrain_16gpu_h100_bf16_config", "models with a vision encoder of Bridge cannot be"),
        ("wan_14b_pretrain_32gpu_h100_bf16_config", "diffusion models of Bridge cannot be rehearsed"),
    ],
)
def test_a_model_that_cannot_be_built_is_not_passed_over(
    name: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["check", f"bridge:{name}", "--rehearse"]) == MACHINE_LACKS
    shown = capsys.readouterr().err
    assert f"note: layer rehearsal not run: {why}" in shown
    assert "1 without a verdict" in shown


def test_every_model_that_the_gpt_entry_builds_has_a_shape() -> None:
    """29 of the recipes for known GPUs had none."""
    why = Counter()
    for name in RECIPES:
        try:
            step(prepare(f"bridge:{name}"))
        except UserError:
            why["a batch that its replicas do not divide"] += 1
        except NotRehearsable as exc:
            why[str(exc).split(" of Bridge")[0].split(" with ")[-1]] += 1
    assert why == {
        "a batch that its replicas do not divide": 2,
        "a vision encoder": 73,
        "diffusion models": 2,
        "DeepSeek-V4's attention, which Megatron-Core 0.19 lacks,": 5,
    }


@needs_torch
@pytest.mark.train
def test_linear_attention_passes_with_a_predicted_token() -> None:
    """Megatron-LM builds no such layer, Bridge does; fewer heads keep it in a rehearsal's memory."""
    one = prepare("bridge:qwen3_next_80b_a3b_pretrain_128gpu_h100_fp8cs_config")
    [result] = with_rehearsal([one], check_all([one], layers=("schema",)), Cluster())
    assert result.ok and result.layers[LAYER] == "ran", result.problems
    assert "flash-linear-attention's kernels" in result.extra["rehearsal"].not_rehearsed
    small = shrink(step(one).args.values, one.layout).values
    assert (small["linear_num_key_heads"], small["linear_num_value_heads"]) == (8, 16)


@needs_torch
@pytest.mark.train
def test_memory_of_nccl_needs_no_compiler() -> None:
    """Megatron compiles an allocator for `nccl_ub`; what it does is named as not rehearsed."""
    one = prepare(LLAMA, ["ddp.nccl_ub=true", "env.PYTORCH_CUDA_ALLOC_CONF="])
    [result] = with_rehearsal([one], check_all([one], layers=("schema",)), Cluster())
    assert result.ok and result.layers[LAYER] == "ran", result.problems
    assert "NCCL user buffers" in result.extra["rehearsal"].not_rehearsed

"""A step of Megatron's and Transformer Engine's own Python code, as any rank of a run, without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8launch.check.checker import CheckResult, check_all
from fp8launch.cluster.profile import Cluster
from fp8launch.job.prepared import prepare
from fp8launch.plugins.rehearse.layer import LAYER, with_rehearsal
from fp8launch.plugins.rehearse.rehearse import roles_of
from fp8launch.plugins.rehearse.shrink import BLOCK, residue, shrink

needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")

DENSE = """
name: dense
extends: [models/llama3_8b, parts/pretrain, parts/distributed_optimizer, precision/tensorwise, hardware/h200]
precision: {param_gather: true}
batch: {micro: 1, global: 4, sequence: 8192}
train: {iterations: 3, lr: 3.0e-4, min_lr: 3.0e-5, warmup: 1}
resources: {nodes: 1, gpus_per_node: 2}
"""


# What needs stand-ins of its own: NVFP4's gathers over tensor parallel ranks, and grouped tensors of experts.
NVFP4 = """
name: nvfp4
extends: [models/llama3_8b, parts/pretrain, parts/distributed_optimizer, precision/nvfp4, hardware/gb300]
software: {megatron: "0.18", transformer_engine: "2.16"}
parallel: {tp: 2, sequence: true}
batch: {micro: 1, global: 4, sequence: 8192}
train: {iterations: 3, lr: 3.0e-4, min_lr: 3.0e-5, warmup: 1}
resources: {nodes: 1, gpus_per_node: 4}
"""
GROUPED = """
name: grouped
extends: [models/qwen3_30b_a3b, parts/pretrain, parts/distributed_optimizer, precision/mxfp8, hardware/gb200,
          moe/hybridep, moe/full_iteration_graph]
software: {megatron: "0.18", transformer_engine: "2.16"}
parallel: {ep: 4}
batch: {micro: 1, global: 4, sequence: 4096}
train: {iterations: 3, lr: 3.0e-4, min_lr: 3.0e-5, warmup: 1}
resources: {nodes: 1, gpus_per_node: 4}
"""
# Experts with biases, in the products of grouped tensors that Transformer Engine 2.20 has with cuBLAS 13.4.
BIASED = GROUPED.replace("qwen3_30b_a3b", "gpt_oss_120b").replace(
    'software: {megatron: "0.18", transformer_engine: "2.16"}',
    'software: {megatron: "0.19", transformer_engine: "2.20", cuda: "13.2.1"}\n'
    "env: {NVTE_CUTEDSL_FUSED_GROUPED_MLP: 1}",
)
# FSDP shows zeros as weights: without balanced routing every token chose the same experts, and the last rank got none.
SHARDED = """
name: sharded
extends: [models/gpt_oss_120b, parts/pretrain, hardware/b300, precision/tensorwise, parts/megatron_fsdp, moe/base]
software: {megatron: "0.19", transformer_engine: "2.20"}
parallel: {ep: 8}
model: {num_layers: 4}
megatron: {moe_router_force_load_balancing: null, moe_router_fusion: null}
batch: {micro: 4, global: 256, sequence: 2048}
train: {iterations: 3, lr: 3.0e-4, min_lr: 3.0e-5, warmup: 1}
resources: {nodes: 2, gpus_per_node: 8}
"""
# torch's own FSDP, whose mesh is on the host here.
SHARDED_BY_TORCH = """
name: sharded_by_torch
extends: [models/llama3_8b, parts/pretrain, hardware/h200, precision/delayed]
parallel: {fsdp: torch_fsdp2}
model: {untie_embeddings_and_output_weights: true}
megatron: {no_gradient_accumulation_fusion: true}
batch: {micro: 1, global: 4, sequence: 2048}
train: {iterations: 3, lr: 3.0e-4, min_lr: 3.0e-5, warmup: 1}
resources: {nodes: 1, gpus_per_node: 2}
"""
# Found by its name in the package of emerging optimizers, as Muon is not.
LION = DENSE.replace("parts/distributed_optimizer, ", "").replace("param_gather: true", "param_gather: false")
LION += "megatron: {optimizer: lion}\n"
# Graphs of layers whose outputs Megatron before 0.19 marks as needing gradients or not.
CAPTURED = f"""{DENSE}
software: {{megatron: "0.18", transformer_engine: "2.16"}}
megatron: {{cuda_graph_impl: local, te_rng_tracker: true}}
env: {{NCCL_GRAPH_REGISTER: 0}}
"""


def rehearsed(recipe: str) -> CheckResult:
    run = prepare(recipe)
    return with_rehearsal([run], check_all([run]), Cluster())[0]


@needs_torch
@pytest.mark.train
def test_a_run_that_trains_on_gpus_passes(write: Callable[[str, str], str]) -> None:
    result = rehearsed(write("r.yaml", DENSE))
    assert result.ok, result.problems
    assert result.layers[LAYER] == "ran"


@needs_torch
@pytest.mark.train
@pytest.mark.parametrize(
    "recipe",
    [
        NVFP4,
        GROUPED,
        BIASED,
        SHARDED,
        SHARDED_BY_TORCH,
        LION,
        CAPTURED,
        CAPTURED.replace("local", "transformer_engine"),
    ],
    ids=["nvfp4", "grouped", "biased", "sharded", "sharded by torch", "lion", "captured", "captured by TE"],
)
def test_a_run_that_no_machine_here_has_gpus_for_passes(
    write: Callable[[str, str], str], monkeypatch: pytest.MonkeyPatch, recipe: str
) -> None:
    monkeypatch.setattr("fp8launch.plugins.rehearse.rehearse.roles_of", lambda layout: roles_of(layout)[:1])
    run = prepare(write("r.yaml", recipe))
    [result] = with_rehearsal([run], check_all([run], layers=("schema",)), Cluster())
    assert result.ok, result.problems
    assert result.layers[LAYER] == "ran"


@needs_torch
@pytest.mark.train
def test_weights_on_a_meta_device_are_missed_where_nothing_fills_them(write: Callable[[str, str], str]) -> None:
    """The gate of shared experts was made on the host, where torch's functions were replaced by others."""
    recipe = SHARDED.replace("gpt_oss_120b", "deepseek_v3").replace("ep: 8", "ep: 16")
    recipe = recipe.replace(
        "model: {num_layers: 4}", "model: {num_layers: 3, moe_layer_freq: '[0]+[1]*2', moe_shared_expert_gate: true}"
    )
    run = prepare(write("r.yaml", recipe))
    [result] = with_rehearsal([run], check_all([run], layers=("schema",)), Cluster())
    assert any("shared_experts does not have a reset" in str(role.reason) for role in result.extra["rehearsal"].roles)


@needs_torch
@pytest.mark.train
def test_what_has_no_stand_in_is_no_refusal(write: Callable[[str, str], str]) -> None:
    recipe = DENSE.replace(
        "precision: {param_gather: true}", "parallel: {tp: 2}\nmegatron: {symmetric_ar_type: two_shot}"
    )
    recipe += "env: {CUDA_DEVICE_MAX_CONNECTIONS: 1}\n"
    run = prepare(write("r.yaml", recipe))
    [result] = with_rehearsal([run], check_all([run], layers=("schema",)), Cluster())
    assert [role.result for role in result.extra["rehearsal"].roles] == ["no verdict"] * 2, result.extra["rehearsal"]


@needs_torch
@pytest.mark.train
def test_ranks_that_read_no_data_take_their_step_too(write: Callable[[str, str], str]) -> None:
    """Refused in the first layer: a stage in the middle and the last tensor parallel rank get there."""
    parallel = "parallel: {tp: 2, pp: 4}\nenv: {CUDA_DEVICE_MAX_CONNECTIONS: 1}\n"
    recipe = DENSE.replace("llama3_8b", "qwen3_4b").replace(
        "precision/tensorwise", "precision/bf16, parts/fused_kernels"
    )
    recipe = recipe.replace("precision: {param_gather: true}\n", parallel).replace(
        "gpus_per_node: 2", "gpus_per_node: 8"
    )
    run = prepare(write("r.yaml", recipe))
    [result] = with_rehearsal([run], check_all([run], layers=("schema",)), Cluster())
    found = {role.role: (role.result, role.reason) for role in result.extra["rehearsal"].roles}
    assert list(found) == ["first stage", "second stage", "last stage", "last rank"]
    assert all("fused_single_qkv_rope" in str(reason) for _, reason in found.values()), found


def test_without_torch_the_command_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from support import only, refused

    from fp8launch.plugins.rehearse import rehearse

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    problem = only(refused(rehearse.require_torch, exit_code=3))
    assert "fp8launch[rehearse]" in str(problem.fix)


@given(real=st.integers(1, 200_000), unit=st.sampled_from([BLOCK, 4 * BLOCK, 64 * BLOCK]))
def test_a_shrunk_size_divides_as_the_real_one_does(real: int, unit: int) -> None:
    small = residue(real, unit)
    assert small <= real
    for divisor in (2, 3, 8, 16, 32, 128):
        if unit % divisor == 0:
            assert (small % divisor == 0) == (real % divisor == 0)


def test_the_world_and_its_groups_stay() -> None:
    run = prepare("llama405b_tensorwise_h100")
    small = shrink(run.args.values, run.layout).values
    for flag in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"):
        assert small.get(flag) == run.args.values.get(flag)
    assert small["num_attention_heads"] == run.args.values["num_attention_heads"]


@pytest.mark.parametrize(("heads", "kept"), [(128, 64), (192, 64), (160, 160)])
def test_latent_attention_keeps_heads_that_divide_as_all_do(heads: int, kept: int) -> None:
    run = prepare("deepseek_v3_mxfp8_gb300", ["parallel.tp=4"])
    small = shrink({**run.args.values, "num_attention_heads": heads}, run.layout).values
    assert small["num_attention_heads"] == kept


def test_other_sizes_divide_alike() -> None:
    run = prepare("llama405b_tensorwise_h100")
    small, larger = (shrink(run.args.values, run.layout, scale) for scale in (1, 3))
    unit = BLOCK * run.layout.tp
    for flag in ("hidden_size", "ffn_hidden_size"):
        real, first, second = small.sizes[flag][0], small.sizes[flag][1], larger.sizes[flag][1]
        assert first < second < real
        assert first % unit == second % unit == real % unit


def test_widths_of_dense_layers_and_experts_stay_unequal() -> None:
    run = prepare("qwen3_30b_a3b_tensorwise_h100")
    small = shrink(run.args.values, run.layout).values
    assert small["ffn_hidden_size"] != small["moe_ffn_hidden_size"]
    alike = shrink({**run.args.values, "ffn_hidden_size": 768, "moe_ffn_hidden_size": 768}, run.layout).values
    assert alike["ffn_hidden_size"] == alike["moe_ffn_hidden_size"]


def test_a_decay_at_the_end_keeps_its_length() -> None:
    run = prepare("llama8b_fp8")
    values = {**run.args.values, "lr_decay_style": "WSD", "lr_wsd_decay_iters": 10}
    assert shrink(values, run.layout).values["lr_wsd_decay_iters"] == 1


def test_an_experts_capacity_is_no_more_than_all_tokens() -> None:
    run = prepare("qwen3_30b_a3b_tensorwise_h100")
    chosen = run.args.values["moe_router_topk"]
    assert isinstance(chosen, int)
    small = shrink({**run.args.values, "moe_expert_capacity_factor": 1.25}, run.layout).values
    assert isinstance(small["num_experts"], int)
    assert small["num_experts"] >= 1.25 * chosen


def test_balancing_by_quantiles_keeps_experts_that_are_not_chosen() -> None:
    run = prepare("qwen3_30b_a3b_tensorwise_h100")
    balancing = {"moe_router_load_balancing_type": "quantile_balancing", "expert_model_parallel_size": 1}
    small = shrink({**run.args.values, **balancing}, run.layout).values
    experts, chosen, all_of_them = small["num_experts"], *map(run.args.values.get, ("moe_router_topk", "num_experts"))
    assert isinstance(experts, int) and isinstance(chosen, int) and isinstance(all_of_them, int)
    assert chosen < experts < all_of_them


@pytest.mark.parametrize(
    ("recipe", "overrides", "layers"),
    [
        ("llama8b_fp8", {"recompute_num_layers": 8}, {"num_layers": (32, 2), "recompute_num_layers": (8, 1)}),
        (
            "llama8b_fp8",
            {"cpu_offloading_num_layers": 1, "account_for_loss_in_pipeline_split": True, "recompute_num_layers": None},
            {"num_layers": (32, 3)},
        ),
        ("llama8b_fp8", {"recompute_num_layers": 32}, {"num_layers": (32, 2), "recompute_num_layers": (32, 2)}),
        ("llama8b_fp8", {"no_rope_freq": 4, "recompute_num_layers": None}, {"num_layers": (32, 4)}),
        ("llama8b_fp8", {"no_rope_freq": 4, "account_for_loss_in_pipeline_split": True}, {}),
        ("llama70b_tensorwise_gb200", {}, {"num_layers": (80, 2), "cpu_offloading_num_layers": (46, 1)}),
        (
            "llama8b_fp8",
            {"recompute_num_layers": None, "num_layers_at_start_in_bf16": 1, "num_layers_at_end_in_bf16": 2},
            {"num_layers": (32, 4)},
        ),
        ("gpt_oss_120b_mxfp8_gb200", {}, {"num_layers": (36, 2)}),
        ("gpt_oss_120b_mxfp8_gb200", {"window_attn_skip_freq": 6}, {"num_layers": (36, 6)}),
        ("deepseek_v3_tensorwise_h100", {}, {}),
    ],
)
def test_layers_that_differ_stay_beside_those_that_do_not(
    recipe: str, overrides: dict[str, int], layers: dict[str, tuple[int, int]]
) -> None:
    run = prepare(recipe)
    sizes = shrink({**run.args.values, **overrides}, run.layout).sizes
    assert {flag: pair for flag, pair in sizes.items() if "layers" in flag} == layers


def test_each_stage_and_the_last_rank_have_a_role() -> None:
    run = prepare("llama405b_tensorwise_h100")
    roles = roles_of(run.layout)
    stage = run.layout.world // run.layout.pp
    assert [role.rank for role in roles] == [0, stage, (run.layout.pp - 1) * stage, run.layout.world - 1]

"""The predicted step: its terms, and how it answers changes whose direction is certain."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from bridge_recipes import arguments_of
from fp8launch.check.resolved_run import resolve_run
from fp8launch.hardware.gpus import GPUS, gpu
from fp8launch.job.prepared import prepare
from fp8launch.megatron.parameters import parameters
from fp8launch.plugins.estimate.memory import estimate
from fp8launch.plugins.plan.collectives import Group, exchange, gather, rotate, send
from fp8launch.plugins.plan.speeds import DEVICES, Links, speeds
from fp8launch.plugins.plan.step_time import StepTime, step_time


def predicted(recipe: str, links: Links | None = None, **changes: Any) -> StepTime:
    run = resolve_run(prepare(recipe))
    found = step_time({**run.arguments, **changes}, run.layout.world, run.layout.global_batch, run.gpu, links)
    assert found is not None
    return found


def term(step: StepTime, name: str) -> float:
    return sum(part.ms for part in step.terms if part.name.startswith(name))


@pytest.mark.parametrize("recipe", ["llama8b_fp8", "llama405b_nvfp4_gb300", "deepseek_v3_mxfp8_gb300"])
def test_terms_add_up_to_the_step_and_none_is_negative(recipe: str) -> None:
    step = predicted(recipe)
    assert sum(part.ms for part in step.terms) == pytest.approx(step.ms)
    assert all(part.ms > 0 for part in step.terms)
    assert step.tflops_per_gpu is not None
    assert step.tokens_per_s_per_gpu * step.gpus * step.ms / 1000 == pytest.approx(step.tokens)


@pytest.mark.parametrize("recipe", ["llama8b_fp8", "llama70b_tensorwise_h100", "llama405b_nvfp4_gb300"])
def test_no_term_beats_the_peak(recipe: str) -> None:
    run = resolve_run(prepare(recipe))
    step = predicted(recipe)
    peak = max(run.gpu.bf16 or 0, run.gpu.fp8 or 0, run.gpu.fp4 or 0)
    assert step.tflops_per_gpu is not None and step.tflops_per_gpu < 0.8 * peak


def test_full_recompute_repeats_a_forward_pass() -> None:
    without = predicted("llama8b_fp8", recompute_granularity=None)
    full = predicted("llama8b_fp8", recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    assert term(without, "recompute") == 0
    assert 0.2 * without.ms < term(full, "recompute") < 0.35 * without.ms


def test_more_virtual_stages_shrink_the_bubble() -> None:
    even = {"pipeline_model_parallel_layout": None}
    plain = predicted("llama70b_tensorwise_h100", num_virtual_stages_per_pipeline_rank=1, **even)
    interleaved = predicted("llama70b_tensorwise_h100", num_virtual_stages_per_pipeline_rank=5, **even)
    assert term(interleaved, "pipeline bubble") == pytest.approx(term(plain, "pipeline bubble") / 5, rel=0.02)


def test_a_group_beyond_the_nvlink_domain_uses_the_network() -> None:
    near, far = (predicted("qwen3_235b_a22b_mxfp8_gb200", Links(900, 50, domain)) for domain in (72, 8))
    assert term(near, "EP communication (NVLink)") > 0 and term(near, "EP communication (network)") == 0
    assert term(far, "EP communication (network)") > 2 * term(near, "EP communication (NVLink)")
    assert far.ms > near.ms


def test_an_all_to_all_orders_tokens_twice_if_a_rank_has_several_experts() -> None:
    """Passes over routed rows: 2 / top-k for the tokens and 2 for their copies, and 4 to sort them by local expert."""

    def ordered(ranks: int, kind: str) -> float:
        sizes = {"expert_model_parallel_size": ranks, "num_experts": 16, "moe_router_topk": 8}
        name = "qwen3_30b_a3b_tensorwise_h100"
        return term(predicted(name, moe_token_dispatcher_type=kind, **sizes), "expert permutation")

    assert ordered(8, "alltoall") / ordered(16, "alltoall") == pytest.approx(6.25 / 2.25)
    assert ordered(16, "alltoall") < ordered(8, "flex") < ordered(8, "alltoall")


def test_packed_tokens_cross_the_network_once_for_each_domain() -> None:
    """Each of 4096 tokens has 8 experts on two nodes of 8: nearly all cross once, as an all-to-all four times."""
    sizes = {"expert_model_parallel_size": 16, "moe_router_topk": 8, "cuda_graph_impl": "full_iteration"}
    slow = Links(450, 5, 8)  # the network alone decides
    packed, each = (
        term(predicted("qwen3_30b_a3b_tensorwise_h100", slow, moe_token_dispatcher_type=kind, **sizes), "EP")
        for kind in ("flex", "alltoall")
    )
    assert each / packed == pytest.approx(4, rel=0.01)


def test_a_router_that_chooses_groups_of_experts_stays_within_their_nodes() -> None:
    slow = Links(450, 5, 8)
    free, limited = (
        term(predicted("deepseek_v3_tensorwise_h100", slow, moe_router_group_topk=groups), "EP") for groups in (None, 2)
    )
    assert limited < 0.5 * free


def test_a_group_of_experts_on_several_nodes_is_sent_to_several() -> None:
    """Four groups are chosen, each with two of a token's eight experts: on one node with EP 64, on four with EP 256."""

    def sent(ranks: int) -> float:
        sizes = {"expert_model_parallel_size": ranks, "overlap_moe_expert_parallel_comm": False}
        return term(predicted("deepseek_v3_tensorwise_h100", Links(450, 5, 8), **sizes), "EP")

    one, four = sent(64), sent(256)
    assert four / one == pytest.approx(4 * (1 - (3 / 4) ** 2) * (31 / 32) / (7 / 8), rel=0.02)


@pytest.mark.parametrize(
    ("precision", "bytes_of_gathers"),
    [
        ({"fp8": None}, 6 * 2),
        ({}, 6 * 1),
        ({"fp8_recipe": "mxfp8"}, 8 * 33 / 32),
        ({"fp8": None, "fp4": "e2m1", "fp4_recipe": "nvfp4"}, 8 * 4.5 / 8),
    ],
    ids=["bf16", "tensorwise", "mxfp8", "nvfp4"],
)
def test_tensor_parallel_ranks_gather_what_transformer_engine_does(
    precision: dict[str, Any], bytes_of_gathers: float
) -> None:
    """Bytes per element of a layer's gathers, as rehearsals of an 8B with TP 2 count them; four bf16 sums beside."""
    tokens, hidden, layers = 16384, 4096, 32 * 16  # of 16 micro batches
    sizes = {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "micro_batch_size": 2,
        "tp_comm_overlap": False,
    }
    alone = {"fp8_param_gather": False, "cuda_graph_impl": "none", "context_parallel_size": 1, **sizes, **precision}
    slow = Links(9, 50, 8)  # the latency of the collectives is negligible
    known = speeds(gpu("b200"), slow)
    assert known is not None
    moved = term(predicted("llama8b_tensorwise_b200", slow, **alone), "TP communication") / 1000 * known.nvlink * 2
    assert moved == pytest.approx(tokens * hidden * layers * (4 * 2 + bytes_of_gathers), rel=0.005)


def test_gradients_of_virtual_stages_go_behind_other_stages_passes() -> None:
    slow = Links(900, 25, 8)
    apart = {"pipeline_model_parallel_layout": None}
    one, many = (
        term(predicted("llama405b_tensorwise_b200", slow, num_virtual_stages_per_pipeline_rank=stages, **apart), "DP")
        for stages in (1, 8)
    )
    assert many < 0.7 * one


def test_a_slower_network_lengthens_only_what_crosses_it() -> None:
    fast, slow = (predicted("llama70b_tensorwise_h100", Links(450, network, 8)) for network in (50, 10))
    assert slow.ms > fast.ms
    for name in ("GEMM", "attention", "TP communication", "pipeline bubble"):
        assert term(slow, name) == pytest.approx(term(fast, name))


def test_small_experts_wait_for_the_host_and_graphs_of_the_whole_step_free_them() -> None:
    alone = {"expert_model_parallel_size": 1, "cuda_graph_impl": "none", "cuda_graph_modules": None}
    assert term(predicted("qwen3_30b_a3b_tensorwise_h100", **alone), "host") > 0
    graphed = alone | {"cuda_graph_impl": "full_iteration"}
    assert term(predicted("qwen3_30b_a3b_tensorwise_h100", **graphed), "host") == 0


def test_graphs_of_whole_layers_hold_experts_only_if_every_expert_has_the_same_rows() -> None:
    """Megatron: 'moe cuda graph is only supported with drop-padding MoE' (transformer_config.py)."""
    whole_layers = {"cuda_graph_impl": "local", "cuda_graph_modules": None, "expert_model_parallel_size": 1}
    dropped = whole_layers | {"moe_token_dispatcher_type": "alltoall", "moe_expert_capacity_factor": 1.0}
    name = "qwen3_30b_a3b_tensorwise_h100"
    assert term(predicted(name, **dropped), "host") > 0
    assert term(predicted(name, **dropped, moe_pad_expert_input_to_capacity=True), "host") == 0


def test_overlapped_experts_take_the_host_longer() -> None:
    """Published: 235B on 256 B300 takes longer than without the overlap, although its GPUs communicate less."""
    name, alone = "qwen3_30b_a3b_tensorwise_h100", {"expert_model_parallel_size": 2, "cuda_graph_impl": "none"}
    apart, overlapped = (predicted(name, **alone, overlap_moe_expert_parallel_comm=on) for on in (False, True))
    assert apart.slow_host_ms and overlapped.slow_host_ms
    assert overlapped.slow_host_ms > 1.2 * apart.slow_host_ms


def nano(**changes: Any) -> StepTime:
    """Nemotron 3 Nano as published, with layer graphs around its experts."""
    args = {**arguments_of("nemotron_3_nano_pretrain_8gpu_gb200_fp8mx_config"), **changes}
    step = step_time(args, 8, 512, gpu("gb200"))
    assert step is not None
    return step


@pytest.mark.needs_plugin("bridge")
def test_layer_graphs_leave_a_wait_behind_the_routing_unless_sizes_are_fixed() -> None:
    """The host launches faster than the GPU runs, but for what it launches once it knows the routing."""
    assert term(nano(), "host") > 0
    assert term(nano(moe_expert_rank_capacity_factor=1.5), "host") == 0
    # With the overlap another micro batch runs meanwhile, but the host launches more.
    assert 0 < term(nano(overlap_moe_expert_parallel_comm=True), "host") < term(nano(), "host")
    # With more tokens the experts run longer than their launch takes.
    assert term(nano(micro_batch_size=8), "host") == 0


def test_latent_attention_has_more_launches_than_other_attention() -> None:
    """Five linear layers instead of two: the projections of queries, and of keys and values, are factored."""
    alone = {"expert_model_parallel_size": 8, "num_experts": 8, "cuda_graph_impl": "none", "micro_batch_size": 1}
    latent = predicted("deepseek_v3_tensorwise_h100", seq_length=256, **alone)
    plain = predicted("deepseek_v3_tensorwise_h100", seq_length=256, multi_latent_attention=False, **alone)
    assert term(latent, "host") + term(latent, "short kernels") > 1.2 * (
        term(plain, "host") + term(plain, "short kernels")
    )


def test_wide_heads_raise_the_rate_of_attention_on_blackwell_only() -> None:
    """The softmax, which takes the same time at any width, limits Blackwell."""

    def slower(recipe: str) -> float:
        wide, narrow = (term(predicted(recipe, kv_channels=width), "attention") for width in (160, 128))
        return wide / narrow

    assert slower("llama70b_tensorwise_h100") == pytest.approx(1.25)
    assert slower("llama405b_nvfp4_gb300") == pytest.approx(1.25**0.5)


@pytest.mark.needs_plugin("bridge")
def test_recomputed_experts_wait_for_the_routing_twice() -> None:
    again = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
    assert term(nano(**again), "host") == pytest.approx(2 * term(nano(), "host"))


def test_an_unforced_router_costs_more_the_fewer_experts_a_rank_has() -> None:
    free = {"moe_router_force_load_balancing": False}
    name = "qwen3_30b_a3b_tensorwise_h100"
    assert term(predicted(name, moe_router_force_load_balancing=True), "expert imbalance") == 0
    few, many = (predicted(name, expert_model_parallel_size=ranks, **free) for ranks in (16, 2))
    assert term(few, "expert imbalance") > term(many, "expert imbalance") > 0


def test_experts_with_a_capacity_do_not_wait_for_the_busiest() -> None:
    """Padding gives every expert the same number of rows; without it, tokens above the capacity are dropped."""
    free = {"moe_router_force_load_balancing": False, "moe_token_dispatcher_type": "alltoall"}
    name = "qwen3_30b_a3b_tensorwise_h100"
    padded = {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}
    assert term(predicted(name, **free, **padded), "expert imbalance") == 0
    dropped, unlimited = predicted(name, **free, moe_expert_capacity_factor=1.02), predicted(name, **free)
    assert 0 < term(dropped, "expert imbalance") < term(unlimited, "expert imbalance")
    padded["moe_expert_capacity_factor"] = 2.0
    twice, once = predicted(name, **free, **padded), predicted(name, moe_router_force_load_balancing=True)
    assert term(twice, "GEMM experts fc1") > 1.5 * term(once, "GEMM experts fc1")


def test_ranks_share_the_cast_of_gathered_parameters() -> None:
    """A rank of the distributed optimizer casts the weights whose masters it holds (benchmarks/plan/cast.md)."""
    per_rank = []
    for ranks in (8, 64):
        found = []
        for gathers in (True, False):
            args = dict(resolve_run(prepare("llama8b_fp8", [f"precision.param_gather={gathers}"])).arguments)
            step = step_time(args, ranks, ranks, gpu("h100"))
            assert step is not None
            found.append(term(step, "optimizer"))
        per_rank.append(found[0] - found[1])
    assert per_rank[0] == pytest.approx(8.03e9 * 70e-12 * 1000 / 8, rel=0.2)
    assert per_rank[0] == pytest.approx(8 * per_rank[1], rel=0.05)


def test_fp8_beats_bf16_and_delayed_scaling_reads_less_than_tensorwise() -> None:
    bf16 = predicted("llama8b_fp8", fp8=None, fp8_param_gather=False)
    tensorwise = predicted("llama8b_fp8", fp8_param_gather=False)
    delayed = predicted("llama8b_fp8", fp8_recipe="delayed", fp8_param_gather=False)
    assert bf16.ms > 1.2 * tensorwise.ms
    assert term(bf16, "quantization") == 0
    assert term(delayed, "quantization") < term(tensorwise, "quantization")


def test_every_gpu_has_its_speeds_and_the_cpu_none() -> None:
    assert set(DEVICES) == set(GPUS) - {"cpu"}
    assert speeds(gpu("cpu")) is None
    run = resolve_run(prepare("tiny_cpu"))
    assert step_time(run.arguments, 1, run.layout.global_batch, run.gpu) is None


def test_models_that_are_not_counted_have_no_prediction() -> None:
    run = resolve_run(prepare("llama8b_fp8"))
    hybrid = {**run.arguments, "hybrid_layer_pattern": "MG-"}
    assert step_time(hybrid, 8, 128, run.gpu) is None


def test_a_hybrid_of_attention_and_mlp_layers_is_the_transformer_of_both() -> None:
    run = resolve_run(prepare("llama8b_fp8"))
    transformer = {**run.arguments, "first_last_layers_bf16": False, "recompute_granularity": None}
    hybrid = {**transformer, "hybrid_layer_pattern": "*-" * 32, "num_layers": 64}
    whole, parts = (step_time(args, 8, 128, run.gpu) for args in (transformer, hybrid))
    assert whole is not None and parts is not None
    assert parts.ms == pytest.approx(whole.ms, rel=1e-9)
    memory = [estimate(args, 8, 16, run.gpu) for args in (transformer, hybrid)]
    states = [{t.name: t.bytes for t in found.terms if t.name != "running layer"} for found in memory if found]
    assert states[0]["activations"] == pytest.approx(states[1]["activations"])
    assert states[0]["optimizer"] == states[1]["optimizer"] and states[0]["weights"] == states[1]["weights"]


def test_a_mamba_layer_has_its_products_and_its_scan() -> None:
    run = resolve_run(prepare("llama8b_fp8"))
    sizes = {"mamba_num_heads": 128, "mamba_head_dim": 64, "mamba_num_groups": 8, "mamba_state_dim": 128}
    found = [step_time({**run.arguments, **sizes, "hybrid_layer_pattern": "M" * n}, 8, 128, run.gpu) for n in (8, 16)]
    one, two = ({t.name: t for t in step.terms} for step in found if step)
    # z, x, B, C and dt of every token and head: 2 x 8192 + 2 x 8 x 128 + 128.
    assert one["GEMM Mamba in"].note.endswith("8192 x 18560 x 4096")
    assert one["GEMM Mamba out"].note.endswith("8192 x 4096 x 8192")
    assert two["Mamba scan"].ms == pytest.approx(2 * one["Mamba scan"].ms)
    divided = step_time(
        {**run.arguments, **sizes, "hybrid_layer_pattern": "M" * 8, "tensor_model_parallel_size": 2}, 8, 128, run.gpu
    )
    assert divided is not None
    # Half of the heads, for the tokens of two ranks.
    assert {t.name: t for t in divided.terms}["Mamba scan"].ms == pytest.approx(one["Mamba scan"].ms)


@pytest.mark.needs_plugin("bridge")
def test_published_hybrids_are_predicted_with_their_uncertainty() -> None:
    args = arguments_of("nemotron_3_super_pretrain_64gpu_gb300_fp8mx_config")
    step = step_time(args, 64, 512, gpu("gb300"))
    # Published: 9,856 tokens/s/GPU (docs/performance-summary.md, 26.08).
    assert step is not None and abs(step.tokens_per_s_per_gpu / 9856 - 1) < step.uncertainty < 0.3
    # Both depths of MTP run the one block that they share.
    single = step_time({**args, "mtp_num_layers": 1}, 64, 512, gpu("gb300"))
    assert single is not None and single.ms < step.ms
    assert parameters({**args, "mtp_num_layers": 1}, 64) == parameters(args, 64)


def test_collectives_take_the_bytes_over_the_slowest_link() -> None:
    known = speeds(gpu("h100"))
    assert known is not None
    assert gather(1e9, Group(1), known) == exchange(1e9, Group(1), known) == 0
    assert gather(1e9, Group(8), known) == pytest.approx(7 / 8 * 1e9 / known.nvlink)
    # A ring over 8 GPUs of each of two nodes crosses the network through eight cards.
    crossed = 15 / 16 * 1e9
    assert gather(1e9, Group(16), known) == pytest.approx(max(crossed / known.nvlink, crossed / (8 * known.network)))
    # One GPU of each node: through one card.
    assert gather(1e9, Group(2, stride=8), known) == pytest.approx(0.5e9 / known.network)
    assert exchange(1e9, Group(16), known) == pytest.approx(0.5e9 / known.network)
    # Of two stages in each domain one sends to the other domain; a ring waits for the one that does.
    assert send(1e9, Group(4, stride=4), known) == pytest.approx((1e9 / known.nvlink + 1e9 / known.pair) / 2)
    assert rotate(1e9, Group(4, stride=4), known) == pytest.approx(1e9 / known.pair)


def test_equal_network_cards_are_equally_fast_on_every_gpu() -> None:
    """H100, B200 and GB200 have cards of 400 Gbit/s, B300 and GB300 of 800 Gbit/s."""
    known = {name: speeds(gpu(name)) for name in ("h100", "b200", "gb200", "b300", "gb300")}
    rates = {name: (found.network, found.pair) for name, found in known.items() if found}
    assert rates["h100"] == rates["b200"] == rates["gb200"]
    assert rates["b300"] == rates["gb300"]
    network, pair = rates["h100"]
    assert pair < network < rates["b300"][0] < 2 * network


HOSTILE = st.dictionaries(
    st.sampled_from(
        [
            "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size", "num_experts",
            "expert_model_parallel_size", "expert_tensor_parallel_size", "moe_router_topk", "moe_ffn_hidden_size",
            "num_virtual_stages_per_pipeline_rank", "pipeline_model_parallel_layout", "mtp_num_layers", "window_size",
            "window_attn_skip_freq", "cp_comm_type", "cuda_graph_impl", "cuda_graph_modules", "recompute_modules",
            "recompute_granularity", "recompute_method", "recompute_num_layers", "micro_batch_size",
            "fp8_recipe", "fp4",
            "multi_latent_attention", "q_lora_rank", "kv_channels", "num_query_groups", "moe_layer_freq", "hidden_size",
        ]
    ),
    st.one_of(
        st.none(), st.booleans(), st.integers(-5, 200), st.integers(), st.floats(), st.text(max_size=8),
        st.sampled_from(["full", "selective", "block", "full_iteration", "a2a", "Et*4|tL", "[0]*3+[1]*5"]),
        st.lists(st.one_of(st.integers(0, 200), st.text(max_size=4)), max_size=3),
    ),
)  # fmt: skip


# A loaded machine may take long for an example.
@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(changes=HOSTILE, world=st.integers(1, 4096), batch=st.integers(1, 10**6))
@example({"num_experts": 1, "expert_model_parallel_size": 2}, 2, 1)  # ranks without an expert
def test_any_arguments_give_a_prediction_or_none(changes: dict[str, Any], world: int, batch: int) -> None:
    """Nonsense is for the check to name; `estimate` must not fall over it."""
    found = step_time({**_arguments(), **changes}, world, batch, gpu("gb200"))
    assert found is None or found.ms > 0


@functools.cache
def _arguments() -> dict[str, Any]:
    return dict(resolve_run(prepare("llama8b_fp8")).arguments)

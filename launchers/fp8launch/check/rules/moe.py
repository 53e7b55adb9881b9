"""Mixtures of experts: what Megatron's layers assert while they are built or in the first step."""

from __future__ import annotations

from collections.abc import Iterator

from fp8launch.check.facts import Facts
from fp8launch.check.rule import Finding, rule
from fp8launch.check.shape import expert_ways, moe_pattern, sequence_parallel

_MOE = "megatron/core/transformer/moe"


@rule("moe-needs-sequence-parallel", "error", source=f"{_MOE}/moe_layer.py:629, first forward pass")
def tensor_parallel_experts_split_sequences(run: Facts) -> Iterator[Finding]:
    if run.on("num_experts") and run.layout.tp > 1 and not sequence_parallel(run):
        message = f"a mixture of experts with TP {run.layout.tp} needs sequence parallelism to train"
        yield Finding(message, run.where("tensor_model_parallel_size"), "add `parallel: {sequence: auto}`")


@rule("moe-top-k", "error", source=f"{_MOE}/moe_utils.py: torch.topk over the experts")
def enough_experts_to_choose(run: Facts) -> Iterator[Finding]:
    experts, chosen = run.integer("num_experts"), run.integer("moe_router_topk")
    if experts and chosen > experts:
        message = f"the router cannot choose {chosen} of {experts} experts"
        yield Finding(message, run.where("moe_router_topk", "num_experts"), f"set moe_router_topk to {experts} or less")


@rule("moe-layer-pattern", "error", source="megatron/core/models/gpt/gpt_layer_specs.py:651-662, building the model")
def pattern_names_each_layer(run: Facts) -> Iterator[Finding]:
    layers = run.integer("num_layers")
    if not run.on("num_experts") or not layers or run.value("hybrid_layer_pattern") is not None:
        return
    pattern = moe_pattern(run)
    where = run.where("moe_layer_freq", "num_layers")
    if pattern is None:
        message = f"moe_layer_freq {run.value('moe_layer_freq')!r} is neither a whole number nor a list"
        yield Finding(message, where, "write a number, or a list such as ([0]*3+[1]*58)")
    elif len(pattern) != layers:
        message = f"moe_layer_freq speaks of {len(pattern)} layers, and the model has {layers}"
        yield Finding(message, where, f"make it {layers} entries long")
    elif set(pattern) - {0, 1}:
        yield Finding("moe_layer_freq may hold 0 for a dense layer and 1 for experts only", where, "use 0 and 1")


@rule("moe-grouped-bias", "error", source=f"{_MOE}/experts.py:204, building the model")
def grouped_experts_have_no_fused_bias(run: Facts) -> Iterator[Finding]:
    if (
        run.on("num_experts")
        and run.on("moe_grouped_gemm")
        and run.on("add_bias_linear")
        and run.on("bias_dropout_fusion")
        and run.uses_te
    ):
        message = "moe_grouped_gemm does not go with linear biases and fused bias-dropout"
        yield Finding(message, run.where("moe_grouped_gemm"), "add disable_bias_linear or no_bias_dropout_fusion")


@rule("moe-flex-dispatcher", "error", source=f"{_MOE}/token_dispatcher.py:1770 and 1788, building the model")
def dispatchers_have_someone_to_send_to(run: Facts) -> Iterator[Finding]:
    backend = run.value("moe_flex_dispatcher_backend")
    if (
        run.on("num_experts")
        and run.value("moe_token_dispatcher_type") == "flex"
        and backend in ("deepep", "ncclep")
        and run.layout.ep * expert_ways(run) == 1
    ):
        message = f"the {backend} dispatcher needs expert parallelism, and EP x ETP is 1"
        fix = "use moe_token_dispatcher_type alltoall, or parallel.ep above 1"
        yield Finding(message, run.where("moe_flex_dispatcher_backend", "moe_token_dispatcher_type"), fix)

"""Check mixtures of experts for what Megatron's layers assert while they are built or in the first step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fp8launch.check.gemm_shapes import sequence_parallel
from fp8launch.check.resolved_run import ResolvedRun
from fp8launch.check.rule import Finding, rule
from fp8launch.megatron.model_arithmetic import MOST_LAYERS, expert_frequency, expert_tensor_size, hybrid_pattern

_MOE = "megatron/core/transformer/moe"

DISPATCHER = "megatron/core/transformer/moe/token_dispatcher.py"


def dispatches_by_alltoall(run: ResolvedRun) -> bool:
    """Whether tokens are sent to experts by plain all-to-all, whose counts the host waits for."""
    return run.on("num_experts") and run.value("moe_token_dispatcher_type") == "alltoall"


@rule("router-padding-fusion", "error", source=f"{DISPATCHER}:648 and transformer_engine/pytorch/router.py:190, H200")
def padding_leaves_the_fused_router_alone(run: ResolvedRun) -> Iterator[Finding]:
    if not (dispatches_by_alltoall(run) and run.uses_te):
        return
    if not (run.on("moe_router_padding_for_quantization") and run.on("moe_router_fusion")):
        return
    if run.on("enable_experimental") and run.on("moe_permute_fusion"):
        return
    message = (
        "moe_router_padding_for_quantization changes in place what the fused router saved for its backward pass: the "
        "first backward pass fails"
    )
    fix = "remove moe_router_fusion or moe_router_padding_for_quantization"
    yield Finding(message, run.where("moe_router_padding_for_quantization", "moe_router_fusion"), fix)


@rule("moe-needs-sequence-parallel", "error", source=f"{_MOE}/moe_layer.py:629, first forward pass")
def tensor_parallel_experts_split_sequences(run: ResolvedRun) -> Iterator[Finding]:
    if run.on("num_experts") and run.layout.tp > 1 and not sequence_parallel(run):
        message = f"training a mixture of experts with TP {run.layout.tp} needs sequence parallelism"
        yield Finding(message, run.where("tensor_model_parallel_size"), "add `parallel: {sequence: auto}`")


@rule("moe-top-k", "error", source=f"{_MOE}/moe_utils.py: torch.topk over the experts")
def enough_experts_to_choose(run: ResolvedRun) -> Iterator[Finding]:
    experts, chosen = run.integer("num_experts"), run.integer("moe_router_topk")
    if experts and chosen > experts:
        message = f"moe_router_topk is {chosen}, but the model has only {experts} experts"
        yield Finding(message, run.where("moe_router_topk", "num_experts"), f"set moe_router_topk to {experts} or less")


@rule("moe-group-top-k", "error", source=f"{_MOE}/moe_utils.py group_limited_topk: torch.topk inside a group")
def groups_have_enough_experts(run: ResolvedRun) -> Iterator[Finding]:
    experts, chosen = run.integer("num_experts"), run.integer("moe_router_topk")
    groups, kept = run.integer("moe_router_num_groups"), run.integer("moe_router_group_topk")
    if not experts or groups < 1 or kept < 1 or experts % groups:
        return
    size = experts // groups
    if chosen > kept * size:
        message = (
            f"the router chooses {chosen} experts from moe_router_group_topk {kept} of {groups} groups, "
            f"which hold {kept * size} experts together"
        )
        fix = f"set moe_router_group_topk to {-(-chosen // size)} or more, or moe_router_topk to {kept * size} or less"
        yield Finding(message, run.where("moe_router_group_topk", "moe_router_num_groups", "moe_router_topk"), fix)


@rule("moe-layer-pattern", "error", source="megatron/core/models/gpt/gpt_layer_specs.py:651-662, building the model")
def pattern_names_each_layer(run: ResolvedRun) -> Iterator[Finding]:
    layers = run.integer("num_layers")
    if not run.on("num_experts") or not layers or hybrid_pattern(run.arguments) is not None:
        return
    frequency = expert_frequency(run.arguments)
    where = run.where("moe_layer_freq", "num_layers")
    if isinstance(frequency, int) and frequency > 0:
        return
    if not isinstance(frequency, list):
        message = f"moe_layer_freq {run.value('moe_layer_freq')!r} is neither a whole number above 0 nor a list"
        yield Finding(message, where, f"write a number, or a list of at most {MOST_LAYERS} such as ([0]*3+[1]*58)")
    elif len(frequency) != layers:
        message = f"moe_layer_freq lists {len(frequency)} layers, but the model has {layers}"
        yield Finding(message, where, f"make it {layers} entries long")
    elif set(frequency) - {0, 1}:
        yield Finding(
            "moe_layer_freq must contain only 0 (dense layer) and 1 (layer with experts)", where, "use 0 and 1"
        )


@rule("moe-grouped-bias", "error", source=f"{_MOE}/experts.py:204, building the model")
def grouped_experts_have_no_fused_bias(run: ResolvedRun) -> Iterator[Finding]:
    if (
        run.on("num_experts")
        and run.on("moe_grouped_gemm")
        and run.on("add_bias_linear")
        and run.on("bias_dropout_fusion")
        and run.uses_te
    ):
        message = "moe_grouped_gemm cannot be combined with both linear biases and fused bias-dropout"
        yield Finding(message, run.where("moe_grouped_gemm"), "add disable_bias_linear or no_bias_dropout_fusion")


@rule(
    "moe-dispatcher-sms",
    "error",
    source="megatron/core/transformer/transformer_config.py __post_init__ (0.19); run with Bridge 0.6.0 on a CPU",
    says="Conflicting deprecated SM-count knobs",
)
def dispatchers_agree_on_sms(run: ResolvedRun) -> Iterator[Finding]:
    names = ("moe_deepep_num_sms", "moe_hybridep_num_sms")
    counts = [run.value(name) for name in names]
    if run.megatron < (0, 19) or None in counts or run.value("moe_flex_dispatcher_num_sms") is not None:
        return
    if counts[0] != counts[1]:
        message = f"moe_deepep_num_sms {counts[0]} and moe_hybridep_num_sms {counts[1]} differ, which Megatron refuses"
        fix = "set moe_flex_dispatcher_num_sms, which replaces both"
        if run.software.megatron_bridge is not None:
            fix = "set bridge.overrides: {model: {moe_flex_dispatcher_num_sms: N}}, which replaces both"
        yield Finding(message, run.where(*names), fix)


@rule("moe-flex-dispatcher", "error", source=f"{_MOE}/token_dispatcher.py:1770 and 1788, building the model")
def dispatchers_have_someone_to_send_to(run: ResolvedRun) -> Iterator[Finding]:
    backend = run.value("moe_flex_dispatcher_backend")
    if (
        run.on("num_experts")
        and run.value("moe_token_dispatcher_type") == "flex"
        and backend in ("deepep", "ncclep")
        and run.layout.ep * expert_tensor_size(run.arguments) == 1
    ):
        message = f"the {backend} dispatcher needs expert parallelism, but EP x ETP is 1"
        fix = "use moe_token_dispatcher_type alltoall, or parallel.ep above 1"
        yield Finding(message, run.where("moe_flex_dispatcher_backend", "moe_token_dispatcher_type"), fix)


@rule("router-padding-capacity", "error", source=f"{_MOE}/moe_utils.py:675: the mask was saved for the backward pass")
def padding_leaves_dropped_tokens_alone(run: ResolvedRun) -> Iterator[Finding]:
    names = ("moe_router_padding_for_quantization", "moe_expert_capacity_factor")
    if not dispatches_by_alltoall(run) or not all(map(run.on, names)):
        return
    if run.on("enable_experimental") and run.on("moe_permute_fusion"):
        return
    message = (
        "moe_router_padding_for_quantization changes in place what dropping tokens saved for its backward pass: the "
        "first backward pass fails"
    )
    yield Finding(message, run.where(*names), f"remove {names[0]} or {names[1]}")


@rule(
    "expert-bias-overlap", "error", source="TE grouped_linear.py backward_dw (2.16); Megatron's DDP hook, 0.18 to 0.19"
)
def late_weight_gradients_have_no_bias(run: ResolvedRun) -> Iterator[Finding]:
    name = "overlap_dispatch_backward_with_experts_wgrad"
    if "add_bias_linear" not in run.given and not run.engine.covers("megatron_lm"):
        return  # the engine's model has a default of its own
    if run.on("num_experts") and run.on(name) and run.on("add_bias_linear") and run.on("moe_grouped_gemm"):
        message = f"{name} does not support biases of the experts' linear layers"
        yield Finding(message, run.where(name, "add_bias_linear"), f"set disable_bias_linear, or remove {name}")


@rule(
    "sequential-expert-bias",
    "error",
    source="megatron 0.19.2: core/transformer/mlp.py:354 adds to a view of TE's output",
)
def sequential_experts_have_no_bias(run: ResolvedRun) -> Iterator[Finding]:
    if (
        not run.uses_te
        or run.megatron[:2] < (0, 19)
        or ("add_bias_linear" not in run.given and not run.engine.covers("megatron_lm"))
    ):
        return
    if run.on("num_experts") and run.on("add_bias_linear") and not run.on("moe_grouped_gemm"):
        message = "experts without moe_grouped_gemm do not support biases of linear layers with Transformer Engine"
        fix = "set moe_grouped_gemm or disable_bias_linear"
        yield Finding(message, run.where("moe_grouped_gemm", "add_bias_linear", "num_experts"), fix)


@rule(
    "offload-copied-config",
    "error",
    source=f"{_MOE}/experts.py:1281, shared_experts.py:123: a deepcopy of the configuration, which holds a CUDA stream",
)
def offloaded_layers_share_one_configuration(run: ResolvedRun) -> Iterator[Finding]:
    offloads = run.uses_te and run.integer("cpu_offloading_num_layers") > 0
    if not offloads:
        return
    message = "cpu_offloading_num_layers cannot be used with {}, which Megatron builds from a copied configuration"
    where = run.where("cpu_offloading_num_layers")
    dense, expert = run.integer("ffn_hidden_size"), run.integer("moe_ffn_hidden_size")
    if run.on("num_experts") and not run.on("moe_grouped_gemm") and dense and expert and dense != expert:
        kind = "ungrouped experts of another width than ffn_hidden_size"
        yield Finding(message.format(kind), where, "set moe_grouped_gemm, or remove cpu_offloading_num_layers")
    if run.on("moe_shared_expert_intermediate_size") and run.megatron[:2] >= (0, 18):
        yield Finding(message.format("shared experts"), where, "remove cpu_offloading_num_layers")
    if 0 < run.integer("num_query_groups") < run.layout.tp and run.on("group_query_attention"):
        kind = f"fewer query groups than TP {run.layout.tp}"
        yield Finding(message.format(kind), where, "lower parallel.tp, or remove cpu_offloading_num_layers")


def _balancing(run: ResolvedRun) -> list[str]:
    """How the router balances: one way, or several."""
    kinds: Any = run.value("moe_router_load_balancing_type") or ()
    return [kinds] if isinstance(kinds, str) else list(kinds)


@rule("sinkhorn-aux-loss", "error", source=f"{_MOE}/router.py:295 (0.19; 249 in 0.18, 248 in 0.17), H200")
def sinkhorn_balances_alone(run: ResolvedRun) -> Iterator[Finding]:
    loss = run.value("moe_aux_loss_coeff")
    losses = [loss] if isinstance(loss, (int, float)) else loss
    if run.on("num_experts") and "sinkhorn" in _balancing(run) and losses and any(losses):
        message = "moe_router_load_balancing_type sinkhorn does not support an auxiliary loss"
        fix = "set `model: {moe_aux_loss_coeff: 0.0}`, or use aux_loss"
        yield Finding(message, run.where("moe_router_load_balancing_type", "moe_aux_loss_coeff"), fix)


@rule("router-dtype-padding", "error", source=f"{_MOE}/experts.py:778: Transformer Engine pads no float64, H200")
def padded_probabilities_have_a_type(run: ResolvedRun) -> Iterator[Finding]:
    if not run.uses_te or not (run.value("fp8") or run.value("fp4")) or run.value("moe_router_dtype") != "fp64":
        return
    if run.on("num_experts") and run.on("moe_grouped_gemm") and not run.on("moe_router_padding_for_quantization"):
        message = "Transformer Engine cannot pad the rows of FP8 experts beside probabilities in fp64"
        fix = "set moe_router_dtype to fp32, or add moe_router_padding_for_quantization"
        yield Finding(message, run.where("moe_router_dtype", "fp8_recipe"), fix)


@rule("shared-overlap-latent", "error", source=f"{_MOE}/moe_layer.py:472 (0.19; 473 in 0.18), H200")
def latent_experts_overlap_nothing(run: ResolvedRun) -> Iterator[Finding]:
    if run.on("moe_latent_size") and run.on("moe_shared_expert_overlap") and run.megatron[:2] >= (0, 18):
        message = "moe_shared_expert_overlap does not support moe_latent_size"
        fix = "remove moe_shared_expert_overlap"
        yield Finding(message, run.where("moe_shared_expert_overlap", "moe_latent_size"), fix)


@rule("shared-grouped-interleave", "error", source=f"{_MOE}/shared_experts.py:415 (0.19), H200")
def grouped_shared_experts_interleave(run: ResolvedRun) -> Iterator[Finding]:
    name, size = "use_grouped_gemm_for_shared_expert", "moe_shared_expert_glu_interleave_size"
    if run.on(name) and run.on("moe_shared_expert_intermediate_size") and not run.on(size):
        yield Finding(f"{name} needs {size}", run.where(name), f"set {size}, or remove {name}")


@rule("delayed-offloaded-experts", "error", source="TE 2.20.2 pytorch/module/grouped_linear.py:684, H200")
def delayed_scaling_saves_no_inputs(run: ResolvedRun) -> Iterator[Finding]:
    offloaded: Any = run.value("offload_modules") or ()
    if run.precision != "delayed" or not run.on("fine_grained_activation_offloading") or not run.uses_te:
        return
    if run.on("num_experts") and run.on("moe_grouped_gemm") and "expert_fc1" in offloaded:
        message = "delayed scaling does not support offload_modules expert_fc1, which keeps the input of experts"
        yield Finding(message, run.where("offload_modules", "fp8_recipe"), "remove expert_fc1 from offload_modules")


@rule(
    "meta-device-expert-gate",
    "error",
    source="megatron_fsdp/param_and_grad_buffer.py:2888 (0.19; 2489 in 0.18, 2477 in 0.17), H200",
)
def gates_of_shared_experts_are_not_built_on_meta(run: ResolvedRun) -> Iterator[Finding]:
    gated = run.on("moe_shared_expert_gate") and run.on("moe_shared_expert_intermediate_size")
    if gated and run.on("use_megatron_fsdp") and run.on("init_model_with_meta_device"):
        message = "Megatron-FSDP cannot fill the gate of shared experts that init_model_with_meta_device leaves out"
        fix = "set `init_model_with_meta_device: null`, or remove moe_shared_expert_gate"
        yield Finding(message, run.where("init_model_with_meta_device", "moe_shared_expert_gate"), fix)


@rule("quantile-balancing-router", "error", source=f"{_MOE}/router.py:322 (0.19), H200")
def routing_by_quantiles_is_plain(run: ResolvedRun) -> Iterator[Finding]:
    if not run.on("num_experts") or _balancing(run) != ["quantile_balancing"]:
        return
    for name in ("moe_router_fusion", "moe_router_num_groups", "moe_router_group_topk"):
        if run.on(name):
            message = f"routing by quantile_balancing does not support {name}"
            yield Finding(message, run.where("moe_router_load_balancing_type", name), f"remove {name}")
            return

"""Combinations that Megatron and Transformer Engine refuse while the model is built or in the first step.

Found by rehearsals of random recipes (tools/rehearse_random.py). "H200" in a source means that a run there ended so.
"""

from __future__ import annotations

from collections.abc import Iterator

from fp8launch.check.resolved_run import ResolvedRun
from fp8launch.check.rule import Finding, rule
from fp8launch.megatron.model_arithmetic import layer_kinds


@rule("op-fuser-activation", "error", source="megatron/core/extensions/transformer_engine.py:2882, H200")
def fused_operations_have_the_activation(run: ResolvedRun) -> Iterator[Finding]:
    if not run.on("use_transformer_engine_op_fuser") or run.on("num_experts"):
        return
    for name in ("squared_relu", "use_te_activation_func"):
        if run.on(name):
            message = f"use_transformer_engine_op_fuser has no operation for {name}"
            yield Finding(
                message,
                run.where("use_transformer_engine_op_fuser", name),
                f"remove use_transformer_engine_op_fuser or {name}",
            )


@rule("distributed-optimizer-kind", "error", source="megatron/core/optimizer/distrib_optimizer.py:691, H200")
def distributed_optimizer_is_adam(run: ResolvedRun) -> Iterator[Finding]:
    if run.value("optimizer") == "sgd" and run.on("use_distributed_optimizer"):
        message = "the distributed optimizer supports Adam, not SGD"
        fix = "use optimizer adam, or remove use_distributed_optimizer"
        yield Finding(message, run.where("optimizer", "use_distributed_optimizer"), fix)


@rule("fsdp-pipeline", "error", source="megatron/core/distributed/fsdp/mcore_fsdp_adapter.py:561, H200")
def megatron_fsdp_has_one_stage(run: ResolvedRun) -> Iterator[Finding]:
    if run.on("use_megatron_fsdp") and run.layout.pp > 1:
        message = f"Megatron-FSDP counts its ranks without pipeline stages and fails with PP {run.layout.pp}"
        fix = "set parallel.pp to 1, or remove parallel.fsdp"
        yield Finding(message, run.where("use_megatron_fsdp", "pipeline_model_parallel_size"), fix)


@rule("fsdp-fp4-parameters", "error", source="megatron_fsdp/param_and_grad_buffer.py:2954 knows FP8 parameters only")
def megatron_fsdp_has_no_fp4_parameters(run: ResolvedRun) -> Iterator[Finding]:
    if run.on("use_megatron_fsdp") and run.on("fp4_param_gather"):
        message = "Megatron-FSDP cannot hold parameters in FP4: the model is not built"
        fix = "set `precision: {param_gather: false}`, or remove parallel.fsdp"
        yield Finding(message, run.where("fp4_param_gather", "use_megatron_fsdp"), fix)


@rule(
    "expert-extra-state",
    "error",
    source="megatron 0.18.2: extensions/transformer_engine.py:2275; TE 2.16.1: module/base.py:1206",
)
def experts_of_old_megatron_can_be_saved(run: ResolvedRun) -> Iterator[Finding]:
    engine = run.software.transformer_engine
    if run.megatron[:2] >= (0, 19) or engine is None or engine < (2, 16, 1) or not run.uses_te:
        return
    grouped = run.on("num_experts") and run.on("moe_grouped_gemm")
    if grouped and run.on("save") and run.quantized and run.precision != "delayed":
        release = ".".join(map(str, engine))
        message = (
            f"Megatron before 0.19 cannot save experts in {run.precision} with Transformer Engine {release}, which "
            "keeps no state of this recipe: the first checkpoint ends in a TypeError"
        )
        fix = "use Megatron 0.19, or Transformer Engine 2.16.0 or older"
        yield Finding(message, run.where("transformer_engine", "save", "moe_grouped_gemm"), fix)


@rule(
    "te-offload-interface",
    "error",
    source="megatron 0.17: extensions/transformer_engine.py:2560; TE 2.9: cpu_offload.py",
)
def old_engine_has_the_interface(run: ResolvedRun) -> Iterator[Finding]:
    engine = run.software.transformer_engine
    if not run.uses_te or engine is None or run.megatron[:2] != (0, 17):
        return
    if (2, 5) <= engine[:2] < (2, 10):
        message = (
            "Megatron 0.17 cannot build a model with Transformer Engine 2.5 to 2.9, which lack an argument of 2.10"
        )
        yield Finding(
            message, run.where("transformer_engine"), "use Transformer Engine 2.10 or newer, or Megatron 0.18"
        )


@rule("op-fuser-experts", "error", source="megatron 0.19.2: core/transformer/moe/experts.py:287 and 398")
def fused_experts_have_their_variable(run: ResolvedRun) -> Iterator[Finding]:
    name = "NVTE_CUTEDSL_FUSED_GROUPED_MLP"
    gated = run.on("swiglu") or run.on("quick_geglu")
    if not (run.uses_te and gated and run.on("moe_grouped_gemm") and run.megatron[:2] >= (0, 19)):
        return
    if run.on("use_transformer_engine_op_fuser") and run.env.get(name, "0") in ("", "0"):
        message = f"use_transformer_engine_op_fuser with gated experts needs {name}=1 since Megatron 0.19"
        yield Finding(message, run.where("use_transformer_engine_op_fuser"), f"add `env: {{{name}: 1}}`")


@rule("cpu-initialization", "error", source="megatron 0.19.2: training/models/dist_utils.py:172 moves no weights, H200")
def weights_on_the_host_are_trained_by_nothing(run: ResolvedRun) -> Iterator[Finding]:
    if not run.on("use_cpu_initialization") or run.gpu.name == "cpu" or run.fsdp or run.megatron[:2] < (0, 19):
        return
    if run.loaded.recipe.launch.script is not None:
        return
    if not run.on("use_distributed_optimizer"):
        reason = "its optimizer takes them from a GPU only"
    elif run.on("fp8_param_gather"):
        reason = "a run with FP8 weights ends in an illegal memory access"
    else:
        return  # the distributed optimizer's buffer has the weights, on the GPU
    message = f"Megatron 0.19 leaves the weights of use_cpu_initialization on the host, and {reason}"
    fix = "remove use_cpu_initialization"
    yield Finding(message, run.where("use_cpu_initialization", "fp8_param_gather"), fix)


@rule(
    "meta-device-cpu", "error", source="megatron/core/tensor_parallel/layers.py:224 (0.19): copies from a meta tensor"
)
def weights_are_made_in_one_place(run: ResolvedRun) -> Iterator[Finding]:
    if run.on("use_cpu_initialization") and run.on("init_model_with_meta_device"):
        message = "use_cpu_initialization fills weights that init_model_with_meta_device leaves out"
        yield Finding(message, run.where("use_cpu_initialization", "init_model_with_meta_device"), "remove one of them")


@rule(
    "fused-rope-norm", "error", source="megatron/core/transformer/attention.py:1361 (985 in 0.17, 1091 in 0.18), H200"
)
def fused_rope_has_plain_queries(run: ResolvedRun) -> Iterator[Finding]:
    name = "fused_single_qkv_rope"
    if not (run.loaded.recipe.launch.config.get(name) or run.on(name)) or run.on("multi_latent_attention"):
        return
    fix = f"set model.{name} to false"
    if run.engine.covers("megatron_lm"):
        fix = f"set `launch: {{config: {{{name}: false}}}}`"
    normalized = list(filter(run.on, ("qk_layernorm", "qk_l2_norm")))
    embedding = run.value("position_embedding_type")
    if normalized:
        message = f"{name} does not support normalized queries and keys ({normalized[0]})"
        yield Finding(message, run.where(name, normalized[0]), fix)
    elif embedding not in (None, "rope", "yarn", "mrope"):
        message = f"{name} needs rotary embeddings, but position_embedding_type is {embedding}"
        yield Finding(message, run.where(name, "position_embedding_type"), fix)
    elif run.on("no_rope_freq"):
        message = f"{name} does not support layers without rotary embeddings (no_rope_freq)"
        yield Finding(message, run.where(name, "no_rope_freq"), fix)


@rule("fsdp-qk-clip", "error", source="megatron/core/optimizer/qk_clip.py:23: FSDP wraps the model once more than DDP")
def megatron_fsdp_clips_no_logits(run: ResolvedRun) -> Iterator[Finding]:
    if not run.on("use_megatron_fsdp") or not (run.on("bf16") or run.on("fp16")):
        return
    for name in ("qk_clip", "log_max_attention_logit"):
        if run.on(name):
            message = f"{name} does not find the layers of a model in Megatron-FSDP: the first step ends in an error"
            yield Finding(message, run.where(name, "use_megatron_fsdp"), f"remove {name}, or parallel.fsdp")
            return


@rule("fused-router-dtype", "error", source="transformer_engine/pytorch/router.py:345 (130 in 2.14 and 2.16), H200")
def fused_routers_have_no_double_precision(run: ResolvedRun) -> Iterator[Finding]:
    if not (run.uses_te and run.on("num_experts") and run.on("moe_router_fusion")):
        return
    if run.value("moe_router_dtype") == "fp64":
        message = "moe_router_fusion does not support moe_router_dtype fp64"
        fix = "use moe_router_dtype fp32, or remove moe_router_fusion"
        yield Finding(message, run.where("moe_router_dtype", "moe_router_fusion"), fix)


@rule("probs-on-input", "error", source="megatron/core/transformer/moe/experts.py:782 (356 in 0.17, 671 in 0.18), H200")
def scaled_inputs_go_to_one_expert(run: ResolvedRun) -> Iterator[Finding]:
    chosen = run.integer("moe_router_topk", 2)
    if run.on("num_experts") and run.on("moe_apply_probs_on_input") and chosen != 1:
        message = f"moe_apply_probs_on_input needs moe_router_topk 1, not {chosen}"
        fix = "remove moe_apply_probs_on_input"
        yield Finding(message, run.where("moe_apply_probs_on_input", "moe_router_topk"), fix)


@rule(
    "shared-expert-bias",
    "error",
    source="megatron/core/transformer/moe/shared_experts.py:124 (54 in 0.17, 118 in 0.18), H200",
)
def shared_experts_have_no_bias(run: ResolvedRun) -> Iterator[Finding]:
    if "add_bias_linear" not in run.given and not run.engine.covers("megatron_lm"):
        return  # the engine's model has a default of its own
    if run.on("num_experts") and run.on("moe_shared_expert_intermediate_size") and run.on("add_bias_linear"):
        message = "shared experts do not support biases of linear layers"
        fix = "set disable_bias_linear, or remove moe_shared_expert_intermediate_size"
        yield Finding(message, run.where("moe_shared_expert_intermediate_size", "add_bias_linear"), fix)


@rule(
    "undistributed-instances",
    "error",
    source="megatron/core/distributed/distributed_data_parallel.py:292 (227 in 0.17, 283 in 0.18), H200",
)
def several_instances_are_distributed(run: ResolvedRun) -> Iterator[Finding]:
    instances = run.integer("num_distributed_optimizer_instances", 1)
    if instances > 1 and not run.on("use_distributed_optimizer") and not run.fsdp:
        message = f"num_distributed_optimizer_instances {instances} needs use_distributed_optimizer"
        fix = "set use_distributed_optimizer, or remove num_distributed_optimizer_instances"
        yield Finding(message, run.where("num_distributed_optimizer_instances"), fix)


@rule(
    "fp32-accumulation-average", "error", source="megatron/core/distributed/reduce_scatter_with_fp32_accumulation.py:63"
)
def accumulated_gradients_are_summed(run: ResolvedRun) -> Iterator[Finding]:
    name = "ddp_reduce_scatter_with_fp32_accumulation"
    if run.on(name) and run.on("ddp_average_in_collective") and run.on("use_distributed_optimizer") and not run.fsdp:
        message = f"{name} only sums gradients, but ddp_average_in_collective averages them"
        fix = f"remove ddp_average_in_collective or {name}"
        yield Finding(message, run.where(name, "ddp_average_in_collective"), fix)


@rule("fp32-residual-te", "error", source="transformer_engine/pytorch/module/base.py:1497: input and weight types")
def residuals_have_the_type_of_weights(run: ResolvedRun) -> Iterator[Finding]:
    if run.uses_te and run.on("fp32_residual_connection") and (run.on("bf16") or run.on("fp16")):
        message = "fp32_residual_connection hands fp32 to Transformer Engine's layers, whose weights have 16 bits"
        yield Finding(message, run.where("fp32_residual_connection"), "remove fp32_residual_connection")


@rule("rerun-mode-name", "error", source="megatron/core/rerun_state_machine.py:79: the mode has another name there")
def rerun_modes_have_their_name(run: ResolvedRun) -> Iterator[Finding]:
    if run.value("rerun_mode") == "report_stats":
        message = "rerun_mode report_stats is accepted by Megatron's parser and refused when training starts"
        yield Finding(message, run.where("rerun_mode"), "set rerun_mode to validate_results or disabled")


@rule("fp32-accumulation-instances", "error", source="megatron/core/distributed/param_and_grad_buffer.py:207 (0.17)")
def accumulated_gradients_have_one_instance(run: ResolvedRun) -> Iterator[Finding]:
    name, instances = "ddp_reduce_scatter_with_fp32_accumulation", run.integer("num_distributed_optimizer_instances", 1)
    if run.on(name) and instances > 1 and run.on("use_distributed_optimizer") and not run.fsdp:
        message = f"{name} does not support num_distributed_optimizer_instances {instances}"
        fix = f"remove {name} or num_distributed_optimizer_instances"
        yield Finding(message, run.where(name, "num_distributed_optimizer_instances"), fix)


@rule("fp8-output-tied", "error", source="megatron/core/extensions/transformer_engine.py:1559 (1389 in 0.18)")
def fp8_output_has_weights_of_its_own(run: ResolvedRun) -> Iterator[Finding]:
    tied = not run.on("untie_embeddings_and_output_weights")
    if run.on("fp8_output_proj") and run.layout.pp == 1 and tied and run.uses_te:
        message = "fp8_output_proj does not support an output layer that shares the embedding's weights"
        fix = "set untie_embeddings_and_output_weights, or remove fp8_output_proj"
        yield Finding(message, run.where("fp8_output_proj", "untie_embeddings_and_output_weights"), fix)


@rule("mtp-full-recompute", "error", source="megatron 0.18.2: core/transformer/multi_token_prediction.py:1301")
def token_prediction_is_recomputed(run: ResolvedRun) -> Iterator[Finding]:
    if run.megatron[:2] == (0, 18) and run.on("mtp_num_layers") and run.value("recompute_granularity") == "full":
        message = (
            "Megatron 0.18 cannot recompute layers of multi-token prediction in full: it passes an unknown argument"
        )
        fix = "set recompute_granularity to selective, or use Megatron 0.19"
        yield Finding(message, run.where("recompute_granularity", "mtp_num_layers"), fix)


@rule("delta-net-activation", "error", source="megatron 0.19.2: core/ssm/gated_delta_net/gdn.py:213")
def delta_nets_have_their_activation(run: ResolvedRun) -> Iterator[Finding]:
    if run.megatron[:2] < (0, 19) or run.on("deterministic_mode") or run.on("swiglu"):
        return
    if run.value("experimental_attention_variant") == "gated_delta_net":
        message = "gated delta nets support SwiGLU's activation only"
        fix = "set swiglu, or remove experimental_attention_variant"
        yield Finding(message, run.where("experimental_attention_variant", "swiglu", "squared_relu"), fix)


@rule("geglu-fusion-dense", "error", source="megatron/core/transformer/mlp.py:318 (306 in 0.17, 312 in 0.18)")
def dense_layers_have_the_fused_activation(run: ResolvedRun) -> Iterator[Finding]:
    if run.on("quick_geglu") and run.on("bias_gelu_fusion") and "mlp" in layer_kinds(run.arguments):
        message = "dense layers have no fused activation for quick_geglu"
        fix = "set no_bias_gelu_fusion, or make every layer one of experts"
        yield Finding(message, run.where("quick_geglu", "bias_gelu_fusion", "moe_layer_freq"), fix)


@rule("fsdp-overlap-buffers", "error", source="megatron/core/distributed/fsdp/mcore_fsdp_adapter.py:169 (161 in 0.18)")
def overlapped_experts_have_single_buffers(run: ResolvedRun) -> Iterator[Finding]:
    names = ("fsdp_double_buffer", "overlap_moe_expert_parallel_comm")
    if run.on("use_megatron_fsdp") and all(map(run.on, names)) and run.megatron[:2] >= (0, 18):
        message = "overlap_moe_expert_parallel_comm with Megatron-FSDP does not support fsdp_double_buffer"
        yield Finding(message, run.where(*names), "set fsdp_double_buffer to null")

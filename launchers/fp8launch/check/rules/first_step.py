"""Combinations that Megatron and Transformer Engine refuse while the model is built or in the first step.

Found by rehearsals of random recipes (tools/rehearse_random.py). "H200" in a source means that a run there ended so.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fp8launch.check.resolved_run import ResolvedRun
from fp8launch.check.rule import Finding, rule

_DISPATCHER = "megatron/core/transformer/moe/token_dispatcher.py"
_TE_ATTENTION = "transformer_engine/pytorch/attention/dot_product_attention"


def _graph_modules(run: ResolvedRun) -> set[str]:
    modules: Any = run.value("cuda_graph_modules") or run.value("cuda_graph_scope") or ()
    return {str(getattr(module, "name", module)) for module in ([modules] if isinstance(modules, str) else modules)}


def _dispatches_by_alltoall(run: ResolvedRun) -> bool:
    return run.on("num_experts") and run.value("moe_token_dispatcher_type") == "alltoall"


@rule("router-padding-fusion", "error", source=f"{_DISPATCHER}:648 and transformer_engine/pytorch/router.py:190, H200")
def padding_leaves_the_fused_router_alone(run: ResolvedRun) -> Iterator[Finding]:
    if not (_dispatches_by_alltoall(run) and run.uses_te):
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


@rule("graph-dispatch-sync", "error", source=f"{_DISPATCHER}:612, H200")
def captured_preprocessing_knows_its_sizes(run: ResolvedRun) -> Iterator[Finding]:
    if not _dispatches_by_alltoall(run) or "moe_preprocess" not in _graph_modules(run):
        return
    names = ("moe_router_padding_for_quantization", "moe_expert_capacity_factor")
    dynamic = [name for name in names if run.on(name)]
    if dynamic and not run.on("moe_pad_expert_input_to_capacity"):
        message = f"CUDA graphs of moe_preprocess cannot be used with {dynamic[0]}: the number of rows varies"
        yield Finding(
            message,
            run.where("cuda_graph_modules", dynamic[0]),
            f"remove moe_preprocess from cuda_graph_modules, or {dynamic[0]}",
        )


@rule("full-graph-dispatch", "error", source=f"{_DISPATCHER}:950: the host waits for the experts' token counts")
def whole_graphs_do_not_wait(run: ResolvedRun) -> Iterator[Finding]:
    if run.value("cuda_graph_impl") != "full_iteration" or not _dispatches_by_alltoall(run):
        return
    if not run.on("moe_pad_expert_input_to_capacity"):
        message = (
            "a CUDA graph of the full iteration cannot contain the alltoall dispatcher, which waits for token counts"
        )
        fix = "use moe/hybridep with moe/full_iteration_graph, or cuda_graph_impl transformer_engine"
        yield Finding(message, run.where("cuda_graph_impl", "moe_token_dispatcher_type"), fix)


@rule(
    "local-graph-mlp", "error", source="megatron/core/transformer/transformer_layer.py:566: is_moe_layer is set later"
)
def local_graphs_of_mlp_need_attention(run: ResolvedRun) -> Iterator[Finding]:
    modules = _graph_modules(run)
    if (
        run.megatron >= (0, 19)
        and run.value("cuda_graph_impl") == "local"
        and "mlp" in modules
        and "attn" not in modules
    ):
        message = "Megatron 0.19 cannot build local CUDA graphs of mlp alone"
        fix = "add attn to cuda_graph_modules, or use cuda_graph_impl transformer_engine"
        yield Finding(message, run.where("cuda_graph_modules", "cuda_graph_impl"), fix)


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
    if run.value("optimizer") == "sgd" and run.on("use_distributed_optimizer") and not run.fsdp:
        message = "the distributed optimizer supports Adam, not SGD"
        fix = "use optimizer adam, or remove use_distributed_optimizer"
        yield Finding(message, run.where("optimizer", "use_distributed_optimizer"), fix)


@rule("fsdp-pipeline", "error", source="megatron/core/distributed/fsdp/mcore_fsdp_adapter.py:561, H200")
def megatron_fsdp_has_one_stage(run: ResolvedRun) -> Iterator[Finding]:
    if run.on("use_megatron_fsdp") and run.layout.pp > 1:
        message = f"Megatron-FSDP counts its ranks without pipeline stages and fails with PP {run.layout.pp}"
        fix = "set parallel.pp to 1, or remove parallel.fsdp"
        yield Finding(message, run.where("use_megatron_fsdp", "pipeline_model_parallel_size"), fix)


@rule(
    "fsdp-local-graphs",
    "error",
    source="megatron/core/pipeline_parallel/schedules.py:862 captures after megatron_fsdp.py:1370 took the parameters",
)
def megatron_fsdp_captures_no_layers(run: ResolvedRun) -> Iterator[Finding]:
    if not run.on("use_megatron_fsdp") or run.value("cuda_graph_impl") != "local":
        return
    whole_step = "full_iteration" in _graph_modules(run)
    if run.value("data_parallel_sharding_strategy") == "optim_grads_params" and not whole_step:
        message = (
            "Megatron captures local CUDA graphs at the end of a step, when FSDP has replaced the layers' parameters: "
            "the first capture ends in a KeyError"
        )
        fix = "remove cuda_graph_impl, or parallel.fsdp"
        yield Finding(message, run.where("cuda_graph_impl", "use_megatron_fsdp"), fix)


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


@rule("unfused-context-parallel", "error", source=f"{_TE_ATTENTION}/dot_product_attention.py:2899, H200")
def context_parallel_attention_is_fused(run: ResolvedRun) -> Iterator[Finding]:
    if not run.uses_te or run.layout.cp == 1:
        return
    if run.value("attention_backend") == "unfused":
        message = f"Transformer Engine's unfused attention does not support CP {run.layout.cp}"
        fix = "set attention_backend to fused or auto, or parallel.cp to 1"
        yield Finding(message, run.where("attention_backend", "context_parallel_size"), fix)
    elif run.precision == "fp32":
        message = (
            f"Transformer Engine's fused attention has no fp32, and its unfused one does not support CP {run.layout.cp}"
        )
        yield Finding(message, run.where("context_parallel_size"), "set parallel.cp to 1, or use another precision")


@rule("window-context-parallel", "error", source=f"{_TE_ATTENTION}/context_parallel.py:5691; H200")
def windows_and_rings_exclude_each_other(run: ResolvedRun) -> Iterator[Finding]:
    kinds: Any = run.value("cp_comm_type") or ["p2p"]
    kinds = [kinds] if isinstance(kinds, str) else list(kinds)
    ring = [kind for kind in kinds if kind in ("p2p", "a2a+p2p")]
    if run.uses_te and run.layout.cp > 1 and run.on("window_size") and ring:
        message = f"sliding window attention does not support CP {run.layout.cp} with cp_comm_type {ring[0]}"
        fix = "set cp_comm_type to a2a or all_gather, or parallel.cp to 1"
        yield Finding(message, run.where("window_size", "cp_comm_type", "context_parallel_size"), fix)


@rule("qk-layer-scaling", "error", source="megatron/core/extensions/transformer_engine.py:1812, H200")
def scaled_scores_have_their_variable(run: ResolvedRun) -> Iterator[Finding]:
    stated = run.env.get("NVTE_APPLY_QK_LAYER_SCALING", "0") not in ("", "0")
    if run.uses_te and run.on("apply_query_key_layer_scaling") and not stated:
        message = "apply_query_key_layer_scaling needs NVTE_APPLY_QK_LAYER_SCALING=1 with Transformer Engine"
        fix = "add `env: {NVTE_APPLY_QK_LAYER_SCALING: 1}`"
        yield Finding(message, run.where("apply_query_key_layer_scaling"), fix)


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
        message = "Megatron 0.17 builds no model with Transformer Engine 2.5 to 2.9: it passes an argument of 2.10"
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

"""CUDA graphs that Megatron does not capture, or not beside what else a recipe asks for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fp8launch.check.resolved_run import ResolvedRun
from fp8launch.check.rule import Finding, rule
from fp8launch.check.rules.moe import DISPATCHER, dispatches_by_alltoall
from fp8launch.megatron.dtype_sizes import recomputed_modules
from fp8launch.megatron.graph_modules import graph_modules


def _whole_step_graph(run: ResolvedRun) -> bool:
    return run.value("cuda_graph_impl") == "full_iteration" or "full_iteration" in graph_modules(run.arguments)


@rule("graph-dispatch-sync", "error", source=f"{DISPATCHER}:612, H200")
def captured_preprocessing_knows_its_sizes(run: ResolvedRun) -> Iterator[Finding]:
    if not dispatches_by_alltoall(run) or "moe_preprocess" not in graph_modules(run.arguments):
        return
    names = ("moe_router_padding_for_quantization", "moe_expert_capacity_factor")
    dynamic = list(filter(run.on, names))
    if dynamic and not run.on("moe_pad_expert_input_to_capacity"):
        message = f"CUDA graphs of moe_preprocess cannot be used with {dynamic[0]}: the number of rows varies"
        yield Finding(
            message,
            run.where("cuda_graph_modules", dynamic[0]),
            f"remove moe_preprocess from cuda_graph_modules, or {dynamic[0]}",
        )


def _waiting_dispatcher(run: ResolvedRun) -> str | None:
    """The dispatcher of the experts, if the host waits for its counts of tokens."""
    if dispatches_by_alltoall(run) and not run.on("moe_pad_expert_input_to_capacity"):
        return "alltoall"
    if run.on("num_experts") and run.value("moe_token_dispatcher_type") == "allgather":
        return "allgather"
    return None


@rule(
    "full-graph-dispatch",
    "error",
    source=f"{DISPATCHER}:950 and 317 (allgather): the host waits for the experts' token counts",
)
def whole_graphs_do_not_wait(run: ResolvedRun) -> Iterator[Finding]:
    kind = _waiting_dispatcher(run)
    if kind and _whole_step_graph(run):
        message = f"a CUDA graph of the full iteration cannot contain the {kind} dispatcher: it waits for token counts"
        fix = "use moe/hybridep with moe/full_iteration_graph, or cuda_graph_impl transformer_engine"
        yield Finding(message, run.where("cuda_graph_impl", "moe_token_dispatcher_type"), fix)


@rule(
    "local-graph-mlp", "error", source="megatron/core/transformer/transformer_layer.py:566: is_moe_layer is set later"
)
def local_graphs_of_mlp_need_attention(run: ResolvedRun) -> Iterator[Finding]:
    modules = graph_modules(run.arguments)
    if (
        run.megatron >= (0, 19)
        and run.value("cuda_graph_impl") == "local"
        and "mlp" in modules
        and "attn" not in modules
    ):
        message = "Megatron 0.19 cannot build local CUDA graphs of mlp alone"
        fix = "add attn to cuda_graph_modules, or use cuda_graph_impl transformer_engine"
        yield Finding(message, run.where("cuda_graph_modules", "cuda_graph_impl"), fix)


@rule(
    "full-graph-pipeline",
    "error",
    source="megatron/core/pipeline_parallel/p2p_communication.py:416 waits for the GPU, which no capture may contain",
)
def whole_graphs_have_overlapped_messages(run: ResolvedRun) -> Iterator[Finding]:
    if not _whole_step_graph(run) or run.layout.pp == 1 or run.layout.vp > 1:
        return
    if run.loaded.recipe.launch.config.get("batch_p2p_sync", True) is False:
        return
    message = (
        f"a CUDA graph of the full iteration cannot contain the messages of PP {run.layout.pp} without virtual stages: "
        "Megatron waits for the GPU after each of them"
    )
    fix = "set parallel.vp to 2 or more, or use cuda_graph_impl transformer_engine"
    yield Finding(message, run.where("cuda_graph_impl", "pipeline_model_parallel_size"), fix)


@rule(
    "fsdp-local-graphs",
    "error",
    source="megatron/core/pipeline_parallel/schedules.py:862 captures after megatron_fsdp.py:1370 took the parameters",
)
def megatron_fsdp_captures_no_layers(run: ResolvedRun) -> Iterator[Finding]:
    if not run.on("use_megatron_fsdp") or run.value("cuda_graph_impl") != "local":
        return
    whole_step = "full_iteration" in graph_modules(run.arguments)
    if run.value("data_parallel_sharding_strategy") == "optim_grads_params" and not whole_step:
        message = (
            "Megatron captures local CUDA graphs at the end of a step, when FSDP has replaced the layers' parameters: "
            "the first capture ends in a KeyError"
        )
        fix = "remove cuda_graph_impl, or parallel.fsdp"
        yield Finding(message, run.where("cuda_graph_impl", "use_megatron_fsdp"), fix)


@rule(
    "local-graph-pipeline",
    "error",
    source="megatron/core/transformer/cuda_graphs.py:734 (541 in 0.17, 566 in 0.18) and Megatron-LM pull request 6168",
)
def local_graphs_have_one_stage(run: ResolvedRun) -> Iterator[Finding]:
    modules = graph_modules(run.arguments)
    if run.value("cuda_graph_impl") != "local" or run.layout.pp == 1 or _whole_step_graph(run):
        return
    if run.loaded.recipe.launch.config.get("deallocate_pipeline_outputs") is False:
        return
    if not modules or ("attn" in modules and not run.on("num_experts")):
        message = (
            f"local CUDA graphs of layers do not work with PP {run.layout.pp}: a stage's output is then a view, which "
            "Megatron refuses to free"
        )
        fix = "use cuda_graph_impl transformer_engine, or set `launch: {config: {deallocate_pipeline_outputs: false}}`"
        yield Finding(message, run.where("cuda_graph_impl", "pipeline_model_parallel_size"), fix)


def _local_graphs_of_layers(run: ResolvedRun) -> bool:
    """Whether Megatron captures whole layers: it does so for those whose attention is to be captured."""
    modules = graph_modules(run.arguments)
    local = run.value("cuda_graph_impl") == "local" and not _whole_step_graph(run)
    return local and (not modules or "attn" in modules)


def _captures_whole_expert_layers(run: ResolvedRun) -> bool:
    by_te = run.value("cuda_graph_impl") == "transformer_engine" and not graph_modules(run.arguments)
    return by_te or _local_graphs_of_layers(run)


@rule(
    "graph-dispatch-whole",
    "error",
    source=f"{DISPATCHER}:950, 612 and 317: the host waits for the experts' counts, H200",
)
def whole_layer_graphs_do_not_wait(run: ResolvedRun) -> Iterator[Finding]:
    kind = _waiting_dispatcher(run)
    if kind and _captures_whole_expert_layers(run):
        message = f"CUDA graphs of whole layers cannot contain the {kind} dispatcher, which waits for token counts"
        fix = "use cuda_graph_impl transformer_engine with cuda_graph_modules [attn, moe_router]"
        yield Finding(message, run.where("cuda_graph_impl", "moe_token_dispatcher_type"), fix)


@rule("graph-recompute", "error", source="transformer_engine/pytorch/distributed.py:416 (2.20.2), H200")
def local_graphs_recompute_no_mlp(run: ResolvedRun) -> Iterator[Finding]:
    quantized = run.value("fp8") or run.value("fp4")
    if quantized and _local_graphs_of_layers(run) and "mlp" in recomputed_modules(run.arguments):
        message = "local CUDA graphs cannot capture an MLP that is recomputed in FP8"
        fix = "remove mlp from recompute_modules, or use cuda_graph_impl transformer_engine"
        yield Finding(message, run.where("recompute_modules", "cuda_graph_impl"), fix)


@rule(
    "graph-latent-rope", "error", source="megatron/core/fusions/fused_mla_yarn_rope_apply.py:684 (0.18 and 0.19), H200"
)
def local_graphs_keep_fused_rotations(run: ResolvedRun) -> Iterator[Finding]:
    latent = run.on("multi_latent_attention") and run.on("apply_rope_fusion")
    if latent and _local_graphs_of_layers(run) and run.megatron[:2] >= (0, 18):
        message = "local CUDA graphs overwrite what the fused rotation of latent attention keeps for its backward pass"
        fix = "set no_rope_fusion, or use cuda_graph_impl transformer_engine"
        yield Finding(message, run.where("cuda_graph_impl", "multi_latent_attention"), fix)


@rule("graph-offload-recompute", "error", source="core/pipeline_parallel/fine_grained_activation_offload.py:1430, H200")
def captured_layers_offload_something(run: ResolvedRun) -> Iterator[Finding]:
    if not run.on("fine_grained_activation_offloading") or run.value("cuda_graph_impl") != "transformer_engine":
        return
    offloaded: Any = run.value("offload_modules") or ()
    captured = {"core_attn", "attn_proj", "qkv_linear"}.intersection(offloaded)
    left = captured - ({"core_attn"} & recomputed_modules(run.arguments))
    if "attn" in graph_modules(run.arguments) and captured and not left:
        message = "CUDA graphs of attn wait for offloading, but what offload_modules names of it is recomputed"
        fix = "remove core_attn from recompute_modules or from offload_modules"
        yield Finding(message, run.where("offload_modules", "recompute_modules", "cuda_graph_modules"), fix)


@rule("shared-overlap-graphs", "error", source="megatron/core/transformer/moe/shared_experts.py:73 (0.19), H200")
def captured_preprocessing_starts_no_shared_experts(run: ResolvedRun) -> Iterator[Finding]:
    if run.value("cuda_graph_impl") != "transformer_engine" or "moe_preprocess" not in graph_modules(run.arguments):
        return
    if not (
        dispatches_by_alltoall(run)
        and run.on("moe_shared_expert_overlap")
        and run.on("moe_shared_expert_intermediate_size")
    ):
        return
    if run.megatron[:2] >= (0, 19):
        message = "CUDA graphs of moe_preprocess would start the overlapped shared experts twice"
        fix = "remove moe_shared_expert_overlap, or moe_preprocess from cuda_graph_modules"
        yield Finding(message, run.where("moe_shared_expert_overlap", "cuda_graph_modules"), fix)


@rule("fsdp-te-graphs", "error", source="transformer_engine/pytorch/graph.py:394 (2.20.2; 342 in 2.16): hooks of FSDP")
def megatron_fsdp_is_not_captured_by_te(run: ResolvedRun) -> Iterator[Finding]:
    if not run.on("use_megatron_fsdp") or run.value("cuda_graph_impl") != "transformer_engine":
        return
    if run.value("data_parallel_sharding_strategy") == "optim_grads_params" and not _whole_step_graph(run):
        message = "Transformer Engine's CUDA graphs cannot capture layers with the hooks of Megatron-FSDP"
        yield Finding(
            message, run.where("cuda_graph_impl", "use_megatron_fsdp"), "remove cuda_graph_impl, or parallel.fsdp"
        )

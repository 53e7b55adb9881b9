"""How the model is cut over ranks: what Megatron finds only while it builds the model or in the first step."""

from __future__ import annotations

from collections.abc import Iterator

from fp8launch.check.facts import Facts
from fp8launch.check.rule import Finding, rule
from fp8launch.check.shape import (
    expert_ways,
    head_width,
    heads,
    query_groups,
    sequence_parallel,
    virtual_stages,
    widths,
)

_STATE = "megatron/core/parallel_state.py"


@rule("size-not-divisible", "error", source="megatron/core/tensor_parallel/layers.py: divide() while building; run")
def layers_divide(run: Facts) -> Iterator[Finding]:
    split = ("ffn_hidden_size", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size")
    for width in widths(run):
        if width.name in split and width.size is None:
            message = f"{width.name} {width.total} cannot be divided over {width.parts} tensor-parallel ranks"
            parts = "expert_tensor_parallel_size" if width.name == "moe_ffn_hidden_size" else ""
            where = run.where(*width.dests, parts, "tensor_model_parallel_size")
            yield Finding(message, where, f"make it a multiple of {width.parts}, or use less parallelism")


@rule("tensor-parallel-across-nodes", "warning", source="NVIDIA's parallelism guides: tensor parallelism within NVLink")
def tensors_stay_in_a_node(run: Facts) -> Iterator[Finding]:
    """GB200 and GB300 are joined by NVLink across nodes."""
    per_node = run.loaded.recipe.resources.gpus_per_node
    if run.layout.tp > per_node and not run.gpu.name.startswith("gb") and run.gpu.name != "cpu":
        message = f"TP {run.layout.tp} spans nodes of {per_node} GPUs: every layer would wait for the network"
        yield Finding(message, run.where("tensor_model_parallel_size"), f"use TP {per_node} or less, and more PP or CP")


@rule("query-groups", "error", source="run: shape error in the first forward pass; TE asserts the same")
def groups_divide_heads(run: Facts) -> Iterator[Finding]:
    if not run.on("group_query_attention"):
        return
    groups = query_groups(run)
    if groups < 1 or heads(run) % groups:
        message = f"{heads(run)} attention heads cannot share {groups} query groups evenly"
        yield Finding(message, run.where("num_query_groups"), "make num_query_groups a divisor of num_attention_heads")


@rule("expert-grid", "error", source=f"{_STATE}:879, when process groups are made")
def experts_divide_ranks(run: Facts) -> Iterator[Finding]:
    layout = run.layout
    # Experts lie over the ranks of a pipeline stage in a grid of their own, context parallelism included.
    size = expert_ways(run) * layout.ep * layout.pp
    if layout.world % size and (layout.ep > 1 or run.value("expert_tensor_parallel_size")):
        message = (
            f"{layout.world} GPUs cannot be divided into expert groups of "
            f"ETP {expert_ways(run)} x EP {layout.ep} x PP {layout.pp} = {size}"
        )
        fix = (
            f"use a multiple of {size} GPUs, or less expert parallelism (expert tensor parallelism is TP if not stated)"
        )
        yield Finding(message, run.where("expert_model_parallel_size", "expert_tensor_parallel_size"), fix)


@rule("optimizer-instances", "error", source=f"{_STATE}:922 and 1447, when process groups are made")
def optimizer_instances_divide(run: Facts) -> Iterator[Finding]:
    copies = run.integer("num_distributed_optimizer_instances", 1)
    ranks = run.layout.dp * run.layout.cp
    experts = run.layout.world // max(1, expert_ways(run) * run.layout.ep * run.layout.pp)
    for name, n in (("data", ranks), *((("expert data", experts),) if run.on("num_experts") else ())):
        if copies > 1 and n % copies:
            message = f"{copies} distributed optimizer instances cannot share {n} {name} parallel ranks evenly"
            yield Finding(message, run.where("num_distributed_optimizer_instances"), f"use a divisor of {n}")
            return


@rule("pipeline-split", "error", source="megatron/core/transformer/transformer_block.py get_num_layers_to_build")
def virtual_stages_divide_layers(run: Facts) -> Iterator[Finding]:
    """The validators ask this of every way to state stages but `num_virtual_stages_per_pipeline_rank` alone."""
    uneven = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers", "hybrid_layer_pattern")
    accounted = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
    stages, layers, pp = run.integer("num_virtual_stages_per_pipeline_rank"), run.integer("num_layers"), run.layout.pp
    if stages < 2 or pp < 2 or any(run.on(name) for name in (*uneven, *accounted)):
        return
    if layers % (pp * stages):
        message = f"{layers} layers cannot be divided into PP {pp} x VP {stages} = {pp * stages} equal stages"
        fix = "use another VP, pipeline_model_parallel_layout, or account_for_embedding/loss_in_pipeline_split"
        yield Finding(message, run.where("num_virtual_stages_per_pipeline_rank", "pipeline_model_parallel_size"), fix)


@rule("virtual-pipeline-batches", "error", source="megatron/core/pipeline_parallel/schedules.py:1133-1156; run")
def virtual_pipeline_has_its_batches(run: Facts) -> Iterator[Finding]:
    layout, stages = run.layout, virtual_stages(run)
    if layout.pp < 2 or stages < 2:
        return
    group = run.integer("microbatch_group_size_per_vp_stage") or layout.pp
    rest = layout.microbatches % group
    names = ("num_virtual_stages_per_pipeline_rank", "num_layers_per_virtual_pipeline_stage")
    where = run.where(*names, "pipeline_model_parallel_layout")
    if not layout.pp <= group <= layout.microbatches:
        message = (
            f"a virtual pipeline of PP {layout.pp} needs at least {group} micro batches a step, and has "
            f"{layout.microbatches} (global batch / micro batch / data parallel)"
        )
        yield Finding(message, where, f"raise batch.global to {group * layout.micro_batch * layout.dp} or more")
    elif 0 < rest < layout.pp:
        step = group * layout.micro_batch * layout.dp
        message = (
            f"{layout.microbatches} micro batches leave {rest} over after groups of {group}, fewer than PP {layout.pp}"
        )
        yield Finding(message, where, f"make batch.global a multiple of {step}")


@rule("sequence-not-divisible", "error", source="megatron/core/tensor_parallel/mappings.py:73 and 177, first forward")
def sequence_divides(run: Facts) -> Iterator[Finding]:
    sequence, layout = run.integer("seq_length"), run.layout
    if sequence_parallel(run) and sequence % layout.cp == 0 and sequence // layout.cp % layout.tp:
        message = (
            f"a sequence of {sequence} over CP {layout.cp} cannot be split over TP {layout.tp} sequence-parallel ranks"
        )
        step = layout.tp * layout.cp * (2 if layout.cp > 1 else 1)
        yield Finding(message, run.where("seq_length"), f"make batch.sequence a multiple of {step}")


@rule("local-layers", "error", source="run: Megatron's local layers refuse both; torch's norms, TEDotProductAttention")
def local_layers_do_not_split_sequences(run: Facts) -> Iterator[Finding]:
    if run.value("transformer_impl") != "local":
        return
    fix = "use `transformer_impl: transformer_engine`"
    if run.layout.cp > 1:
        message = "context parallelism needs Transformer Engine's attention, and transformer_impl is local"
        yield Finding(message, run.where("context_parallel_size"), fix)
    if sequence_parallel(run) and run.gpu.name == "cpu":
        message = "sequence parallelism needs norms that a CPU run does not have"
        yield Finding(message, run.where("sequence_parallel"), "use `parallel: {sequence: auto}`")


@rule("context-parallel-heads", "error", source="TransformerEngine context_parallel.py:4246: heads % cp_size == 0")
def all_to_all_divides_heads(run: Facts) -> Iterator[Finding]:
    layout, kind = run.layout, run.value("cp_comm_type")
    kinds = kind if isinstance(kind, list) else [kind]
    if layout.cp < 2 or "a2a" not in kinds or run.on("multi_latent_attention"):
        return
    n, groups = heads(run) // layout.tp, max(1, query_groups(run) // layout.tp)
    if n % layout.cp or groups % layout.cp:
        message = (
            f"cp_comm_type a2a deals heads out over CP {layout.cp}, and a rank has {n} query, {groups} key/value heads"
        )
        yield Finding(message, run.where("cp_comm_type"), "use cp_comm_type p2p, or a smaller CP or TP")


@rule("attention-head-width", "warning", source="cuDNN fused attention trains head widths up to 128; outcome not run")
def fused_attention_fits(run: Facts) -> Iterator[Finding]:
    if run.value("attention_backend") == "fused" and head_width(run) > 128 and not run.on("multi_latent_attention"):
        message = (
            f"attention_backend fused is asked for heads of width {head_width(run)}, and cuDNN may train only up to 128"
        )
        yield Finding(message, run.where("attention_backend", "kv_channels"), "use attention_backend auto")


@rule("per-token-loss-average", "error", source="megatron/core/distributed/distributed_data_parallel.py:179")
def per_token_loss_is_not_averaged(run: Facts) -> Iterator[Finding]:
    if run.on("calculate_per_token_loss") and run.on("ddp_average_in_collective"):
        message = "ddp_average_in_collective cannot average a loss that is calculated per token"
        yield Finding(message, run.where("ddp_average_in_collective"), "drop one of the two")


@rule("fsdp-average", "error", source="Megatron-Bridge switches it off; megatron_fsdp.py:378 of 0.19.2 fails on 2 H200")
def fsdp_does_not_average(run: Facts) -> Iterator[Finding]:
    if run.on("use_megatron_fsdp") and run.on("ddp_average_in_collective"):
        message = "ddp_average_in_collective is not supported with Megatron-FSDP: a model without experts ends at start"
        yield Finding(message, run.where("ddp_average_in_collective"), "set megatron.ddp_average_in_collective: null")


@rule("fsdp-not-sharding", "warning", source="megatron/core/distributed: no_shard is plain DDP, 0.17's default")
def fsdp_shards(run: Facts) -> Iterator[Finding]:
    if run.on("use_megatron_fsdp") and run.value("data_parallel_sharding_strategy") == "no_shard":
        message = "Megatron-FSDP with data_parallel_sharding_strategy no_shard shards nothing"
        fix = "use `parallel: {fsdp: megatron}`, or data_parallel_sharding_strategy: optim_grads_params"
        yield Finding(message, run.where("data_parallel_sharding_strategy", "use_megatron_fsdp"), fix)


@rule("fused-wgrad-needs-apex", "warning", source="megatron/core/tensor_parallel/layers.py:1070")
def fused_gradients_have_a_kernel(run: Facts) -> Iterator[Finding]:
    """fp8launch's own entry brings a replacement where APEX is missing; other scripts do not."""
    if run.on("gradient_accumulation_fusion") and run.value("transformer_impl") == "local" and not run.own_entry:
        message = "local layers fuse weight gradients with an extension of APEX, and stop where it is missing"
        yield Finding(message, run.where("transformer_impl"), "add `no_gradient_accumulation_fusion: true`")

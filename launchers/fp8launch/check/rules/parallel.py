"""Check how the model is divided over ranks, for errors that Megatron raises only when it builds the model or later."""

from __future__ import annotations

from collections.abc import Iterator

from fp8launch.check.gemm_shapes import heads, heads_fit, sequence_parallel, widths
from fp8launch.check.resolved_run import ResolvedRun
from fp8launch.check.rule import Finding, rule
from fp8launch.megatron.model_arithmetic import (
    expert_tensor_size,
    layer_kinds,
    parse_layout,
    query_groups,
    virtual_stages,
)
from fp8launch.wording import counted

_ATTENTION = {"attention", "latent attention"}


@rule("size-not-divisible", "error", source="megatron/core/tensor_parallel/layers.py: divide() while building; run")
def size_not_divisible(run: ResolvedRun) -> Iterator[Finding]:
    split = ("ffn_hidden_size", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size")
    for width in widths(run):
        if width.name in split and width.size is None:
            message = f"{width.name} {width.total} cannot be divided over {width.parts} tensor-parallel ranks"
            parts = "expert_tensor_parallel_size" if width.name == "moe_ffn_hidden_size" else ""
            where = run.where(*width.dests, parts, "tensor_model_parallel_size")
            yield Finding(message, where, f"make it a multiple of {width.parts}, or use less parallelism")


@rule(
    "attention-heads",
    "error",
    source="arguments:validate_args, transformer_config:TransformerConfig.__post_init__",
    says=r"num_attention_heads|num_query_groups",
)
def attention_heads(run: ResolvedRun) -> Iterator[Finding]:
    """If this rule fires, the other rules about heads report nothing, because their problems follow from it."""
    count, hidden, tp = heads(run), run.integer("hidden_size"), run.layout.tp
    if not count or not hidden or heads_fit(run) or not _ATTENTION & layer_kinds(run.arguments):
        return
    where = run.where("num_attention_heads", "hidden_size", "tensor_model_parallel_size")
    if count % tp:
        message = f"{count} attention heads cannot be divided over TP {tp}"
        fix = f"make model.num_attention_heads a multiple of {tp}, or use less tensor parallelism"
    else:
        message = f"hidden_size {hidden} cannot be divided into {count} attention heads"
        fix = "make model.num_attention_heads a divisor of model.hidden_size, or set model.kv_channels"
    yield Finding(message, where, fix)


@rule("expert-grid", "error", source="parallel_state:initialize_model_parallel, when process groups are made")
def expert_grid(run: ResolvedRun) -> Iterator[Finding]:
    layout = run.layout
    # Experts have a separate grid over the ranks of a pipeline stage, which includes context parallel ranks.
    size = expert_tensor_size(run.arguments) * layout.ep * layout.pp
    if size < 1:
        return
    if layout.world % size and (layout.ep > 1 or run.value("expert_tensor_parallel_size")):
        message = (
            f"{counted(layout.world, 'GPU')} cannot be divided into expert groups of "
            f"ETP {expert_tensor_size(run.arguments)} x EP {layout.ep} x PP {layout.pp} = {size}"
        )
        fix = (
            f"use a multiple of {size} GPUs, or less expert parallelism (expert tensor parallelism is TP if not stated)"
        )
        yield Finding(message, run.where("expert_model_parallel_size", "expert_tensor_parallel_size"), fix)


@rule("optimizer-instances", "error", source="parallel_state:initialize_model_parallel, when process groups are made")
def optimizer_instances(run: ResolvedRun) -> Iterator[Finding]:
    copies = run.integer("num_distributed_optimizer_instances", 1)
    ranks = run.layout.dp * run.layout.cp
    experts = run.layout.world // max(1, expert_tensor_size(run.arguments) * run.layout.ep * run.layout.pp)
    for name, n in (("data", ranks), *((("expert data", experts),) if run.on("num_experts") else ())):
        if copies > 1 and n % copies:
            message = f"{copies} distributed optimizer instances cannot share {n} {name} parallel ranks evenly"
            yield Finding(message, run.where("num_distributed_optimizer_instances"), f"use a divisor of {n}")
            return


@rule("pipeline-split", "error", source="transformer_block:get_num_layers_to_build")
def pipeline_split(run: ResolvedRun) -> Iterator[Finding]:
    """Check `num_virtual_stages_per_pipeline_rank`, and equal stages if Megatron's validators do not run."""
    uneven = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers", "hybrid_layer_pattern",
              "pipeline_model_parallel_layout")  # fmt: skip
    accounted = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
    stages, layers, pp = run.integer("num_virtual_stages_per_pipeline_rank"), run.integer("num_layers"), run.layout.pp
    least = 2
    if run.engine.validators == "none":
        stages, least = max(stages, 1), 1
    if stages < least or pp < 2 or any(map(run.on, (*uneven, *accounted))):
        return
    if layers % (pp * stages):
        message = f"{layers} layers cannot be divided into PP {pp} x VP {stages} = {pp * stages} equal stages"
        if stages == 1:
            message = f"{layers} layers cannot be divided into PP {pp} equal stages"
        fix = "use another VP, pipeline_model_parallel_layout, or account_for_embedding/loss_in_pipeline_split"
        yield Finding(message, run.where("num_virtual_stages_per_pipeline_rank", "pipeline_model_parallel_size"), fix)


@rule("pipeline-layout", "error", source="pipeline_parallel_layer_layout:PipelineParallelLayerLayout.__init__")
def pipeline_layout(run: ResolvedRun) -> Iterator[Finding]:
    """Only for engines without Megatron's validators, which check the layout themselves."""
    text, wanted = run.value("pipeline_model_parallel_layout"), run.integer("num_layers")
    if run.engine.validators != "none" or not isinstance(text, str) or not wanted:
        return
    pieces, where = parse_layout(text), run.where("pipeline_model_parallel_layout")
    if pieces is None:
        message = f"pipeline_model_parallel_layout '{text[:60]}' is not a layout of a pipeline"
        yield Finding(message, where, "write stages of E, t, m and L, such as `Ettt|tttL`")
        return
    layers = "".join(pieces)
    if len(pieces) % run.layout.pp:
        message = f"the layout has {len(pieces)} stages, which are not a multiple of PP {run.layout.pp}"
        yield Finding(message, where, "write as many stages for each pipeline rank")
        return
    if layers.count("t") != wanted or not (layers[0] == "E" and layers.count("L") == 1):
        message = f"the layout has {layers.count('t')} layers t, and the model {wanted}"
        yield Finding(message, where, "write one E first, a t for each layer, and one L")
        return
    virtual, stages = run.integer("num_virtual_stages_per_pipeline_rank"), len(pieces) // run.layout.pp
    if virtual and virtual != stages:
        message = f"the layout has {stages} stages for each of {run.layout.pp} pipeline ranks, but VP is {virtual}"
        place = run.where("num_virtual_stages_per_pipeline_rank", "pipeline_model_parallel_layout")
        yield Finding(message, place, f"set parallel.vp: {stages}")


@rule("virtual-pipeline-batches", "error", source="schedules:forward_backward_pipelining_with_interleaving; run")
def virtual_pipeline_batches(run: ResolvedRun) -> Iterator[Finding]:
    layout, stages = run.layout, virtual_stages(run.arguments, run.layout.pp)
    if layout.pp < 2 or stages < 2:
        return
    group = run.integer("microbatch_group_size_per_vp_stage") or layout.pp
    rest = layout.microbatches % group
    names = ("num_virtual_stages_per_pipeline_rank", "num_layers_per_virtual_pipeline_stage")
    where = run.where(*names, "pipeline_model_parallel_layout")
    if not layout.pp <= group <= layout.microbatches:
        message = (
            f"a virtual pipeline of PP {layout.pp} needs at least {group} micro batches per step, but has "
            f"{layout.microbatches} (global batch / micro batch / data parallel)"
        )
        yield Finding(message, where, f"raise batch.global to {group * layout.micro_batch * layout.dp} or more")
    elif 0 < rest < layout.pp:
        step = group * layout.micro_batch * layout.dp
        message = (
            f"{layout.microbatches} micro batches in groups of {group} leave a remainder of {rest}, which is less "
            f"than PP {layout.pp}"
        )
        yield Finding(message, where, f"make batch.global a multiple of {step}")


@rule("sequence-not-divisible", "error", source="mappings:_split_along_first_dim, first forward")
def sequence_not_divisible(run: ResolvedRun) -> Iterator[Finding]:
    sequence, layout = run.integer("seq_length"), run.layout
    if sequence_parallel(run) and sequence % layout.cp == 0 and sequence // layout.cp % layout.tp:
        message = (
            f"a sequence of {sequence} over CP {layout.cp} cannot be split over TP {layout.tp} sequence-parallel ranks"
        )
        step = layout.tp * layout.cp * (2 if layout.cp > 1 else 1)
        yield Finding(message, run.where("seq_length"), f"make batch.sequence a multiple of {step}")


@rule("context-parallel-heads", "error", source="transformer_engine.context_parallel:attn_forward_func_with_cp")
def context_parallel_heads(run: ResolvedRun) -> Iterator[Finding]:
    layout, kind = run.layout, run.value("cp_comm_type")
    kinds = kind if isinstance(kind, list) else [kind]
    if layout.cp < 2 or "a2a" not in kinds or run.on("multi_latent_attention") or not heads(run):
        return
    n, groups = heads(run) // layout.tp, max(1, query_groups(run.arguments) // layout.tp)
    if n % layout.cp or groups % layout.cp:
        message = (
            f"cp_comm_type a2a divides heads over CP {layout.cp}, but a rank has {n} query and {groups} key/value heads"
        )
        yield Finding(message, run.where("cp_comm_type"), "use cp_comm_type p2p, or a smaller CP or TP")

"""Check mixtures of experts for settings that fail when layers are built or in the first step."""

from __future__ import annotations

from collections.abc import Iterator

from fp8launch.check.resolved_run import ResolvedRun
from fp8launch.check.rule import Finding, rule
from fp8launch.megatron.architecture import EXPERTS, divided_model
from fp8launch.megatron.model_arithmetic import MOST_LAYERS, expert_frequency, hybrid_pattern


@rule("moe-group-top-k", "error", source="moe_utils:group_limited_topk: torch.topk inside a group")
def moe_group_top_k(run: ResolvedRun) -> Iterator[Finding]:
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


@rule("moe-layer-pattern", "error", source="gpt_layer_specs:get_gpt_decoder_layer_specs, building the model")
def moe_layer_pattern(run: ResolvedRun) -> Iterator[Finding]:
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


@rule("dense-stage-resume", "error", source="dist_checkpointing/dict_utils:merge, when a checkpoint is loaded; run")
def dense_stage_resume(run: ResolvedRun) -> Iterator[Finding]:
    """Check for a stage whose optimizer of experts is empty: Megatron (0.17 to 0.19) takes another stage's state."""
    half, checkpoints = run.on("bf16") or run.on("fp16"), run.on("save") or run.on("load")
    if run.layout.ep == 1 or not (half and checkpoints) or run.on("use_distributed_optimizer") or run.fsdp:
        return
    divided = divided_model(run.arguments, run.layout.world)
    if divided is None:
        return
    for rank, chunks in enumerate(divided.pipeline):
        kinds = "".join(divided.model.kinds[layer] for chunk in chunks for layer in chunk.layers)
        if EXPERTS not in kinds and not any(chunk.mtp for chunk in chunks):
            message = f"pipeline rank {rank} has no experts, so the run cannot resume without the distributed optimizer"
            fix = "set use_distributed_optimizer, or divide the layers so that every pipeline rank has experts"
            yield Finding(message, run.where("use_distributed_optimizer", "moe_layer_freq"), fix)
            return

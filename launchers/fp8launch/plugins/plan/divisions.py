"""Every legal division of a model over GPUs: TP, PP with virtual stages, CP, EP, FSDP and the micro batch."""

from __future__ import annotations

from collections.abc import Iterator

from fp8launch.hardware.quantization import quantization_recipes, requested
from fp8launch.megatron.model_arithmetic import (
    Arguments,
    hybrid_layers,
    layer_kinds,
    mamba_mixer,
    query_groups,
    virtual_stages,
    whole,
)
from fp8launch.plugins.plan.change import Change, Target, switched_off
from fp8launch.plugins.plan.execution import dispatcher
from fp8launch.plugins.plan.pipelines import pipelines

MICRO_BATCHES = (1, 2, 4, 8)
MOST_STAGES = 64


def divisions(args: Arguments, target: Target) -> Iterator[Change]:
    """Yield every legal division of a run with these arguments."""
    domain = target.speeds.device.links.domain
    for tp in _powers(min(domain, 8, target.gpus)):
        if target.gpus % tp or not _tensors_divide(args, tp):
            continue
        for pp in _divisors(target.gpus // tp, MOST_STAGES):
            for cp in _powers(target.gpus // (tp * pp)):
                if not _sequences_divide(args, tp, cp) or target.gpus % (tp * pp * cp):
                    continue
                dp = target.gpus // (tp * pp * cp)
                for micro in MICRO_BATCHES:
                    if target.global_batch % (micro * dp) == 0:
                        count = target.global_batch // (micro * dp)
                        yield from _divided(args, target, tp, pp, cp, micro, count)


def _divided(
    args: Arguments, target: Target, tp: int, pp: int, cp: int, micro: int, microbatches: int
) -> Iterator[Change]:
    change = Change(
        {
            "tensor_model_parallel_size": tp,
            "sequence_parallel": tp > 1,
            "context_parallel_size": cp,
            "micro_batch_size": micro,
        },
        {
            "parallel.tp": str(tp),
            "parallel.sequence": "auto",
            "parallel.cp": str(cp),
            "batch.micro": str(micro),
        },
    )
    if tp == 1:
        change = change.then(switched_off(args, "tp_comm_overlap"))
    splits = list(pipelines(args, pp, microbatches))
    for experts in _experts(args, target, tp, pp):
        for pipeline in splits:
            divided = change.then(experts).then(pipeline).then(_no_fsdp(args))
            yield divided.then(_no_expert_overlap(args, divided.args, pp))
        plain = not whole(args, "num_experts") and hybrid_layers(args) is None
        if pp == 1 and tp == 1 and plain and target.gpus // cp > 1:
            yield change.then(experts).then(splits[0]).then(_fsdp(args))


def _no_expert_overlap(args: Arguments, divided: Arguments, pp: int) -> Change:
    """Switch off the overlap of expert communication where Megatron-Core refuses it.

    It refuses the overlap without expert parallelism, and in pipelines without virtual stages
    (megatron/core/transformer/transformer_config.py).
    """
    if whole(divided, "expert_model_parallel_size") != 1 and (pp == 1 or virtual_stages(divided, pp) > 1):
        return Change()
    return switched_off(args, "overlap_moe_expert_parallel_comm", "delay_wgrad_compute")


def _no_fsdp(args: Arguments) -> Change:
    if not (args.get("use_megatron_fsdp") or args.get("use_torch_fsdp2")):
        return Change()
    return Change({"use_megatron_fsdp": False, "use_torch_fsdp2": False}, {"parallel.fsdp": "none"})


def _fsdp(args: Arguments) -> Change:
    if args.get("use_megatron_fsdp") and args.get("data_parallel_sharding_strategy") in (None, "optim_grads_params"):
        return Change()
    return Change(
        {
            "use_megatron_fsdp": True,
            "use_torch_fsdp2": False,
            "data_parallel_sharding_strategy": "optim_grads_params",
            "gradient_accumulation_fusion": False,
            "ddp_average_in_collective": False,
        },
        {
            "parallel.fsdp": "megatron",
            "megatron.no_gradient_accumulation_fusion": "true",
            "megatron.init_model_with_meta_device": "true",
            "megatron.ddp_average_in_collective": "null",
        },
    )


def _tensors_divide(args: Arguments, tp: int) -> bool:
    if tp == 1:
        return True
    sizes = [whole(args, "num_attention_heads"), query_groups(args), whole(args, "ffn_hidden_size") or tp]
    if args.get("multi_latent_attention"):
        sizes[1] = tp
    if "mamba" in layer_kinds(args):
        mamba = mamba_mixer(args)
        sizes += [mamba.heads, mamba.groups]
    if any(size is None or size % tp for size in sizes):
        return False
    multiple = 1
    recipe = quantization_recipes().get(requested(args))
    if recipe and recipe.feature_multiple:
        multiple = recipe.feature_multiple
    ffn, hidden = whole(args, "ffn_hidden_size") or 0, whole(args, "hidden_size") or 0
    return ffn // tp % multiple == 0 and hidden // tp % multiple == 0


def _sequences_divide(args: Arguments, tp: int, cp: int) -> bool:
    length = whole(args, "seq_length") or 0
    if cp == 1:
        return length % tp == 0
    if args.get("window_size") or cp > 16:
        return False
    if "mamba" in layer_kinds(args):
        # Context parallel ranks divide the heads, and groups or copies of them (mamba_context_parallel.py).
        mamba = mamba_mixer(args)
        groups = max(mamba.groups // tp, 1)
        if mamba.heads // tp % cp or (groups % cp and cp % groups):
            return False
    return length % (cp * 2 * tp) == 0


def _experts(args: Arguments, target: Target, tp: int, pp: int) -> Iterator[Change]:
    count = whole(args, "num_experts")
    if not count:
        yield Change()
        return
    for ep in _powers(min(count, target.gpus // pp)):
        if count % ep == 0 and (target.gpus // pp) % ep == 0:
            yield Change(
                {"expert_model_parallel_size": ep, "expert_tensor_parallel_size": 1},
                {"parallel.ep": str(ep), "parallel.etp": "1"},
            ).then(dispatcher(args, target, ep))


def _powers(most: int) -> list[int]:
    return [1 << i for i in range(max(most, 1).bit_length()) if 1 << i <= most]


def _divisors(number: int, most: int) -> list[int]:
    return [i for i in range(1, min(number, most) + 1) if number % i == 0]

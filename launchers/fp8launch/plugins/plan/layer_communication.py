"""Exposed communication of one layer and micro batch: tensor, context and expert parallel ranks."""

from __future__ import annotations

import math

from fp8launch.megatron.architecture import ATTENTION, MAMBA, Experts
from fp8launch.megatron.model_arithmetic import Arguments, whole
from fp8launch.plugins.plan.collectives import Group, exchange, gather, rotate
from fp8launch.plugins.plan.layer_terms import LayerTime, Seconds
from fp8launch.plugins.plan.workload import BF16, Workload, operand_bytes

# Copies of an output's gradient that sequence parallel ranks gather. MXFP8 and NVFP4 scale rows and columns separately,
# so they gather both. Rehearsals of Transformer Engine's own code count the same bytes (docs/rehearsal.md).
GATHERED_GRADIENTS = {"mxfp8": 2, "nvfp4": 2}
# Seconds that a collective of a few bytes takes. NCCL's rings and all-to-alls over NVLink need 10 to 20 microseconds.
LATENCY = 15e-6


def add_communication(run: Workload, time: LayerTime, kind: str, recipe: str) -> None:
    """Add the communication of one layer of the parts `kind` in a quantization recipe."""
    experts = run.model.experts_of(kind)
    if run.split.tp > 1:
        _add_tensor_parallel(run, time, kind, recipe)
    if run.split.cp > 1 and MAMBA in kind:
        _add_exchange_of_heads(run, time)
    if run.split.cp > 1 and ATTENTION in kind:
        _add_context_parallel(run, time)
    if experts is not None and run.split.ep > 1:
        _add_expert_parallel(run, time, experts)
    if experts is not None and run.split.etp > 1:
        group = Group(run.split.etp)
        rows = run.routed_rows(experts)
        once = gather(rows * run.model.hidden * BF16, group, run.speeds) + LATENCY
        _add(time, f"TP communication ({group.link(run.speeds)})", 2 * once, 2 * once)


def _add(time: LayerTime, name: str, forward: float, backward: float) -> None:
    time.forward[name] += forward
    time.backward[name] += backward


def _add_tensor_parallel(run: Workload, time: LayerTime, kind: str, recipe: str) -> None:
    group = Group(run.split.tp)
    experts = run.model.experts_of(kind)
    size = run.tokens * run.model.hidden
    summed = gather(size * BF16, group, run.speeds) + LATENCY
    gathered = summed
    if run.split.sequence_parallel:
        # Transformer Engine quantizes before it gathers (transformer_engine/pytorch/distributed.py).
        gathered = gather(size * operand_bytes(recipe), group, run.speeds) + LATENCY
    # A pair around each part; experts have one only for the shared expert.
    pairs = len(kind) - (experts is not None and not experts.shared)
    forward = pairs * (summed + gathered)
    backward = pairs * (summed + gathered * GATHERED_GRADIENTS.get(recipe, 1))
    if run.split.sequence_parallel:
        # The backward pass gathers the inputs of the column-parallel layers again.
        backward += pairs * gathered
    if run.on("tp_comm_overlap"):
        software = run.speeds.software
        exposed = software.tp_overlapped if run.split.tp > 2 else software.tp_overlapped_pair
        forward *= exposed
        backward *= exposed
    _add(time, f"TP communication ({group.link(run.speeds)})", forward, backward)


def _add_exchange_of_heads(run: Workload, time: LayerTime) -> None:
    """Add the exchange of heads for tokens before the convolution, and back after the scan.

    See mamba_context_parallel.py of Megatron-Core.
    """
    mamba = run.model.mamba
    if mamba is None:
        return
    group = Group(run.split.cp, run.split.tp)
    size = run.tokens * (mamba.projected + mamba.inner) / run.split.tp * BF16
    once = exchange(size, group, run.speeds) + LATENCY
    _add(time, f"CP communication ({group.link(run.speeds)})", once, once)


def attention_by_heads(args: Arguments) -> bool:
    """Whether context parallel ranks exchange heads for tokens instead of passing keys and values around a ring."""
    return args.get("cp_comm_type") in ("a2a", ["a2a"])


def _add_context_parallel(run: Workload, time: LayerTime) -> None:
    model, split, speeds = run.model, run.split, run.speeds
    group = Group(split.cp, split.tp)
    name = f"CP communication ({group.link(speeds)})"
    heads = 2 * max(model.groups / split.tp, 1) * model.channels
    values = model.channels
    if model.latent:
        heads = model.heads / split.tp * (model.latent.head + model.latent.rope + model.latent.value)
        values = model.latent.value
    size = run.tokens * heads * BF16
    if attention_by_heads(run.args):
        queries = run.tokens * 2 * model.heads / split.tp * model.channels * BF16
        once = exchange(size + queries, group, speeds) + LATENCY
        _add(time, name, once, once)
        return
    queries = run.tokens * model.heads / split.tp * values
    joined = split.cp * speeds.software.ring * queries * BF16 / speeds.memory
    _add(time, "elementwise", joined * 0.4, joined * 0.6)
    rounds = (split.cp - 1) * (rotate(size, group, speeds) + LATENCY)
    contention = speeds.fractions.contention
    _overlap(time.forward, name, rounds, time.forward["attention"], contention)
    _overlap(time.backward, name, 2 * rounds, time.backward["attention"], contention)


def _add_expert_parallel(run: Workload, time: LayerTime, experts: Experts) -> None:
    group = Group(run.split.ep, run.split.etp)
    name = f"EP communication ({group.link(run.speeds)})"
    once = _dispatch(run, experts, group) + LATENCY
    if run.on("overlap_moe_expert_parallel_comm"):
        _overlap_with_another_micro_batch(run, time, name, once)
        return
    _add(time, name, 2 * once, 2 * once)
    time.routed += 2 * once


def _overlap_with_another_micro_batch(run: Workload, time: LayerTime, name: str, once: float) -> None:
    """Add the dispatches and combinations that the passes of another micro batch do not hide.

    Each runs next to one part of a layer: the backward combination next to attention's forward pass, both dispatches
    next to both passes of the experts, and the forward combination next to attention's backward pass
    (combined_1f1b.py and model_chunk_schedule_plan.py of Megatron-Core).
    """
    passes = []
    for passed in (time.forward, time.backward):
        experts = sum(part for term, part in passed.items() if "expert" in term)
        passes.append((sum(passed.values()) - experts, experts))
    (attention, experts), (attention_back, experts_back) = passes
    contention = run.speeds.fractions.contention
    if Group(run.split.ep, run.split.etp).link(run.speeds) == "network":
        contention = run.speeds.software.experts_overlapped
    _overlap(time.backward, name, once, attention, contention)
    _overlap(time.forward, name, once, experts_back, contention)
    _overlap(time.backward, name, once, experts, contention)
    _overlap(time.forward, name, once, attention_back, contention)


def _dispatch(run: Workload, experts: Experts, group: Group) -> float:
    """Return the seconds to send the tokens of a micro batch to their experts, or back.

    An all-to-all sends a token to each of its experts. DeepEP and HybridEP send it once to each NVLink domain that has
    one of its experts, and there once to each rank that has one (https://github.com/deepseek-ai/DeepEP,
    "asymmetric-domain bandwidth forwarding").
    """
    token = run.own_tokens * (experts.latent or run.model.hidden) * BF16
    if not run.packs_tokens:
        if run.pads_to_capacity and run.capacity is not None:
            token *= run.capacity
        return exchange(experts.top_k * token, group, run.speeds)
    inside = group.inside(run.speeds.device.links.domain)
    domains = group.size / inside
    near = _reached(run, experts, group.size) * token * (inside - 1) / inside
    far = _reached(run, experts, domains) * token * (domains - 1) / domains
    return max(near / run.speeds.nvlink, far / run.speeds.network)


def permutation_passes(run: Workload, experts: Experts) -> float:
    """Return the passes over a rank's routed rows that order them by expert, for one direction.

    An all-to-all moves a copy of a token for each of its experts: one pass makes the copies and one sums them up. A
    rank with several experts also sorts the received copies by expert, and back after the experts. DeepEP and HybridEP
    send a token once to each rank, which copies it for each of its experts there.

    See token_dispatcher.py of Megatron-Core.
    """
    if run.packs_tokens:
        return 2 + 2 * _reached(run, experts, run.split.ep) / experts.top_k
    tokens = 2 / experts.top_k
    if experts.count > run.split.ep:
        return 6 + tokens
    return 2 + tokens


def _reached(run: Workload, experts: Experts, places: float) -> float:
    """Return to how many of `places`, over which all experts are divided, a token is sent on average.

    A router that first chooses groups of experts only sends tokens to the places of these groups.
    """
    groups, limit = whole(run.args, "moe_router_num_groups"), whole(run.args, "moe_router_group_topk")
    free = _distinct(places, experts.top_k)
    if not groups or not limit or min(groups, limit) < 1:
        return free
    if places < groups:
        return min(free, limit)
    return min(free, limit * _distinct(places / groups, experts.top_k / limit))


def _distinct(places: float, drawn: float) -> float:
    """Return the expected number of different places if `drawn` of them are drawn at random."""
    return places * (1 - math.pow(1 - 1 / places, drawn))


def _overlap(into: Seconds, name: str, link: float, window: float, contention: float) -> None:
    """Add communication that computation of `window` seconds hides: the rest, or the cost of contention."""
    into[name] += max(link - window, contention * link)

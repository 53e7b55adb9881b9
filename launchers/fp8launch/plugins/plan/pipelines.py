"""Splits of a model's layers over pipeline stages: even ones, and ones with a lighter last stage."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from fp8launch.megatron.architecture import Chunk
from fp8launch.megatron.model_arithmetic import Arguments, hybrid_layers, layer_count, whole
from fp8launch.plugins.plan.change import Change, cleared, flags, switched_off

MOST_VIRTUAL = 20
# The most layers of the largest stage relative to an even split.
UNEVEN = 1.06
# An uneven split must make the slowest stage faster by at least this share.
WORTH = 0.005

_OF_ONE_PIPELINE = (
    "pipeline_model_parallel_layout",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "num_layers_per_virtual_pipeline_stage",
)


def pipelines(args: Arguments, pp: int, microbatches: int) -> Iterator[Change]:
    """Yield the splits of the layers over `pp` stages, without and with virtual stages."""
    layers, mtp = layer_count(args) or 0, whole(args, "mtp_num_layers") or 0
    # The recipe's own split fits its own number of stages only.
    size = (
        cleared(args, *_OF_ONE_PIPELINE)
        .then(switched_off(args, "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"))
        .then(Change({"pipeline_model_parallel_size": pp}, {"parallel.pp": str(pp)}))
    )
    # Megatron refuses this overlap without virtual stages.
    plain = size.then(switched_off(args, "overlap_param_gather_with_optimizer_step"))
    # Without overlap of the transfers, two stages may not interleave, either.
    fewest = 2 if args.get("overlap_p2p_comm", True) else 3
    interleaves = pp >= fewest and microbatches % pp == 0
    if hybrid := hybrid_layers(args):
        # The layer pattern states where stages begin. If it does not, stages are even and not virtual.
        pieces = len(hybrid.segments)
        divided = layers
        if pieces > 1:
            divided = pieces
        if divided % pp == 0 and (pieces <= pp or interleaves):
            yield (size if pieces > pp else plain).then(_virtual(1))
        return
    most_virtual = 1
    if interleaves:
        most_virtual = MOST_VIRTUAL
    for vp in range(1, most_virtual + 1):
        pieces = pp * vp
        if pieces > layers + 2:
            return
        # Embedding and loss may each replace a layer. More uneven stages would wait for the largest one.
        if -(-layers // pieces) * pieces > UNEVEN * (layers + 2):
            continue
        split = _virtual(vp)
        if pp > 1 and (layers % pieces or mtp):
            split = _of_layout(stage_layout(layers, mtp, pieces))
        yield (size if vp > 1 else plain).then(split)


def _virtual(stages: int) -> Change:
    """Split evenly into this number of virtual stages on each rank."""
    if stages == 1:
        return Change({"num_virtual_stages_per_pipeline_rank": None}, {"parallel.vp": "null"})
    return Change({"num_virtual_stages_per_pipeline_rank": stages}, {"parallel.vp": str(stages)})


def stage_layout(layers: int, mtp: int, pieces: int) -> str:
    """Return Megatron's notation for the most even layout. If some pieces are smaller, the last and first are."""
    smaller = -layers % pieces
    order = [pieces - 1, 0, *range(pieces - 2, 0, -1)]
    counts = [-(-layers // pieces)] * pieces
    for i in range(smaller):
        counts[order[i % pieces]] -= 1
    return _layout(counts, mtp)


def _layout(counts: Sequence[int], mtp: int) -> str:
    """Return Megatron's notation for a pipeline layout with these numbers of layers per piece."""
    words = list(map(_letters, counts))
    words[0] = "E" + words[0]
    text = ""
    for word, alike in itertools.groupby(words[:-1]):
        times = len(list(alike))
        if times > 1:
            text += f"({word}|)*{times},"
        else:
            text += f"{word}|"
    return text + words[-1] + "m" * mtp + "L"


def _letters(layers: int) -> str:
    if layers <= 1:
        return "t" * layers
    return f"t*{layers}"


def _of_layout(text: str) -> Change:
    return flags(pipeline_model_parallel_layout=text).then(_virtual(1))


def lighter_last_stage(pipeline: Sequence[Sequence[Chunk]], seconds: Sequence[float]) -> Change | None:
    """Return a split with fewer layers on the last stage, which also has the output layer, loss and MTP layers.

    `seconds` are the times of the stages of `pipeline`. None if no split makes the slowest stage faster.
    """
    held = [sum(len(chunk.layers) for chunk in chunks) for chunks in pipeline]
    layers, others, virtual = sum(held), len(held) - 1, len(pipeline[0])
    if not others or not all(held):
        return None
    # A stage between the ends has layers only, so its time gives the time of a layer.
    layer = seconds[others // 2] / held[others // 2]
    rest = seconds[-1] - layer * held[-1]
    fastest, counts = max(seconds) * (1 - WORTH), None
    even = layers // (virtual * len(held))
    sizes = {0}
    if virtual > 1:
        sizes = {max(even, 1), even + 1}
    for each in sizes:
        # All pieces but the last one of each stage have the same size, and the last ones differ by one layer at most.
        # In the interleaved schedule stages wait for one another in every turn, so an uneven turn costs its slowest
        # piece. Only the turn with the output layer gains from being uneven.
        before = each * (virtual - 1)
        for last in range(held[-1] - before + 1):
            spread = layers - before * len(held) - last
            if spread < others:
                break  # every piece but the last has a layer
            fill, more = divmod(spread, others)
            if virtual > 1 and not each - 1 <= fill <= each + (each > 1) - (more > 0):
                continue
            slowest = max((before + fill + (more > 0)) * layer, (before + last) * layer + rest)
            if slowest < fastest:
                # The first stages hold the activations of most micro batches, so later stages take the extra layers.
                end = [fill] * (others - more) + [fill + 1] * more + [last]
                fastest, counts = slowest, [each] * (len(held) * (virtual - 1)) + end
    if counts is None:
        return None
    return _of_layout(_layout(counts, pipeline[-1][-1].mtp))

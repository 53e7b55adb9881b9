"""The smallest layout with the same kinds of parallelism: TP 8 x PP 16 x EP 64 becomes TP 2 x PP 2 x EP 2."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from fp8launch.engines.base import Layout
from fp8launch.megatron.arguments import FlagValue
from fp8launch.megatron.model_arithmetic import expert_tensor_size, whole
from fp8launch.plugins.prove.settings import CAPACITY, compares_tensor_parallel, masks_documents

# Processes on this machine. Fewer kinds are compared where the kinds of a recipe together need more ranks.
MOST_RANKS = 8
# Micro batches per pipeline: enough for warm-up, steady state and cool-down of two stages.
MICROBATCHES = 4


@dataclass(frozen=True)
class Reduced:
    """The layout of a proof. `etp` is the tensor parallel size of experts; `lost` names kinds that did not fit.

    `instances` is the number of groups of data-parallel ranks that each hold all of the optimizer, and `fsdp` whether
    Megatron-FSDP divides weights or their state.
    """

    layout: Layout
    etp: int
    lost: tuple[str, ...] = ()
    instances: int = 1
    fsdp: bool = False

    @property
    def text(self) -> str:
        text = layout_text(self.layout, self.etp)
        if self.fsdp:
            text += ", Megatron-FSDP"
        if self.instances > 1:
            text += f", {self.instances} optimizer instances"
        return text


def layout_text(layout: Layout, etp: int | None = None) -> str:
    """Describe a layout: `TP 2 x PP 2 (2 virtual stages) x DP 2, EP 2`."""
    sizes = [("TP", layout.tp), ("PP", layout.pp), ("CP", layout.cp), ("DP", layout.dp)]
    parts = []
    for name, size in sizes:
        if size > 1:
            parts.append(f"{name} {size}")
            if name == "PP" and layout.vp > 1:
                parts[-1] += f" ({layout.vp} virtual stages)"
    text = " x ".join(parts) or "1 rank"
    if layout.ep > 1:
        text += f", EP {layout.ep}"
    if etp is not None and etp != layout.tp:
        text += f", ETP {etp}"
    return text


@dataclass(frozen=True)
class _Sizes:
    """Sizes of a reduced layout that a comparison of two layouts may raise."""

    tp: int
    pp: int
    ep: int
    etp: int
    vp: int
    cp: int = 1


def reduce_layout(values: Mapping[str, FlagValue], layout: Layout, context_parallel: bool = True) -> Reduced:
    """Reduce a layout, without context parallelism if it is not wanted."""
    sizes = _sizes(values, layout)
    tp, pp, ep, etp, vp = (min(size, 2) for size in (sizes.tp, sizes.pp, sizes.ep, sizes.etp, sizes.vp))
    cp = min(layout.cp, 2) if context_parallel else 1
    if masks_documents(values) and layout.pp > 2 and vp == 1:
        # Megatron gives the mask to the first and the last stage only.
        pp = 3
    if values.get("no_overlap_p2p_communication") and layout.pp > 2 and vp > 1 and tp * cp <= 2:
        # Megatron interleaves two stages only with overlapped transfers.
        pp = 4
    # Experts stay divided as dense layers are, or otherwise.
    return _reduced(values, layout, _Sizes(tp, pp, ep, tp if sizes.etp == sizes.tp else etp, vp, cp))


def reduce_pair(
    values: Mapping[str, FlagValue], layout: Layout, other_values: Mapping[str, FlagValue], other_layout: Layout
) -> tuple[Reduced, Reduced]:
    """Reduce two layouts of one model. Of sizes that differ, the larger is twice the smaller.

    That is 4 and 2 if both are kinds of parallelism and there are not too many ranks, else 2 and 1.
    """
    sizes, others = _sizes(values, layout), _sizes(other_values, other_layout)
    for larger in (4, 2):
        found: tuple[dict[str, int], dict[str, int]] = ({}, {})
        for name in ("tp", "pp", "ep", "etp", "vp"):
            pair = getattr(sizes, name), getattr(others, name)
            top = larger if min(pair) > 1 else 2
            for size, place in zip(pair, found, strict=True):
                place[name] = min(size, 2) if pair[0] == pair[1] else top if size == max(pair) else top // 2
        both = (
            _reduced(values, layout, _Sizes(**found[0])),
            _reduced(other_values, other_layout, _Sizes(**found[1])),
        )
        if all(reduced.layout.world <= MOST_RANKS for reduced in both):
            break
    return both


def _sizes(values: Mapping[str, FlagValue], layout: Layout) -> _Sizes:
    tp = layout.tp if compares_tensor_parallel(values) else 1
    etp = expert_tensor_size(values) if values.get("num_experts") else tp
    return _Sizes(tp, layout.pp, layout.ep, etp, layout.vp)


def _reduced(values: Mapping[str, FlagValue], layout: Layout, sizes: _Sizes) -> Reduced:
    experts = bool(values.get("num_experts"))
    tp, pp, ep, small_etp, cp = sizes.tp, sizes.pp, sizes.ep, sizes.etp, sizes.cp
    etp = _sizes(values, layout).etp
    ranks_of_experts = small_etp * ep
    dp = 2 if layout.dp > 1 else 1
    lost = []
    if dp > 1 and (cp > 1 or pp > 2) and tp * pp * cp * dp > MOST_RANKS:
        dp = 1
        lost.append(f"data parallelism ({layout.dp})")
    while tp * cp * dp % ranks_of_experts:
        dp += 1
    expert_dp = layout.tp * layout.cp * layout.dp // (etp * layout.ep)
    if experts and expert_dp == 1:
        # Every expert is on one rank, so that FSDP does not divide it.
        ep = tp * cp * dp // small_etp
    elif experts and tp * cp * dp == ranks_of_experts:
        if tp * pp * cp * dp * 2 <= MOST_RANKS:
            tp, cp, dp = _doubled(layout, tp, cp, dp)
        else:
            lost.append(f"data parallelism of experts ({expert_dp})")
    instances = whole(values, "num_distributed_optimizer_instances") or 1
    smallest = min(layout.dp * layout.cp, expert_dp) if experts else layout.dp * layout.cp
    # Keep more than one data parallel rank per instance if the recipe has more.
    if smallest > instances > 1 and min(dp * cp, tp * cp * dp // ranks_of_experts) == 2:
        if tp * pp * cp * dp * 2 <= MOST_RANKS:
            tp, cp, dp = _doubled(layout, tp, cp, dp)
        else:
            lost.append(f"data parallelism within an optimizer instance ({smallest // instances})")
    if layout.tp > tp == 1:
        lost.append(f"tensor parallelism of sparse attention ({layout.tp})")
    if layout.cp > cp == 1:
        lost.append(f"context parallelism ({layout.cp})")
    vp = sizes.vp if pp > 1 else 1
    microbatches = min(layout.microbatches, MICROBATCHES if pp > 1 else 2)
    if vp > 1:
        microbatches = max(MICROBATCHES, pp)
    batch = layout.micro_batch * dp * microbatches
    small = replace(
        layout, world=tp * pp * cp * dp, tp=tp, pp=pp, vp=vp, cp=cp, ep=ep, dp=dp, global_batch=batch,
        microbatches=microbatches,
    )  # fmt: skip
    if values.get(CAPACITY) and splits_sequences(small):
        lost.append(f"tokens dropped over capacity ({values[CAPACITY]}), because each rank decides on its own")
    return Reduced(small, small_etp, tuple(lost), min(instances, 2), bool(values.get("use_megatron_fsdp")))


def splits_sequences(layout: Layout) -> bool:
    """Return whether each rank routes only a part of a sequence."""
    return layout.tp * layout.cp > 1


def _doubled(layout: Layout, tp: int, cp: int, dp: int) -> tuple[int, int, int]:
    """Double data parallelism, or another size that was reduced if the layout has no data parallelism.

    Some losses depend on the data-parallel size, so it stays 1 if possible.
    """
    if layout.dp == 1 and 1 < cp < layout.cp:
        return tp, 2 * cp, dp
    if layout.dp == layout.cp == 1 and tp < layout.tp:
        return 2 * tp, cp, dp
    return tp, cp, 2 * dp

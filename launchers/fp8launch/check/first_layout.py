"""A first layout for a recipe: the one with the least overhead whose estimated memory fits the GPU.

The order is a rule of thumb, good for a first run: recomputation costs up to a third of a step, and each doubling of
tensor, pipeline or expert parallelism a few percent. Only measuring says what is fastest (docs/tuning.md).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from fp8launch.check.memory import run_estimate
from fp8launch.check.resolved_run import ResolvedRun
from fp8launch.megatron.memory import MIB, TIGHT

# Share of a step that each doubling of a parallelism is assumed to cost, and recomputation of a part of the layers.
DOUBLING = {"tp": 0.08, "pp": 0.06, "ep": 0.03}
RECOMPUTATION = {"none": 0.0, "quarter": 0.08, "all": 0.33}


@dataclass(frozen=True)
class FirstLayout:
    """Sizes of tensor, pipeline and expert parallelism, and the layers that are recomputed; `gib` is the estimate."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    recompute: str = "none"
    recompute_layers: int = 0
    gib: float | None = None

    @property
    def overhead(self) -> float:
        """The assumed share of a step that this layout costs."""
        doublings = sum(share * math.log2(getattr(self, name)) for name, share in DOUBLING.items())
        return doublings + RECOMPUTATION[self.recompute]

    @property
    def flags(self) -> dict[str, object]:
        """The Megatron flags of the recomputation."""
        if self.recompute == "none":
            return {}
        method = {"quarter": "block", "all": "uniform"}[self.recompute]
        layers = self.recompute_layers
        return {"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": layers}


def first_layout(run: ResolvedRun) -> FirstLayout | None:
    """Return the first layout for a run that was resolved without any parallelism; None where nothing fits."""
    capacity = TIGHT * run.gpu.memory_gib * 1024 * MIB
    for layout in sorted(_candidates(run), key=lambda one: (one.overhead, one.tp, one.pp)):
        found = run_estimate(run, _arguments(layout))
        if found is None:
            return layout  # a model that is not counted
        if found.total <= capacity:
            return replace(layout, gib=found.total / 2**30)
    return None


def _arguments(layout: FirstLayout) -> dict[str, object]:
    return {
        "tensor_model_parallel_size": layout.tp,
        "sequence_parallel": layout.tp > 1,
        "pipeline_model_parallel_size": layout.pp,
        "expert_model_parallel_size": layout.ep,
        **layout.flags,
    }


def _candidates(run: ResolvedRun) -> Iterator[FirstLayout]:
    """Yield the layouts that divide the model and the GPUs; tensor and expert parallelism stay within a node."""
    world, per_node = run.layout.world, run.loaded.recipe.resources.gpus_per_node
    layers, heads = run.integer("num_layers"), run.integer("num_attention_heads")
    groups = heads
    if run.on("group_query_attention"):
        groups = run.integer("num_query_groups")
    experts = run.integer("num_experts")
    for tp in _powers(min(8, per_node)):
        if heads % tp or groups % tp or per_node % tp or (experts and tp > 1):
            continue
        for pp in _powers(min(16, world // tp)):
            if layers % pp or world % (tp * pp):
                continue
            for ep in _powers(min(per_node, world // pp)):
                if experts % ep or (world // pp) % ep or (ep > 1 and not experts):
                    continue
                yield FirstLayout(tp, pp, ep)
                yield FirstLayout(tp, pp, ep, "quarter", max(layers // pp // 4, 1))
                yield FirstLayout(tp, pp, ep, "all", 1)


def _powers(limit: int) -> list[int]:
    return [2**exponent for exponent in range(max(limit, 1).bit_length())]

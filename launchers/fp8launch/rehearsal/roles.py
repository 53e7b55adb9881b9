"""The ranks of a run that do different things, so that a few stand for all."""

from __future__ import annotations

from dataclasses import dataclass

from fp8launch.engines.base import Layout


@dataclass(frozen=True)
class Role:
    """A rank and what it stands for."""

    rank: int
    name: str


def roles_of(layout: Layout) -> list[Role]:
    """First, second and last pipeline stage, each as the first rank of its TP, CP, EP and DP groups, and the very last
    rank of the run, which is the last of all its groups.

    Megatron numbers ranks by tensor, context, data and pipeline parallel position, the first running fastest
    (megatron/core/parallel_state.py, order "tp-cp-ep-dp-pp").
    """
    stage_ranks = layout.world // layout.pp
    found = []
    if layout.pp == 1:
        found.append(Role(0, "first rank"))
    else:
        found.append(Role(0, "first stage"))
    if layout.pp > 2:
        found.append(Role(stage_ranks, "second stage"))
    if layout.pp > 1:
        found.append(Role((layout.pp - 1) * stage_ranks, "last stage"))
    if stage_ranks > 1:
        found.append(Role(layout.world - 1, "last rank"))
    return found

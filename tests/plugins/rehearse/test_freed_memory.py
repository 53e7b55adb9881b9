"""Memory that offloading frees may be read by nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("torch")

import torch

from fp8launch.check.checker import check_all
from fp8launch.cluster.profile import Cluster
from fp8launch.job.prepared import prepare
from fp8launch.plugins.rehearse.freed_memory import guarded
from fp8launch.plugins.rehearse.layer import with_rehearsal
from fp8launch.plugins.rehearse.rehearse import roles_of

OFFLOADED = """
name: offloaded
extends: [models/deepseek_v3, parts/pretrain, parts/distributed_optimizer, precision/bf16, hardware/h200, moe/alltoall]
model: {num_layers: 3, moe_layer_freq: "[0]+[1]*2"}
parallel: {ep: 8}
megatron: {fine_grained_activation_offloading: true, offload_modules: [attn_norm], recompute_granularity: null}
env: {NVTE_CPU_OFFLOAD_V1: 1}
batch: {micro: 1, global: 8, sequence: 4096}
train: {iterations: 3, lr: 3.0e-4, min_lr: 3.0e-5, warmup: 1}
resources: {nodes: 1, gpus_per_node: 8}
"""
RECOMPUTED = OFFLOADED.replace(
    "recompute_granularity: null",
    "recompute_granularity: full, recompute_method: uniform, recompute_num_layers: 1",
)


def test_views_and_sizes_are_there_and_values_are_not() -> None:
    tensor = torch.ones(4, 2)
    with guarded(True):
        assert (tensor + 1).sum() == 16
        tensor.untyped_storage().resize_(0)
        assert tensor.view(8).shape == (8,) and torch.empty_like(tensor).shape == (4, 2)
        with pytest.raises(RuntimeError, match="an illegal memory access"):
            tensor.add(1)


@pytest.mark.train
@pytest.mark.parametrize(("recipe", "expected"), [(OFFLOADED, "passed"), (RECOMPUTED, "refused")])
def test_full_recompute_does_not_find_an_input_that_was_freed(
    write: Callable[[str, str], str], monkeypatch: pytest.MonkeyPatch, recipe: str, expected: str
) -> None:
    """On H200 the second ended in the norm of a recomputed layer, as its rehearsal does."""
    monkeypatch.setattr("fp8launch.plugins.rehearse.rehearse.roles_of", lambda layout: roles_of(layout)[:1])
    run = prepare(write("r.yaml", recipe))
    [result] = with_rehearsal([run], check_all([run], layers=("schema",)), Cluster())
    [role] = result.extra["rehearsal"].roles
    assert role.result == expected, role
    if expected == "refused":
        assert "an illegal memory access" in str(role.reason)

"""The same recipe on another number of nodes: weak scaling grows the batch, strong scaling keeps it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support import only, refused

from fp8launch.diagnostics import ANSWER_IS_NO
from fp8launch.job.prepared import Prepared, prepare

Write = Callable[[str, str], str]


def size(one: Prepared) -> tuple[int, int, int]:
    """Nodes, global batch, data parallel size."""
    return one.loaded.recipe.resources.nodes, one.layout.global_batch, one.layout.dp


@pytest.mark.parametrize(("nodes", "batch"), [(1, 128), (2, 256), (3, 384), (64, 8192)])
def test_weak_scaling_grows_the_batch_with_the_nodes(nodes: int, batch: int) -> None:
    assert size(prepare("llama8b_fp8", nodes=nodes)) == (nodes, batch, 8 * nodes)


def test_weak_scaling_counts_from_the_recipes_own_nodes(write: Write) -> None:
    file = write("r.yaml", "name: r\nbatch: {micro: 1, global: 64}\nresources: {nodes: 4, gpus_per_node: 2}\n")
    assert size(prepare(file, nodes=1)) == (1, 16, 2)
    assert size(prepare(file, nodes=8)) == (8, 128, 16)


def test_strong_scaling_keeps_the_batch(write: Write) -> None:
    assert size(prepare("llama8b_fp8", ["batch.scaling=strong"], nodes=4)) == (4, 128, 32)


def test_a_batch_that_is_given_as_a_flag_scales_too(write: Write) -> None:
    text = "name: r\nmegatron: {micro-batch-size: 1, global-batch-size: 16}\nresources: {gpus_per_node: 4}\n"
    assert size(prepare(write("r.yaml", text), nodes=2)) == (2, 32, 8)


def test_without_nodes_nothing_changes() -> None:
    assert size(prepare("llama8b_fp8")) == (1, 128, 8)
    assert prepare("llama8b_fp8", nodes=1).args.argv == prepare("llama8b_fp8").args.argv


def test_overrides_are_the_base_that_scales() -> None:
    assert size(prepare("llama8b_fp8", ["batch.global=64"], nodes=2)) == (2, 128, 16)


def test_a_batch_that_does_not_scale_to_a_whole_number(write: Write) -> None:
    file = write("r.yaml", "name: r\nbatch: {micro: 1, global: 10}\nresources: {nodes: 4, gpus_per_node: 1}\n")
    problem = only(refused(prepare, file, nodes=1))
    assert (problem.code, problem.where) == ("batch-size", f"{file}:2")


def test_strong_scaling_stops_where_the_batch_no_longer_divides() -> None:
    problem = only(refused(prepare, "llama8b_fp8", ["batch.scaling=strong"], nodes=32, exit_code=ANSWER_IS_NO))
    assert (problem.code, problem.fix) == ("batch-size", "use 256")


def test_a_recipe_without_a_batch_scales_too(write: Write) -> None:
    file = write("r.yaml", "name: r\nmodel: {num_layers: 1}\nresources: {gpus_per_node: 2}\n")
    assert size(prepare(file, nodes=3)) == (3, 6, 6)

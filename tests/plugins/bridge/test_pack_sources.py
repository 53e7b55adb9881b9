"""Recipes that cite a run of Megatron-Bridge against that run: what differs is stated here, with its reason."""

from __future__ import annotations

from pathlib import Path

import pytest
from pack_support import HEADLINE, name_of

from fp8launch.job.prepared import prepare
from fp8launch.plugins.bridge import attributes
from fp8launch.plugins.bridge.index import BridgeRecipe
from fp8launch.plugins.bridge.published import recipe_of, rows
from fp8launch.recipe.load import load_recipe

# How the GPUs are divided, and what a step computes, keeps and sends. Left out: learning rates of throughput runs, what
# Bridge states and Megatron has as its default, and options without effect in a run (tp_comm_overlap without TP).
COMPARED = (
    "calculate_per_token_loss", "context_parallel_size", "cpu_offloading_num_layers", "cuda_graph_impl",
    "delay_wgrad_compute", "exp_avg_dtype", "expert_model_parallel_size", "fp4", "fp4_recipe", "fp8",
    "fp8_dot_product_attention", "fp8_output_proj", "fp8_recipe", "global_batch_size", "grad_reduce_in_bf16",
    "micro_batch_size", "moe_flex_dispatcher_backend", "moe_router_force_load_balancing",
    "overlap_grad_reduce", "overlap_moe_expert_parallel_comm", "overlap_param_gather", "pipeline_model_parallel_size",
    "recompute_modules", "recompute_num_layers", "seq_length", "sequence_parallel", "tensor_model_parallel_size",
    "use_megatron_fsdp",
)  # fmt: skip
# With fused experts, overlapped parameter gather ended in an assertion on H200 (moe/full_iteration_graph).
NO_OVERLAP = {"overlap_param_gather"}
STATED = {
    "deepseek_v3_mxfp8_gb200": NO_OVERLAP,
    "deepseek_v3_mxfp8_gb300": NO_OVERLAP,
    "gpt_oss_120b_mxfp8_gb200": NO_OVERLAP,
    # Room for the loss, whose cheaper kernel Megatron refuses since 0.18.2: a comment in the recipe.
    "llama70b_tensorwise_gb200": {"cpu_offloading_num_layers"},
    "qwen3_235b_a22b_mxfp8_gb200": NO_OVERLAP,
    "qwen3_30b_a3b_mxfp8_b300": NO_OVERLAP,
    "qwen3_30b_a3b_mxfp8_gb200": NO_OVERLAP,
}


def cited(file: Path) -> BridgeRecipe | None:
    """The recipe of Bridge whose figure a recipe of the pack cites, where the index has it."""
    reference = load_recipe(str(file)).recipe.reference
    if reference is None or "Megatron-Bridge" not in reference.source:
        return None
    figure = (reference.tokens_per_s_per_gpu, reference.tflops_per_gpu, reference.gpus)
    found = [row for row in rows() if (row.tokens_per_s_per_gpu, row.tflops_per_gpu, row.gpus) == figure]
    assert found, f"{file.name} cites a figure that NVIDIA does not publish"
    return recipe_of(found[0])


CITING = [file for file in HEADLINE if cited(file) is not None]


def test_most_figures_belong_to_a_recipe_of_the_index() -> None:
    assert len(CITING) >= 12
    assert set(STATED) <= {file.stem for file in CITING}


def _plain(value: object) -> str:
    """A value as text; what Bridge states and Megatron has where nothing is stated is empty."""
    return "" if value in (None, False, [], "none") or (value is not True and value == 1) else str(value)


@pytest.mark.parametrize("file", CITING, ids=name_of)
def test_a_recipe_runs_what_its_figure_ran(file: Path) -> None:
    theirs = cited(file)
    assert theirs is not None
    mine = prepare(str(file))
    ours, bridge = mine.args.attributes | mine.loaded.recipe.launch.config, attributes.of_recipe(theirs)
    pairs = {name: (_plain(ours.get(name)), _plain(bridge.get(name))) for name in COMPARED}
    differ = {name for name, (own, other) in pairs.items() if own != other}
    assert differ == STATED.get(file.stem, set())
    stages = bridge.get("num_virtual_stages_per_pipeline_rank") or 1
    assert mine.layout.vp == stages

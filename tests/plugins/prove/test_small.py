"""The small model keeps a recipe's structure, and its layout the kinds of parallelism."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from fp8launch.engines.base import Layout
from fp8launch.job.prepared import prepare
from fp8launch.megatron.flag_problems import emit_argv
from fp8launch.megatron.schema import load_schema
from fp8launch.plugins.prove import uneven
from fp8launch.plugins.prove.reduced_layout import MOST_RANKS, layout_text, reduce_layout
from fp8launch.plugins.prove.settings import CPU, CUDA, not_computed
from fp8launch.plugins.prove.small import (
    SmallRun,
    ramped_microbatches,
    reference,
    resharded_runs,
    resumed_run,
    small_run,
)
from fp8launch.recipe.load import pack_names

EIGHT = "resources={nodes: 1, gpus_per_node: 8}"
RECIPES = [name for name in pack_names() if "/" not in name]


def small(recipe: str, *overrides: str) -> SmallRun:
    run = prepare(recipe, overrides)
    return small_run(run.args.values, run.layout)


@pytest.mark.parametrize(
    ("recipe", "reduced", "lost"),
    [
        ("llama70b_tensorwise_h100", "TP 2 x PP 2 (2 virtual stages) x DP 2", ()),
        ("deepseek_v3_tensorwise_h100", "TP 2 x PP 2 (2 virtual stages) x DP 2, EP 2, ETP 1", ()),
        ("qwen3_30b_a3b_tensorwise_h100", "DP 2, EP 2", ()),
        ("mixtral_8x7b_tensorwise_h100", "PP 2 x DP 2, EP 2", ()),
        ("gpt_oss_120b_tensorwise_h100", "PP 2 x DP 4, EP 2", ()),
        ("llama8b_bf16", "CP 2 x DP 2", ()),
        ("tiny_cpu", "1 rank", ()),
    ],
)
def test_the_smallest_layout_of_the_same_kinds(recipe: str, reduced: str, lost: tuple[str, ...]) -> None:
    run = prepare(recipe)
    found = reduce_layout(run.args.values, run.layout)
    assert (found.text, found.lost) == (reduced, lost)


def test_two_stages_interleave_only_with_overlapped_transfers() -> None:
    """The proof ended with an assertion of Megatron about two stages, which the recipe does not have."""
    overrides = ["parallel.pp=4", "parallel.vp=2", "megatron.no_overlap_p2p_communication=true"]
    run = prepare("llama8b_fp8", overrides)
    assert reduce_layout(run.args.values, run.layout).text == "PP 4 (2 virtual stages) x DP 2"


def test_two_optimizer_instances_keep_ranks_to_share_with() -> None:
    run = prepare("llama8b_16gpu_tensorwise_h100", ["megatron.num_distributed_optimizer_instances=4"])
    found = reduce_layout(run.args.values, run.layout)
    assert found.text == "DP 4, Megatron-FSDP, 2 optimizer instances"
    divided = small_run(run.args.values, run.layout)
    assert divided.values["num_distributed_optimizer_instances"] == 2
    assert divided.values["ckpt_format"] == "fsdp_dtensor"
    alone = reference(divided).values
    assert alone["ckpt_format"] == "torch_dist"
    assert not [name for name in alone if "fsdp" in name or "instances" in name or "sharding" in name]


def test_data_parallelism_of_experts_comes_from_context_parallelism_if_there_is_no_other() -> None:
    """With DP 2, global_aux_loss was reported, whose gradient is right with DP 1."""
    layout = "parallel={tp: 2, cp: 4, ep: 2, sequence: true}"
    run = prepare("qwen3_30b_a3b_tensorwise_h100", [layout, EIGHT])
    assert run.layout.dp == 1
    assert reduce_layout(run.args.values, run.layout).text == "TP 2 x CP 4, EP 2"
    assert reduce_layout(run.args.values, run.layout, context_parallel=False).layout.cp == 1


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_a_reduced_layout_has_no_other_kinds_of_parallelism(tp: int) -> None:
    run = prepare("qwen3_30b_a3b_tensorwise_h100")
    for cp, dp, pp, ep, etp in product((1, 2, 4), (1, 2, 4, 8), (1, 2, 4), (1, 2, 4, 8), {1, tp}):
        expert_dp, rest = divmod(tp * cp * dp, ep * etp)
        if rest:
            continue
        world = tp * cp * dp * pp
        layout = replace(run.layout, world=world, tp=tp, cp=cp, dp=dp, pp=pp, ep=ep, vp=1, microbatches=4)
        reduced = reduce_layout({**run.args.values, "expert_tensor_parallel_size": etp}, layout)
        small = reduced.layout
        kinds = [(size > 1) >= (other > 1) for size, other in zip(sizes(layout), sizes(small), strict=True)]
        assert all(kinds), (layout, reduced.text)
        small_expert_dp, rest = divmod(small.tp * small.cp * small.dp, small.ep * reduced.etp)
        assert not rest
        assert (expert_dp > 1) == (small_expert_dp > 1) or reduced.lost, (layout, reduced.text)


def sizes(layout: Layout) -> tuple[int, ...]:
    return layout.tp, layout.cp, layout.dp, layout.pp, layout.ep


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_of_the_pack_has_a_small_run(recipe: str) -> None:
    run = prepare(recipe)
    divided = small_run(run.args.values, run.layout)
    alone = reference(divided)
    assert divided.layout.world <= MOST_RANKS
    assert alone.layout.world == 1
    for values in (divided.values, alone.values):
        words = emit_argv(values, load_schema(run.args.version))
        assert "--bf16" not in words
        assert "--data-path" not in words
    layers = int(divided.values["num_layers"])  # type: ignore[call-overload]
    if stages := divided.values.get(uneven.LAYOUT):
        assert str(stages).count("t") == layers
    else:
        counted = {*divided.values}.intersection(uneven.COUNTED)
        assert (layers + len(counted)) % (divided.layout.pp * divided.layout.vp) == 0


def test_kinds_of_layers_and_experts_stay() -> None:
    values = small("deepseek_v3_tensorwise_h100").values
    assert values["moe_layer_freq"] == "[0,1,1,1,1]"
    assert values["multi_latent_attention"]
    assert values["mtp_num_layers"] == 1
    assert (values["num_experts"], values["moe_router_topk"], values["moe_router_num_groups"]) == (4, 2, 2)


def test_layers_without_positions_stay() -> None:
    values = small("llama8b_fp8", "model.no_rope_freq=4", "parallel.pp=2").values
    assert (values["num_layers"], values["no_rope_freq"]) == (2, "[0,1]")


def test_fewer_query_groups_than_ranks_stay_fewer() -> None:
    values = small("llama70b_tensorwise_h100", "parallel.tp=8", "model.num_query_groups=4").values
    assert (values["num_query_groups"], values["tensor_model_parallel_size"]) == (1, 2)


def test_the_reference_pads_the_vocabulary_as_the_layout_does() -> None:
    divided = small("llama70b_tensorwise_h100", "model.vocab_size=128257")
    alone = reference(divided)
    assert divided.values["vocab_size"] == 250
    assert divided.values["make_vocab_size_divisible_by"] == 64
    assert alone.values["make_vocab_size_divisible_by"] == 128
    assert not {"tensor_model_parallel_size", "use_distributed_optimizer", "sequence_parallel"} & alone.values.keys()


def test_what_is_not_computed_has_a_reason() -> None:
    found = not_computed(prepare("llama70b_tensorwise_h100").args.values)
    assert found["fp8_recipe"] == "computed in fp32"
    assert found["tp_comm_overlap"] == "needs Transformer Engine"
    assert not {"lr", "log_interval", "train_iters", "vocab_size", "overlap_grad_reduce"} & found.keys()


def test_a_mask_of_documents_is_computed_by_the_layers_that_read_it() -> None:
    mask = "megatron.reset_attention_mask=true"
    with_te = prepare("llama8b_bf16", [mask, "megatron.eod_mask_loss=true"]).args.values
    assert not_computed(with_te)["reset_attention_mask"] == "only Megatron's own layers read it"
    assert "eod_mask_loss" not in not_computed(with_te)
    run = prepare("llama8b_bf16", [mask, "megatron.transformer_impl=local", "parallel={pp: 4, cp: 1}"])
    assert "reset_attention_mask" not in not_computed(run.args.values)
    divided = small_run(run.args.values, run.layout)
    assert divided.values["reset_attention_mask"]
    # Between the first and the last stage there is one that Megatron gives no mask.
    assert divided.layout.pp == 3


def test_token_prediction_is_divided_by_context_where_tokens_are_masked() -> None:
    assert small("llama8b_bf16", "model.mtp_num_layers=1").layout.cp == 1
    assert small("llama8b_bf16", "model.mtp_num_layers=1", "megatron.eod_mask_loss=true").layout.cp == 2


def micro_batch_of_reference(*overrides: str) -> int:
    return reference(small("tiny_cpu", "batch={micro: 4, global: 16}", *overrides)).layout.micro_batch


def test_the_reference_has_one_sample_per_micro_batch_where_that_must_not_matter() -> None:
    experts = "num_experts: 4, moe_ffn_hidden_size: 64, moe_router_topk: 2, moe_router_load_balancing_type"
    assert micro_batch_of_reference() == 1
    assert micro_batch_of_reference(f"model={{{experts}: seq_aux_loss}}") == 1
    assert micro_batch_of_reference(f"model={{{experts}: aux_loss}}") == 4
    assert micro_batch_of_reference(f"model={{{experts}: none}}", "megatron.moe_expert_capacity_factor=1.0") == 4
    assert micro_batch_of_reference("megatron.eod_mask_loss=true") == 4
    assert micro_batch_of_reference("megatron={eod_mask_loss: true, calculate_per_token_loss: true}") == 1


def test_a_ramp_has_half_of_the_course() -> None:
    run = prepare("tiny_cpu", ["megatron.rampup_batch_size=[2, 2, 64]"])
    course = resumed_run(run.args.values, run.layout)
    start = course.values["rampup_batch_size"][0]  # type: ignore[index]
    assert course.values["global_batch_size"] == 2 * start  # type: ignore[operator]
    assert ramped_microbatches(course) == [1, 1, 2, 2]
    assert not {"train_iters", "lr_warmup_iters"} & course.values.keys()


@pytest.mark.parametrize("device", [CPU, CUDA])
def test_padding_for_fp8_is_computed_where_fp8_is(device: str) -> None:
    run = prepare("qwen3_30b_a3b_tensorwise_h100", ["megatron.moe_router_padding_for_quantization=true"])
    found = not_computed(run.args.values, device)
    assert found.get("moe_router_padding_for_quantization") == {CPU: "computed in fp32", CUDA: None}[device]


def test_of_a_hybrid_only_attention_is_compared() -> None:
    run = prepare("tiny_cpu", ["model={hybrid_layer_pattern: 'M*-M*-', num_layers: null}"])
    assert not_computed(run.args.values)["hybrid_layer_pattern"].startswith("no Mamba")
    values = small_run(run.args.values, run.layout).values
    assert "hybrid_layer_pattern" not in values
    assert values["num_layers"] == 2


def test_linear_attention_is_computed_on_a_cpu() -> None:
    variant = "model={experimental_attention_variant: gated_delta_net, linear_attention_freq: 2}"
    run = prepare("tiny_cpu", [variant])
    values = small_run(run.args.values, run.layout).values
    assert (values["experimental_attention_variant"], values["linear_num_value_heads"]) == ("gated_delta_net", 4)
    assert "experimental_attention_variant" not in not_computed(run.args.values, CPU)
    sparse = small("llama8b_bf16", "model={experimental_attention_variant: dsa, multi_latent_attention: true}")
    assert (sparse.values["dsa_indexer_topk"], sparse.layout.cp) == (16, 1)
    divided = prepare("llama8b_bf16", ["model={experimental_attention_variant: dsa}", "parallel={tp: 4, cp: 1}"])
    reduced = reduce_layout(divided.args.values, divided.layout)
    assert reduced.layout.tp == 1
    assert "tensor parallelism of sparse attention (4)" in reduced.lost
    assert not_computed(run.args.values, CUDA)["experimental_attention_variant"] == "not compared yet"
    assert "experimental_attention_variant" not in small_run(run.args.values, run.layout, CUDA).values


def test_an_unknown_flag_is_not_covered() -> None:
    run = prepare("tiny_cpu", ["megatron.flash_decode=true", "megatron.mrope_section=[2,2,2]"])
    found = not_computed(run.args.values)
    assert found["flash_decode"] == found["mrope_section"] == "`prove` does not know it"
    assert "flash_decode" not in small_run(run.args.values, run.layout).values


STAGES = "parallel={tp: 1, pp: 4, vp: 1, cp: 1}"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ("model.num_layers=14", "megatron.decoder_first_pipeline_num_layers=2"),
            {"decoder_first_pipeline_num_layers": 1, "num_layers": 3},
        ),
        (
            ("model.num_layers=14", "megatron.decoder_last_pipeline_num_layers=5"),
            {"decoder_last_pipeline_num_layers": 2, "num_layers": 3},
        ),
        (
            ("model.num_layers=15", "megatron.account_for_loss_in_pipeline_split=true"),
            {"account_for_loss_in_pipeline_split": True, "num_layers": 3},
        ),
        (
            ("model.num_layers=9", "megatron.pipeline_model_parallel_layout='Ettt|ttt|tt|tL'"),
            {"pipeline_model_parallel_layout": "Ett|tL", "num_layers": 3},
        ),
        (
            ("model={num_layers: 8, mtp_num_layers: 1}", "megatron.pipeline_model_parallel_layout='Ettt|ttttt|m|L'"),
            {"pipeline_model_parallel_layout": "Ett|mL", "num_layers": 2},
        ),
    ],
)
def test_stages_with_different_numbers_of_layers_stay_different(
    overrides: tuple[str, ...], expected: dict[str, object]
) -> None:
    run = prepare("llama70b_tensorwise_h100", [STAGES, *overrides])
    divided = small_run(run.args.values, run.layout)
    assert expected.items() <= divided.values.items()
    assert not reference(divided).values.keys() & {uneven.LAYOUT, uneven.FIRST, uneven.LAST, *uneven.COUNTED}
    assert not not_computed(run.args.values).keys() & expected.keys()


def test_a_resumed_run_keeps_what_it_resumes_with() -> None:
    run = prepare("tiny_cpu", ["model.hidden_dropout=0.1", "megatron.lr_decay_style=WSD"])
    values = resumed_run(run.args.values, run.layout).values
    assert values["bf16"] is True
    assert (values["hidden_dropout"], values["lr_decay_style"], values["lr_wsd_decay_iters"]) == (0.1, "WSD", 1)
    assert "bf16" not in small_run(run.args.values, run.layout).values


# Flags that another layout may change.
OF_LAYOUTS = re.compile("parallel|pipeline|micro_batch|dispatcher|overlap|recompute|vocab_size_divisible")


@pytest.mark.parametrize(
    ("recipe", "before", "after"),
    [
        ("tiny_cpu", (), ("parallel.pp=2", "resources.gpus_per_node=2")),
        ("llama8b_fp8", ("parallel.pp=4",), ("parallel.tp=4",)),
        ("mixtral_8x7b_tensorwise_h100", ("parallel.ep=4",), ("parallel.ep=8", "parallel.pp=1", "parallel.vp=null")),
        ("qwen3_30b_a3b_tensorwise_h100", (), ("parallel.pp=2", "parallel.ep=2")),
    ],
)
def test_two_layouts_have_one_model(recipe: str, before: tuple[str, ...], after: tuple[str, ...]) -> None:
    for sets in ((before, after), (after, before)):
        one, other = (prepare(recipe, words) for words in sets)
        runs = resharded_runs(one.args.values, one.layout, other.args.values, other.layout)
        first, second = ({name: run.values[name] for name in run.values if not OF_LAYOUTS.search(name)} for run in runs)
        assert first == second


def test_routes_are_random_where_checkpoints_are_saved() -> None:
    forced = "moe_router_force_load_balancing"
    run = prepare("gpt_oss_120b_tensorwise_h100")
    assert run.args.values[forced]
    assert forced not in resumed_run(run.args.values, run.layout).values
    run = prepare("gpt_oss_120b_tensorwise_h100", ["checkpoint.dir=checkpoints"])
    assert resumed_run(run.args.values, run.layout).values[forced]


def test_nothing_of_the_machine_is_read() -> None:
    """Neither data nor checkpoints, and no file that a flag names."""
    recipe = prepare("tiny_cpu", ["checkpoint.dir=/nowhere/checkpoints", "data.cache=/nowhere/cache"])
    values = small_run(recipe.args.values, recipe.layout).values
    assert "/nowhere" not in str(values)


def test_layouts_in_words() -> None:
    assert layout_text(prepare("llama8b_bf16").layout) == "CP 2 x DP 4"


def test_a_gpu_trains_in_the_precision_of_the_recipe() -> None:
    run = prepare("llama8b_fp8", ["parallel.cp=2", "parallel.tp=2"])
    small = small_run(run.args.values, run.layout, "cuda")
    assert small.low_precision
    assert (small.layout.tp, small.layout.cp) == (2, 2)
    for flag in ("fp8_format", "fp8_recipe", "fp8_param_gather", "bf16", "context_parallel_size"):
        assert small.values[flag] == (2 if flag == "context_parallel_size" else run.args.values[flag])
    alone = reference(small)
    assert "context_parallel_size" not in alone.values
    # Megatron keeps FP8 weights with the distributed optimizer only.
    assert alone.values["use_distributed_optimizer"] and alone.values["fp8_param_gather"]
    assert resumed_run(run.args.values, run.layout, "cuda").layout.cp == 1
    reasons = not_computed(run.args.values, "cuda")
    assert not {"fp8_format", "bf16", "context_parallel_size"} & reasons.keys()
    assert "needs a GPU" not in reasons.values()


def test_gradients_of_delayed_scaling_are_compared_in_bf16() -> None:
    run = prepare("llama8b_fp8", ["precision.recipe=delayed"])
    assert not [flag for flag in small_run(run.args.values, run.layout, "cuda").values if flag.startswith("fp8_")]
    assert resumed_run(run.args.values, run.layout, "cuda").values["fp8_recipe"] == "delayed"
    assert "earlier steps" in not_computed(run.args.values, "cuda")["fp8_format"]


@pytest.mark.parametrize("installed", [True, False])
def test_deepep_is_computed_on_a_gpu_where_it_is_installed(
    installed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if installed:
        (tmp_path / "deep_ep.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    run = prepare("deepseek_v3_tensorwise_h100")
    values = run.args.values
    assert values["moe_token_dispatcher_type"] == "flex"
    assert "moe_token_dispatcher_type" in not_computed(values, CPU)
    assert ("moe_token_dispatcher_type" in not_computed(values, CUDA)) is not installed
    divided = small_run(values, run.layout, CUDA)
    assert divided.values["moe_token_dispatcher_type"] == ("flex" if installed else "alltoall")
    assert ("moe_flex_dispatcher_backend" in divided.values) is installed
    alone = reference(divided).values
    assert alone["moe_token_dispatcher_type"] == "alltoall"
    assert "moe_flex_dispatcher_backend" not in alone


def test_fp8_weights_of_megatron_fsdp_are_not_compared() -> None:
    run = prepare("llama8b_16gpu_tensorwise_h100", ["precision.param_gather=true"])
    assert not_computed(run.args.values, CUDA)["fp8_param_gather"] == "not compared yet"
    values = small_run(run.args.values, run.layout, CUDA).values
    assert values["fp8_recipe"] == "tensorwise"
    assert "fp8_param_gather" not in {**values, **reference(small_run(run.args.values, run.layout, CUDA)).values}


@pytest.mark.parametrize(
    ("layout", "kept"),
    [("{tp: 2, ep: 2, etp: 1, sequence: true}", False), ("{cp: 2, ep: 2}", False), ("{ep: 2}", True)],
)
def test_which_tokens_a_capacity_drops_depends_on_the_rank(layout: str, kept: bool) -> None:
    """`prove` reported such a layout as wrong."""
    run = prepare(
        "qwen3_30b_a3b_tensorwise_h100", [f"parallel={layout}", "megatron.moe_expert_capacity_factor=1.25", EIGHT]
    )
    reduced = reduce_layout(run.args.values, run.layout)
    assert any(text.startswith("tokens dropped over capacity (1.25)") for text in reduced.lost) is not kept
    assert ("moe_expert_capacity_factor" in small_run(run.args.values, run.layout).values) is kept

"""`fp8launch plan`: it ranks what the recipe with its overrides runs, and answers bad input in a sentence."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge_recipes import arguments_of
from fp8launch.cli import run
from fp8launch.diagnostics import UserError
from fp8launch.hardware.gpus import gpu
from fp8launch.megatron.model_arithmetic import parse_layout, virtual_stages
from fp8launch.plugins.estimate.activations import offloaded_layers
from fp8launch.plugins.plan.change import Change, Target
from fp8launch.plugins.plan.divisions import divisions
from fp8launch.plugins.plan.fitting import memory_of
from fp8launch.plugins.plan.inputs import base_of, source_of, target_of
from fp8launch.plugins.plan.pipelines import stage_layout
from fp8launch.plugins.plan.plans import PlanRequest, accepted, own_layout, plan_layouts
from fp8launch.plugins.plan.savings import layer_recomputes, module_recomputes
from fp8launch.plugins.plan.search import search
from fp8launch.plugins.plan.speeds import speeds
from fp8launch.plugins.plan.step_time import UNCERTAINTY_OFFLOADED, LayerTimes, step_time_at
from fp8launch.recipe.load import read_recipe
from fp8launch.resources import pack_folder

Ask = Callable[..., Any]


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]) -> Ask:
    """Run a command that prints JSON."""

    def asked(*words: str) -> Any:
        assert run([*words, "--json"]) == 0, capsys.readouterr().err
        return json.loads(capsys.readouterr().out)

    return asked


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Run a command that is refused: its exit code and message."""

    def refused(*words: str) -> tuple[int, str]:
        code = run(["plan", *words])
        shown = capsys.readouterr()
        assert code and not shown.out and "Traceback" not in shown.err
        return code, shown.err

    return refused


@pytest.mark.parametrize(
    "words",
    [
        ("llama8b_fp8",),
        ("llama405b_tensorwise_h100", "--top", "3"),
        ("qwen3_30b_a3b_tensorwise_h100", "--top", "3"),
        ("llama3_70b", "--gpu", "gb200", "--gpus", "64", "--precision", "mxfp8", "--top", "2"),
        # The fastest is found late: without parameter gather it needs no casts.
        ("qwen3_235b_a22b_tensorwise_h100",),
    ],
    ids=lambda words: words[0],
)
def test_layouts_are_best_first_fit_and_have_every_term(words: tuple[str, ...], ask: Ask) -> None:
    found = ask("plan", *words)
    speeds = [one["predicted"]["tokens_per_s_per_gpu"] for one in found]
    assert speeds == sorted(speeds, reverse=True)
    memory = {"gb200": 185.0, "h100": 79.6}["gb200" if "gb200" in " ".join(words) else "h100"]
    for one in found:
        assert one["predicted"]["peak_memory_gib"] < memory
        assert len(set(one["overrides"])) == len(one["overrides"])
        assert sum(term["ms"] for term in one["terms"]) == pytest.approx(one["predicted"]["step_time_ms"])


def test_python_code_plans_as_the_command_does(ask: Ask, capsys: pytest.CaptureFixture[str]) -> None:
    plan = plan_layouts(PlanRequest("llama3_8b", gpus=8, precisions=("bf16",), top=2))
    shown = ask("plan", "llama3_8b", "--gpus", "8", "--precision", "bf16", "--top", "2")
    assert [list(layout.overrides) for layout in plan.layouts] == [one["overrides"] for one in shown]
    assert plan.own is None and plan.parents[0] == "models/llama3_8b"
    with pytest.raises(UserError, match="does not fit 8 h100"):
        plan_layouts(PlanRequest("llama3_1_405b", gpus=8))
    assert not capsys.readouterr().err


def test_layouts_that_differ_in_virtual_stages_alone_are_shown_once(ask: Ask) -> None:
    sizes = ("parallel.tp", "parallel.pp", "parallel.cp", "batch.micro", "parallel.fsdp")
    found = [dict(word.split("=", 1) for word in one["overrides"]) for one in ask("plan", "llama3_8b", "--gpus", "8")]
    kinds = [tuple(one.get(size) for size in sizes) for one in found]
    assert len(set(kinds)) == len(kinds) == 5


@pytest.mark.parametrize("recipe", ["llama8b_fp8", "llama70b_tensorwise_h100"])
def test_estimate_says_the_same_of_a_layout(recipe: str, ask: Ask) -> None:
    for one in ask("plan", recipe, "--top", "3"):
        words = [word for override in one["overrides"] for word in ("--set", override)]
        estimated = ask("estimate", recipe, *words)
        assert estimated["predicted"] == pytest.approx(one["predicted"])
        assert estimated["terms"] == one["terms"]


@pytest.mark.parametrize(
    "recipe",
    ["llama405b_tensorwise_h100", "llama70b_tensorwise_gb200"],
)
def test_nvidias_own_layout_is_close_to_the_predicted_best(recipe: str, ask: Ask) -> None:
    best = ask("plan", recipe, "--top", "1")[0]["predicted"]["tokens_per_s_per_gpu"]
    assert ask("estimate", recipe)["predicted"]["tokens_per_s_per_gpu"] > 0.9 * best


def test_layouts_that_share_their_layers_are_predicted_as_if_alone() -> None:
    source = read_recipe(str(pack_folder("recipes") / "qwen3_30b_a3b_tensorwise_h100.yaml"))
    asked = ["batch.global=128"]
    base, target = base_of(source, asked, None), target_of(source, asked, asked, None)
    shared = LayerTimes()
    layouts = [base.then(division).args for division in divisions(base.args, target)]
    assert len(layouts) > 100
    for args in layouts[::3]:
        alone = step_time_at(args, target.gpus, target.global_batch, target.speeds)
        assert alone is not None
        searched = step_time_at(args, target.gpus, target.global_batch, target.speeds, shared)
        assert searched == replace(alone, slow_host_ms=None, flops_per_token=None)


def test_memory_grows_with_the_micro_batch_but_never_faster() -> None:
    """The search relies on it: a division that does not fit says that other micro batches do not fit either."""
    source = read_recipe(str(pack_folder("recipes") / "qwen3_30b_a3b_tensorwise_h100.yaml"))
    asked = ["batch.global=32"]
    base, target = base_of(source, asked, None), target_of(source, asked, asked, None)
    totals: dict[frozenset[tuple[str, str]], dict[int, float]] = {}
    for division in divisions(base.args, target):
        change = base.then(division)
        change = change.then((layer_recomputes(change.args) or module_recomputes(change.args) or [Change()])[-1])
        memory = memory_of(change.args, target)
        if memory is not None:
            alike = frozenset(pair for pair in division.overrides.items() if pair[0] != "batch.micro")
            totals.setdefault(alike, {})[change.args["micro_batch_size"]] = memory.total
    pairs = [pair for found in totals.values() for pair in pairwise(sorted(found.items()))]
    assert len(pairs) > 50
    assert all(less <= more <= less * large / small for (small, less), (large, more) in pairs)


OWN = [
    "llama8b_mxfp8_b200",
    "llama405b_nvfp4_gb300",
    "deepseek_v3_mxfp8_gb200",
    "deepseek_v3_tensorwise_h100",
    "qwen3_30b_a3b_tensorwise_h100",
    *(
        pytest.param(name, marks=pytest.mark.needs_plugin("bridge"))
        for name in (
            "bridge:llama3_8b_pretrain_8gpu_h100_fp8cs_config",
            "bridge:gpt_oss_120b_pretrain_64gpu_b200_bf16_config",
        )
    ),
]


@pytest.mark.parametrize("name", OWN)
def test_the_first_layout_is_not_slower_than_the_recipes_own(name: str, tmp_path: Path) -> None:
    source, _ = source_of(name, None, (), tmp_path)
    target = target_of(source, [], [], None)
    found = search([base_of(source, [], None)], target, 14, own=True)
    times = [layout.step.ms for layout in found.layouts]
    assert times == sorted(times)
    planned, _ = accepted(found, source, [], target, 1)
    own = own_layout(source, [], target)
    assert own is not None and own.layout.memory.fits(target.gpu)
    assert planned[0].step.ms <= own.step.ms


def test_the_first_layouts_are_the_best_of_all(tmp_path: Path) -> None:
    sizes = ["parallel.ep=16", "batch.micro=1"]
    source, _ = source_of("qwen3_235b_a22b_tensorwise_h100", None, (), tmp_path)
    target, base = target_of(source, sizes, sizes, None), base_of(source, sizes, None)
    everything = search([base], target, 10**9).layouts
    assert search([base], target, 5).layouts == everything[:5]


def test_as_few_layers_are_recomputed_as_memory_needs(ask: Ask) -> None:
    recipe = "llama70b_tensorwise_h100"
    found = ask("plan", recipe, "--set", "parallel.tp=4", "--set", "parallel.pp=2", "--top", "3")
    counted = [_words(one) for one in found]
    fewest = [one for one in counted if one.get("megatron.recompute_method") == "block"]
    assert fewest and all(one["parallel.tp"] == "4" and one["parallel.pp"] == "2" for one in counted)
    for one in fewest:
        layers = int(one["megatron.recompute_num_layers"])
        less = {**one, "megatron.recompute_num_layers": str(layers - 1)}
        if layers == 1:
            less = {key: value for key, value in one.items() if not key.startswith("megatron.recompute")}
        words = [word for key, value in less.items() for word in ("--set", f"{key}={value}")]
        # One layer less does not fit.
        terms = ask("estimate", recipe, *words)["memory"]
        assert sum(term["bytes"] for term in terms["terms"]) > 0.94 * 79.6 * 2**30


def test_recompute_is_what_megatron_accepts() -> None:
    """Delayed scaling recomputes no norms, overlapped experts no layers (megatron/core/transformer_config.py)."""
    source = read_recipe(str(pack_folder("recipes") / "deepseek_v3_tensorwise_h100.yaml"))
    args = base_of(source, [], None).args
    assert args["overlap_moe_expert_parallel_comm"] and not layer_recomputes(args)
    modules = [set(one.args["recompute_modules"]) for one in module_recomputes(args)]
    assert {"mla_up_proj"} in modules and {"mla_up_proj", "mlp"} in modules and not any("moe" in one for one in modules)
    delayed = {**args, "fp8_recipe": "delayed", "overlap_moe_expert_parallel_comm": False}
    modules = [set(one.args["recompute_modules"]) for one in module_recomputes(delayed)]
    assert modules and not any({"layernorm", "moe_act"} & one for one in modules)
    assert layer_recomputes(delayed)


def test_expert_communication_is_overlapped_only_where_megatron_can() -> None:
    source = read_recipe(str(pack_folder("recipes") / "deepseek_v3_tensorwise_h100.yaml"))
    base, target = base_of(source, [], None), target_of(source, [], [], None)
    for division in divisions(base.args, target):
        args = base.then(division).args
        pp = args["pipeline_model_parallel_size"]
        overlapped = args["expert_model_parallel_size"] > 1 and (pp == 1 or virtual_stages(args, pp) > 1)
        assert bool(args.get("overlap_moe_expert_parallel_comm")) == overlapped


def test_the_optimizer_step_overlaps_the_gather_only_with_virtual_stages() -> None:
    source = read_recipe(str(pack_folder("recipes") / "llama405b_tensorwise_h100.yaml"))
    base, target = base_of(source, [], None), target_of(source, [], [], None)
    seen = set()
    for division in divisions(base.args, target):
        args = base.then(division).args
        virtual = virtual_stages(args, args["pipeline_model_parallel_size"]) > 1
        assert bool(args.get("overlap_param_gather_with_optimizer_step")) == virtual
        seen.add(virtual)
    assert seen == {False, True}


def test_two_stages_interleave_only_with_overlapped_transfers() -> None:
    source = read_recipe("llama8b_fp8")
    base = base_of(source, ["megatron.no_overlap_p2p_communication=true"], None)
    target = target_of(source, [], [], None)
    virtual = {}
    for division in divisions(base.args, target):
        args = base.then(division).args
        pp = args["pipeline_model_parallel_size"]
        virtual[pp] = max(virtual.get(pp, 1), virtual_stages(args, pp))
    assert virtual[2] == 1 < virtual[4]


def test_sorted_by_memory_the_smallest_comes_first(ask: Ask) -> None:
    peaks = [one["predicted"]["peak_memory_gib"] for one in ask("plan", "llama8b_fp8", "--sort", "memory")]
    assert peaks == sorted(peaks)
    assert peaks[0] < ask("plan", "llama8b_fp8", "--top", "1")[0]["predicted"]["peak_memory_gib"]


def test_the_written_recipe_is_the_best_layout(ask: Ask, tmp_path: Path) -> None:
    file = tmp_path / "best.yaml"
    words = ("llama3_8b", "--gpu", "h200", "--gpus", "2", "--precision", "tensorwise,delayed", "--top", "1")
    best = ask("plan", *words, "--write", str(file))[0]
    estimated = ask("estimate", str(file))
    assert estimated["predicted"] == pytest.approx(best["predicted"])
    assert estimated["gpus"] == 2 and estimated["gpu"] == "h200"
    code = run(["plan", *words, "--write", str(file)])
    assert code == 2


def test_the_printed_overrides_of_the_first_layout_are_all_of_them(
    ask: Ask, capsys: pytest.CaptureFixture[str]
) -> None:
    """The recipe's account of embedding and loss would unbalance another pipeline: `null` takes it away."""
    recipe = "llama405b_tensorwise_b200"
    assert run(["plan", recipe, "--top", "1"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("To use layout 1: "))
    words = shlex.split(line.removeprefix("To use layout 1: "))
    assert ask("estimate", recipe, *words)["predicted"] == ask("plan", recipe, "--top", "1")[0]["predicted"]
    assert "megatron.account_for_loss_in_pipeline_split=null" in words


def test_a_batch_that_the_gpus_do_not_divide_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "llama3_8b", "--gpu", "gb200", "--gpus", "72", "--top", "1"]) == 0
    message = capsys.readouterr().err
    assert (
        "The global batch of 512 is not a multiple of 9, a factor of 72 GPUs" in message
        and "--global-batch 576" in message
    )
    assert run(["plan", "llama3_8b", "--gpu", "gb200", "--gpus", "72", "--top", "1", "--global-batch", "576"]) == 0
    assert "not a multiple" not in capsys.readouterr().err


def test_precisions_are_compared(ask: Ask) -> None:
    found = ask("plan", "llama8b_fp8_h200x2", "--precision", "bf16,delayed", "--top", "400")
    names = {word for one in found for word in one["overrides"] if word.startswith("precision.recipe")}
    assert names == {"precision.recipe=bf16", "precision.recipe=delayed"}
    assert "precision.recipe=delayed" in found[0]["overrides"]


def test_the_network_of_the_profile_counts(ask: Ask, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slow, silent = tmp_path / "slow.yaml", tmp_path / "silent.yaml"
    slow.write_text("network: {gbit_per_gpu: 25, nvlink_domain: 8}\n")
    silent.write_text("account: me\n")
    words = ("plan", "llama70b_tensorwise_h100", "--top", "1")
    fast, crawling = ask(*words), ask(*words, "--cluster", str(slow))
    assert crawling[0]["predicted"]["step_time_ms"] > fast[0]["predicted"]["step_time_ms"]
    assert run([*words, "--cluster", str(silent)]) == 0
    assert "has no `network`: assuming 400 Gbit/s" in capsys.readouterr().err


def test_what_fits_nowhere_is_said_in_a_sentence(refusal: Callable[..., tuple[int, str]]) -> None:
    code, message = refusal("llama3_1_405b", "--gpu", "h100", "--gpus", "8")
    assert code == 1 and "does not fit 8 h100" in message and "GiB, more than 94% of 79.6" in message
    code, message = refusal("llama3_1_405b", "--gpu", "a100", "--gpus", "1")
    assert code == 1 and "does not fit 1 a100" in message


def test_gpus_that_do_not_divide_are_said_in_a_sentence(refusal: Callable[..., tuple[int, str]]) -> None:
    code, message = refusal("llama8b_fp8", "--gpus", "12")
    assert code == 2 and "12 GPUs are not whole nodes of 8 h100" in message and "8 or 16" in message
    # 37 layers and a batch of 128: seven GPUs divide neither.
    code, message = refusal("llama8b_fp8", "--gpus", "7", "--set", "model.num_layers=3")
    assert code == 1 and "no division of 7 h100 fits a global batch of 128 and 3 layers" in message


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("llama8b_fp8", "--precision", "fp7"), "no precision 'fp7'"),
        (
            ("llama3_8b", "--gpus", "8", "--gpu", "h100", "--precision", "fp8"),
            "write one of delayed, tensorwise, blockwise\n",
        ),
        (("tiny_cpu",), "the speed of cpu is not known"),
        (("llama8b_fp8", "--gpus", "8", "--nodes", "1"), "exclude each other"),
        (("no_such_model",), "no such recipe"),
        (
            ("llama8b_fp8", "--set", "megatron.hybrid_layer_pattern=M*MG"),
            "hybrid models with layers of kind G are not modelled",
        ),
        (("llama3_8b", "--gpus", "8", "--set", "parallel.tp=3"), "512 and 32 layers with parallel.tp=3"),
        # It fits, but our entry to Megatron-LM does not train it.
        (("llama8b_fp8", "--set", "megatron.hybrid_layer_pattern=M-M*"), "refuse every layout on 8 h100"),
    ],
)
def test_bad_input_is_named(words: tuple[str, ...], message: str, refusal: Callable[..., tuple[int, str]]) -> None:
    assert message in refusal(*words)[1]


def test_estimate_says_that_the_check_refuses_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["estimate", "qwen3_30b_a3b_tensorwise_h100", "--set", "parallel.ep=3"]) == 0
    assert "`check` refuses this run" in capsys.readouterr().err
    assert run(["estimate", "qwen3_30b_a3b_tensorwise_h100"]) == 0
    assert "refuses" not in capsys.readouterr().err


@pytest.mark.needs_plugin("bridge")
def test_estimate_predicts_a_hybrid_of_bridge(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["estimate", "bridge:nemotron_3_nano_pretrain_8gpu_gb300_fp8mx_config", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["predicted"]["uncertainty"] > 0.1
    assert "Mamba scan" in {term["name"] for term in found["terms"]}
    assert sum(term["ms"] for term in found["terms"]) == pytest.approx(found["predicted"]["step_time_ms"])
    # 64 experts on a GPU, of which a prediction so uncertain tells nothing.
    assert run(["check", "bridge:nemotron_3_super_pretrain_64gpu_b300_fp8mx_config"]) == 0
    assert "fp8-experts-slower" not in capsys.readouterr().err


@pytest.mark.needs_plugin("bridge")
def test_layouts_of_a_hybrid_are_those_that_its_layers_allow() -> None:
    args = arguments_of("nemotron_3_super_pretrain_64gpu_gb300_fp8mx_config")
    known = speeds(gpu("gb300"))
    assert known is not None
    target = Target(64, 512, gpu("gb300"), known)
    found = list(divisions(args, target))
    sizes = {
        name: {change.args[f"{name}_model_parallel_size"] for change in found}
        for name in ("tensor", "pipeline", "expert")
    }
    # Two groups of keys and 8 of B and C; 88 layers in even stages; 512 experts.
    assert sizes["tensor"] == {1, 2} and sizes["pipeline"] == {1, 2, 4, 8} and 64 in sizes["expert"]
    for change in found:
        assert not change.args.get("num_virtual_stages_per_pipeline_rank")
        assert not change.args.get("pipeline_model_parallel_layout") and not change.args.get("use_megatron_fsdp")
    # Stages that the pattern states: four, or two of two chunks each.
    cut = {**args, "hybrid_layer_pattern": "MEM*|EMEM|MEM*|EMEM/*E"}
    assert {change.args["pipeline_model_parallel_size"] for change in divisions(cut, target)} == {2, 4}


def test_text_shows_layouts_terms_and_how_to_run_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "llama8b_fp8"]) == 0
    shown = capsys.readouterr()
    for words in ("tokens/s/GPU", "micro batch", "GEMM fc1", "--set parallel.tp=1"):
        assert words in shown.out
    assert "Does not fit" in shown.err


@given(st.integers(1, 200), st.integers(0, 2), st.data())
def test_a_stage_layout_has_every_layer_once_and_is_even(layers: int, mtp: int, data: st.DataObject) -> None:
    pieces = data.draw(st.integers(2, max(min(layers, 64), 2)))
    parsed = parse_layout(stage_layout(layers, mtp, pieces))
    assert parsed is not None and len(parsed) == pieces
    counts = [piece.count("t") for piece in parsed]
    assert sum(counts) == layers and max(counts) - min(counts) <= 1
    assert parsed[0].startswith("E") and parsed[-1].endswith("m" * mtp + "L")


@pytest.mark.needs_plugin("accelerate")
def test_recipes_whose_speed_is_not_predicted_are_refused(refusal: Callable[..., tuple[int, str]]) -> None:
    code, message = refusal("peers/fsdp2_torchao", "--gpus", "8")
    assert code == 2
    assert "[plan-engine]" in message and "'accelerate'" in message


@pytest.mark.needs_plugin("bridge")
@pytest.mark.parametrize(
    "name, gpus",
    [
        ("llama3_70b_pretrain_64gpu_h100_fp8cs_config", "128"),
        # Its stages are a layout string.
        ("deepseek_v3_pretrain_256gpu_gb200_fp8mx_config", "512"),
    ],
)
def test_a_recipe_of_bridge_is_planned_in_its_own_words(name: str, gpus: str, ask: Ask, tmp_path: Path) -> None:
    """Each layout is what Bridge's recipe becomes with the overrides, also where the recipe has virtual stages."""
    file = tmp_path / "best.yaml"
    found = ask("plan", f"bridge:{name}", "--gpus", gpus, "--top", "3", "--write", str(file))
    assert len(found) == 3
    for layout in found:
        assert f"batch.global={arguments_of(name)['global_batch_size']}" in layout["overrides"]
        words = [part for word in layout["overrides"] for part in ("--set", word)]
        again = ask("estimate", f"bridge:{name}", *words)
        assert again["predicted"] == layout["predicted"]
        assert not any(word.startswith("megatron.") for word in layout["overrides"])
    assert ask("estimate", str(file))["predicted"] == found[0]["predicted"]


@pytest.mark.needs_plugin("bridge")
def test_what_recipes_of_bridge_have_no_field_for_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "bridge:llama3_8b_pretrain_8gpu_h100_fp8cs_config", "--top", "3"]) == 0
    shown = capsys.readouterr()
    assert "cannot set them: FSDP, CUDA graphs of layers, bf16 moments" in shown.err
    assert "Refused" not in shown.err and "FSDP" not in shown.out and "bf16 moments needs" not in shown.err


# --- dispatchers and CUDA graphs -------------------------------------------------------------------------------------

MOE = ("plan", "qwen3_30b_a3b", "--gpu", "h100", "--gpus", "8", "--top", "8")


def _words(layout: Any) -> dict[str, str]:
    return dict(word.split("=", 1) for word in layout["overrides"])


def test_experts_on_several_gpus_get_hybridep_with_their_number_of_ranks(ask: Ask) -> None:
    found = [_words(one) for one in ask(*MOE)]
    assert any(one["parallel.ep"] != "1" for one in found)
    for one in found:
        spread = one["parallel.ep"] != "1"
        assert (one.get("megatron.moe_flex_dispatcher_backend") == "hybridep") == spread
        if spread:
            assert one["env.NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN"] == one["parallel.ep"]


def test_a_dispatcher_that_is_set_stays(ask: Ask) -> None:
    found = ask(*MOE, "--set", "megatron.moe_token_dispatcher_type=alltoall")
    assert {_words(one)["megatron.moe_token_dispatcher_type"] for one in found} == {"alltoall"}


def test_a_rack_keeps_the_ranks_of_hybridep_in_step_with_ep(ask: Ask) -> None:
    for one in map(_words, ask("plan", "qwen3_235b_a22b_mxfp8_gb200", "--top", "3")):
        assert one["env.NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN"] == str(min(int(one["parallel.ep"]), 72))


def test_full_recompute_goes_without_graphs_of_layers(ask: Ask) -> None:
    """Megatron refuses both together; the models of the pack have such graphs."""
    found = [_words(one) for one in ask(*MOE)]
    full = [one for one in found if one.get("megatron.recompute_granularity") == "full"]
    assert full and all(one["megatron.cuda_graph_impl"] == "null" for one in full)


def test_graphs_of_layers_where_the_host_is_slower(ask: Ask) -> None:
    words = ("plan", "llama3_2_1b", "--gpu", "h100", "--gpus", "8", "--sequence", "2048", "--top", "20")
    for one in ask(*words):
        graphs = "megatron.cuda_graph_impl=transformer_engine" in one["overrides"]
        assert not (graphs and any(term["name"] == "host" for term in one["terms"]))
        assert graphs or "fsdp" in str(one["overrides"]) or "host" not in str(one["terms"])
    assert any("layer graphs" in one["layout"] for one in ask(*words))
    stated = ask(*words, "--set", "megatron.cuda_graph_impl=none")
    assert not any("layer graphs" in one["layout"] for one in stated)


# --- what memory needs ------------------------------------------------------------------------------------------------


def test_activations_are_offloaded_as_far_as_memory_needs(ask: Ask) -> None:
    """NVIDIA's own runs keep those of 40 of 80 layers in Grace's memory, with a loss that takes less."""
    recipe, key = "llama70b_tensorwise_gb200", "megatron.cpu_offloading_num_layers"
    best = ask("plan", recipe, "--top", "1")[0]
    layers = int(_words(best)[key])
    assert 40 <= layers <= 50 and "offloading" in {term["name"] for term in best["terms"]}
    less = ask("estimate", recipe, "--set", f"{key}={layers - 1}")
    assert sum(term["bytes"] for term in less["memory"]["terms"]) > 0.94 * 185 * 2**30


@pytest.mark.needs_plugin("bridge")
def test_bridges_switch_of_offloading_is_set_and_read(ask: Ask) -> None:
    best = _words(ask("plan", "bridge:llama3_70b_pretrain_64gpu_gb200_fp8cs_config", "--top", "1")[0])
    assert best["model.cpu_offloading"] == "true" and int(best["model.cpu_offloading_num_layers"]) > 30
    # 95 layers, of which the switch offloads none.
    attributes = arguments_of("gpt_oss_20b_pretrain_8gpu_b300_fp8mx_config")
    assert attributes["cpu_offloading_num_layers"] == 95 and not offloaded_layers(attributes)


def test_a_layout_that_recomputes_nothing_takes_each_switch_of_recompute_away(
    ask: Ask, write: Callable[[str, str], str]
) -> None:
    flags = {"recompute_activations": "true"}
    for name in ("granularity", "method", "num_layers"):
        flags[f"recompute_{name}"] = "null"
    stated = ", ".join(f"{name}: {value}" for name, value in flags.items())
    recipe = write("old_switch.yaml", f"extends: llama8b_fp8\nname: old\nmegatron: {{{stated}}}\n")
    best = ask("plan", recipe, "--top", "1")[0]
    assert _words(best)["megatron.recompute_activations"] == "null"
    assert "recompute" not in {term["name"] for term in best["terms"]}


def test_offloading_takes_what_the_link_to_the_host_needs(ask: Ask) -> None:
    words = ("llama8b_fp8", "--set", "megatron.recompute_granularity=null", "--set", "megatron.recompute_method=null",
             "--set", "megatron.recompute_num_layers=null")  # fmt: skip
    plain = ask("estimate", *words)["predicted"]
    over = [ask("estimate", *words, "--set", f"megatron.cpu_offloading_num_layers={n}") for n in (4, 24)]
    terms = [{term["name"]: term["ms"] for term in one["terms"]} for one in over]
    # A few layers hide behind the others' passes; most of them do not fit through PCIe in that time.
    assert 0 < terms[0]["offloading"] < 0.02 * plain["step_time_ms"]
    assert terms[1]["offloading"] > 0.1 * plain["step_time_ms"]
    assert over[1]["predicted"]["peak_memory_gib"] < over[0]["predicted"]["peak_memory_gib"] < plain["peak_memory_gib"]
    assert over[0]["predicted"]["uncertainty"] >= UNCERTAINTY_OFFLOADED


def test_the_recipes_sizes_with_a_lighter_last_stage_are_named(ask: Ask, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = "llama70b_tensorwise_h100"
    found = [_words(one) for one in ask("plan", recipe)]
    assert any("megatron.pipeline_model_parallel_layout" in one for one in found)
    assert run(["plan", recipe]) == 0
    own = capsys.readouterr().out.splitlines()[-1]
    assert "The recipe's own layout (TP 4, PP 8, VP 5, micro batch 1)" in own
    assert "the best layout of the same sizes (TP 4, PP 8, VP 5, micro batch 1, last stage 8 layers" in own

"""Megatron's refusals carry a fix in the recipe's terms, and the place where recipe or pack state the value."""

from __future__ import annotations

from pathlib import Path

import pytest
from bad_sets import BAD
from sets import RULES, Set

from fp8launch.check.checker import CheckResult, check, check_all
from fp8launch.check.resolved_run import ResolvedRun, resolve_run
from fp8launch.diagnostics import UserError
from fp8launch.job.prepared import prepare
from fp8launch.plugins.validators.refusals import fix_for, names_in, recipe_field

REFUSED = [name for name, case in BAD.items() if case.code.startswith("megatron-")]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, CheckResult]:
    folder = tmp_path_factory.mktemp("refusals")
    prepared = {}
    for i, name in enumerate(REFUSED):
        try:
            prepared[name] = BAD[name].prepare(folder, f"r{i}")
        except UserError:
            continue
    return dict(zip(prepared, check_all(list(prepared.values()), layers=RULES), strict=True))


def test_every_refusal_says_what_to_change(results: dict[str, CheckResult]) -> None:
    problems = [p for result in results.values() for p in result.problems if p.code.startswith("megatron-")]
    assert len(problems) > 30
    for problem in problems:
        assert problem.fix, problem
        assert ".py" not in problem.fix, problem
        assert "site-packages" not in str(problem), problem
        # A field of the recipe, with its section.
        assert any(f"{s}." in problem.fix or f"{s}:" in problem.fix for s in
                   ("model", "parallel", "precision", "megatron", "batch", "train", "env", "optimizer", "checkpoint")
                   ) or "`precision:`" in problem.fix, problem  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> ResolvedRun:
    return resolve_run(Set().prepare(tmp_path_factory.mktemp("run")))


@pytest.mark.parametrize(
    ("message", "fix"),
    [
        (
            "max_position_embeddings (8192) must be greater than or equal to seq_length (32768).",
            "set `model: {max_position_embeddings: 32768}`, or lower batch.sequence",
        ),
        ("assert args.hidden_size % args.num_experts == 0", "make model.hidden_size a multiple of model.num_experts, "
         "or change model.num_experts"),
        (
            "pre_forward_comm must be called from IDLE state, but current state is PRE_FORWARD_COMM_DONE",
            "change the argument that the message names; `fp8launch render RECIPE --as args` shows all arguments",
        ),
        (
            "Muon optimizer does not support overlap grad reduce. Use dist_muon instead.",
            "change megatron.overlap_grad_reduce (true) or megatron.optimizer (adam), so that they agree",
        ),
        ("Please set NVTE_FUSED_ATTN", "set env.NVTE_FUSED_ATTN"),
        (
            "Bias in Moe is only supported when ETP==1",
            "set `parallel: {etp: 1}`, or `model: {disable_bias_linear: true}`",
        ),
        ("assert args.lr_decay_samples is None", "remove megatron.lr_decay_samples, or set it to null"),
        ("assert not args.use_tp_pp_dp_mapping", "remove megatron.use_tp_pp_dp_mapping, or set it to null"),
        ("assert args.save_interval is not None", "set `checkpoint: {interval: <int>}`"),
        ("--moe-permute-fusion is not supported with --moe-enable-deepep", "remove megatron.moe_permute_fusion or "
         "megatron.moe_enable_deepep"),
        (
            "--moe-router-fusion requires --moe-grouped-gemm",
            "set `megatron: {moe_grouped_gemm: true}`, or remove megatron.moe_router_fusion",
        ),
        ("something about tensor_model_parallel_size and pipeline_model_parallel_size", "change parallel.tp (not set) "
         "or parallel.pp (not set), so that they agree"),
    ],
)  # fmt: skip
def test_a_fix_is_made_from_the_sentence(message: str, fix: str, run: ResolvedRun) -> None:
    found = fix_for(run, message)
    assert found == fix or found.replace("(1)", "(not set)") == fix


LAYOUT = "megatron.pipeline_model_parallel_layout="


@pytest.mark.parametrize(
    ("overrides", "fix"),
    [
        ([LAYOUT + "Et*8|t*8|t*8|t*8mL"], "write one `m` for each of model.mtp_num_layers"),
        ([LAYOUT + "Et*8|t*8|t*8|mt*8L", "model.mtp_num_layers=1"], "write the `m` after the last `t`"),
        ([LAYOUT + "Et*8|t*8|t*8|t*7L"], "write one `t` for each of model.num_layers"),
        ([LAYOUT + "t*8|t*8|t*8|t*8L"], "with its only `E`"),
        ([LAYOUT + "Et*8|t*8|t*8|t*8"], "with its only `L`"),
        ([LAYOUT + "Et*8 | t*8 | t*8 | t*8L"], "without spaces"),
        (["megatron.account_for_loss_in_pipeline_split=true"], "after adding 1 for megatron.account_for_loss"),
        (["megatron.decoder_last_pipeline_num_layers=40"], "change megatron.decoder_first_pipeline_num_layers or"),
        (["megatron.decoder_first_pipeline_num_layers=5", "parallel.vp=2"], "a multiple of parallel.vp"),
        (["model.num_layers=30"], "choose parallel.pp as a divisor of model.num_layers"),
    ],
)
def test_a_refused_pipeline_says_what_to_change(overrides: list[str], fix: str) -> None:
    result = check(prepare("llama8b_fp8", ["parallel.pp=4", *overrides]), layers=RULES)
    [problem] = [p for p in result.problems if p.severity == "error"]
    assert fix in str(problem.fix)


@pytest.mark.parametrize("key", ["model.num_layers", "model.hidden_size", "batch.sequence"])
def test_a_missing_size_says_which_field(key: str) -> None:
    result = check(prepare("llama8b_fp8", [f"{key}=null"]), layers=RULES)
    [problem] = [p for p in result.problems if p.severity == "error"]
    assert problem.fix == f"set {key}"


def test_fields_are_where_recipes_state_them(run: ResolvedRun) -> None:
    assert recipe_field(run, "seq_length") == "batch.sequence"
    assert recipe_field(run, "tensor_model_parallel_size") == "parallel.tp"
    assert recipe_field(run, "fp8") == "precision.format"
    assert recipe_field(run, "num_layers") == "model.num_layers"
    assert recipe_field(run, "moe_grouped_gemm") == "megatron.moe_grouped_gemm"
    assert recipe_field(run, "no_such_thing") is None
    assert names_in(run, "Number of layers and --seq-length of num_moe_experts")[:2] == ["seq_length", "num_experts"]


def test_a_place_in_the_pack_is_named_as_the_pack_names_it() -> None:
    result = check(prepare("llama8b_fp8", ["batch.sequence=32768"]), layers=RULES)
    [problem] = [p for p in result.problems if p.severity == "error"]
    assert problem.where is not None
    assert problem.where.startswith("pack: models/llama3_8b, line ")
    assert problem.fix == "set `model: {max_position_embeddings: 32768}`, or lower batch.sequence"


@pytest.mark.parametrize("more", [[], ["parallel.tp=2", "parallel.sequence=auto"], ["precision.recipe=bf16",
                                       "precision.format=null"]])  # fmt: skip
def test_fifteen_heads_are_one_error(more: list[str], tmp_path: Path) -> None:
    overrides = ["model.num_attention_heads=15", "model.kv_channels=null", *more]
    result = check(prepare("llama8b_fp8", overrides), layers=RULES)
    assert [p.code for p in result.problems if p.severity == "error"] == ["attention-heads"]

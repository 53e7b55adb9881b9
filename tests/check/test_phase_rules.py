"""What the check says of phases: each by itself, and whether one can go on from the one before. The rules about borders
are held to what Megatron does with the checkpoint."""

from __future__ import annotations

import functools
import json
import re
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from continued_runs import OVERRIDE
from train_jobs import forked

from fp8launch.check.checker import CheckResult, check
from fp8launch.check.phases import CODES
from fp8launch.cli import run as command
from fp8launch.job.prepared import prepare

TWO_PHASES = (
    "train.iterations=6",
    "checkpoint={dir: ckpt, interval: 100}",
    "phases={first: {iterations: 3}, then: {}}",
)
TWO, SHARDED = "resources.gpus_per_node=2", "megatron.use_distributed_optimizer=true"
RESHARDABLE = "megatron.dist_ckpt_optim_fully_reshardable=true"
OVERLAP = "megatron.overlap_grad_reduce=true"
EXPERTS = ("megatron.num_experts=4", "megatron.moe_token_dispatcher_type=alltoall", "megatron.moe_router_topk=2")
NEVER = "no such message"
Run = Callable[..., str]


def found(*changes: str, recipe: str = "tiny_cpu") -> CheckResult:
    return check(prepare(recipe, [*TWO_PHASES, *changes]), layers=("schema", "rules", "memory"))


def codes(*changes: str, recipe: str = "tiny_cpu") -> set[str]:
    return {p.code for p in found(*changes, recipe=recipe).problems}


def test_equal_phases_are_fine() -> None:
    assert found().problems == ()


# Code of the check, changes, what Megatron says at the border; NEVER where it goes on.
CASES = [
    ("phase-model", ["phases.then.megatron.qk_layernorm=true"], "q_layernorm.weight from model not in state dict"),
    ("phase-schedule", ["phases.then.megatron.weight_decay=0.2"], "start weight decay do not match"),
    ("phase-learning-rate", ["phases.then.train.lr=0.02"], "Could not find parameter group"),
    (
        "phase-learning-rate",
        ["phases.then.train.lr=0.02", "megatron.override_opt_param_scheduler=true"],
        "Could not find parameter group",
    ),
    ("phase-expert-groups", [TWO, *EXPERTS, "parallel.ep=2", "phases.then.parallel.ep=1"], "Could not find parameter"),
    ("phase-expert-groups", [TWO, *EXPERTS, "phases.then.parallel.ep=2"], "Expected 2 entries in state dict"),
    (
        "phase-expert-groups",
        [TWO, SHARDED, RESHARDABLE, *EXPERTS, "parallel.ep=2", "phases.then.parallel.ep=1"],
        "KeyError: 'optimizer'",
    ),
    ("phase-global-batch", ["phases.then.batch.global=16"], "for warmup iterations do not match"),
    ("phase-optimizer", [TWO, SHARDED, "phases.then.megatron.use_distributed_optimizer=null"], "not in state dict"),
    ("phase-checkpoint-format", ["phases.then.megatron.ckpt_format=torch"], "Detected load from a distributed"),
    ("phase-resharding", [TWO, SHARDED, "phases.then.parallel.tp=2"], r"\(TP, PP\) mismatch"),
    (
        "phase-resharding",
        [TWO, SHARDED, OVERLAP, "phases.then.megatron.ddp_bucket_size=20000"],
        "Global shape mismatch",
    ),
    ("phase-states", ["phases.first.megatron.no_save_optim=true"], "KeyError: 'optimizer'"),
    ("phase-no-effect", ["phases.then.megatron.adam_beta1=0.1"], NEVER),
    ("phase-sequence", ["phases.then.batch.sequence=32"], NEVER),
    ("phase-data", ["phases.then.megatron.seed=4"], NEVER),
    (None, [TWO, "phases.then.parallel.tp=2"], NEVER),
    (None, ["phases.first.megatron.ckpt_format=torch"], NEVER),
    (None, ["phases.then.batch.micro=1"], NEVER),
]
NAMES = [f"{code}-{changes[-1]}" for code, changes, _ in CASES]


@pytest.mark.parametrize(("code", "changes", "message"), CASES, ids=NAMES)
def test_borders(code: str | None, changes: list[str], message: str) -> None:
    problems = [p for p in found(*changes).problems if p.code in CODES]
    # Where a learning rate changes, the schedule is another too.
    assert {p.code for p in problems} - ({"phase-schedule", "phase-schedule-breaks"} - {code}) == ({code} - {None})
    stops = any(p.severity == "error" for p in problems)
    assert stops == (message != NEVER)
    assert all("phase then after first" in p.message for p in problems)


@pytest.fixture(scope="session")
def first_phase(tmp_path_factory: pytest.TempPathFactory) -> Callable[[tuple[str, ...], int], Path]:
    """The folder that a first phase leaves, trained once for the borders that share it; to be copied."""

    @functools.cache
    def trained(argv: tuple[str, ...], processes: int) -> Path:
        folder = tmp_path_factory.mktemp("first")
        said = forked(processes, argv, folder).succeeded().output
        assert "exiting program at iteration 3" in said
        return folder

    return trained


@pytest.mark.slow
@pytest.mark.train
@pytest.mark.skipif(find_spec("torch") is None or find_spec("megatron") is None, reason="needs torch and Megatron")
@pytest.mark.parametrize(("code", "changes", "message"), CASES, ids=NAMES)
def test_what_a_border_rule_foretells_happens(
    code: str | None,
    changes: list[str],
    message: str,
    tmp_path: Path,
    first_phase: Callable[[tuple[str, ...], int], Path],
) -> None:
    prepared = prepare("tiny_cpu", [*TWO_PHASES, *changes])
    first, then = prepared.parts
    shutil.copytree(first_phase(first.args.argv, first.layout.world), tmp_path, dirs_exist_ok=True)
    run = forked(then.layout.world, (*then.args.argv, "--load", "ckpt"), tmp_path)
    said = run.output
    assert any(run.codes) == (message != NEVER), said[-3000:]
    if message != NEVER:
        assert re.search(message, said), said[-3000:]
    else:
        assert [int(n) for n in re.findall(r"iteration +(\d+)/ +6 ", said)] == [4, 5, 6]


def test_a_start_in_the_middle_of_another_training_is_refused(tmp_path: Path) -> None:
    assert "phase-start" in codes(f"checkpoint.load={tmp_path}")
    assert "phase-start" not in codes(f"checkpoint.load={tmp_path}", "megatron.finetune=true")
    assert "phase-start" not in codes("checkpoint.load=ckpt")


FP8 = ("train.iterations=50", "phases={first: {iterations: 3, precision: {recipe: bf16}}, then: {}}")


def test_fully_reshardable_states_are_advised_only_where_they_are_right() -> None:
    """Megatron 0.17 to 0.19 shifts them behind padded gradient buckets: with 12 ranks, not with 8."""

    def advice(*changes: str) -> str:
        result = found(*FP8, "precision.param_gather=true", *changes, recipe="llama8b_fp8")
        [fix] = [problem.fix for problem in result.problems if problem.code == "phase-resharding"]
        return str(fix)

    assert advice().startswith("set megatron.dist_ckpt_optim_fully_reshardable: true")
    padded = ("resources.gpus_per_node=6", "resources.nodes=2", "batch.global=120")
    assert "only without overlap_grad_reduce" in advice(*padded)
    assert advice(*padded, "megatron.overlap_grad_reduce=null", "megatron.overlap_param_gather=null").startswith("set ")


def test_fp8_weights_need_states_that_fit_other_buckets() -> None:
    """FP8 weights have a separate buffer, which changes the layout of the bf16 weights' states."""
    one = [*FP8, "precision.param_gather=true"]
    assert "phase-resharding" in codes(*one, recipe="llama8b_fp8")
    assert "phase-resharding" not in codes(
        *one, "megatron.dist_ckpt_optim_fully_reshardable=true", recipe="llama8b_fp8"
    )
    assert "phase-resharding" not in codes(*FP8, "precision.param_gather=false", recipe="llama8b_fp8")


def test_fully_sharded_and_not_are_different_checkpoints() -> None:
    changes = [*FP8, "phases.then.parallel.fsdp=megatron", "phases.then.megatron.use_distributed_optimizer=null"]
    assert "phase-checkpoint-format" in codes(*changes, recipe="llama8b_bf16")


def test_where_the_optimizer_keeps_master_weights_hangs_on_the_fp8_recipe() -> None:
    aware = [*FP8, "precision.param_gather=false", "optimizer={exp_avg: bf16, exp_avg_sq: bf16}"]
    assert "phase-optimizer-states" in codes(*aware, recipe="llama8b_fp8")
    assert "phase-optimizer-states" not in codes(*aware, "phases.then.precision.recipe=delayed", recipe="llama8b_fp8")
    assert "phase-optimizer-states" not in codes(*aware, "optimizer.main_params=fp16", recipe="llama8b_fp8")


def test_each_phase_is_checked_by_itself() -> None:
    problems = found("phases.then.precision.recipe=mxfp8", recipe="llama8b_bf16").problems
    (one,) = [p for p in problems if p.code == "mxfp8-needs-blackwell"]
    assert one.message.startswith("phase then: ")


@pytest.mark.needs_plugin("estimate")
def test_memory_is_that_of_the_fullest_phase() -> None:
    problems = found("phases.then.batch.micro=16", recipe="llama8b_bf16").problems
    (one,) = [p for p in problems if p.code == "does-not-fit"]
    assert one.message.startswith("phase then: ")


def test_a_warning_about_a_border_can_be_silenced() -> None:
    result = found("phases.then.megatron.seed=4", "silence={phase-data: wanted, phase-sequence: not there}")
    assert result.problems == ()
    assert [s.problem.code for s in result.silenced] == ["phase-data"]
    assert {p.code for p in found("silence={phase-model: why}").problems} == {"cannot-silence"}


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """Run a command on a recipe with two phases; its stdout."""
    file = tmp_path / "two.yaml"
    file.write_text(
        "extends: [llama8b_fp8]\nname: two\ncheckpoint: {dir: ckpt, interval: 100}\n"
        "phases: {first: {iterations: 20, precision: {recipe: bf16}}, then: {}}\n"
    )

    def call(*words: str) -> str:
        assert command([words[0], str(file), *words[1:]]) == 0
        return capsys.readouterr().out

    return call


def test_render_knows_phases(run: Run) -> None:
    lists = json.loads(run("render", "--json"))
    assert list(lists) == ["first", "then"]
    assert json.loads(run("render", "--json", "--phase", "then")) == lists["then"]
    text = run("render")
    assert "# phase first: iterations 1-20" in text and "# phase then: iterations 21-50" in text


@pytest.mark.needs_plugin("estimate")
def test_estimate_knows_phases(run: Run) -> None:
    estimate = json.loads(run("estimate", "--json"))
    assert [(p["name"], p["steps"]) for p in estimate["phases"]] == [("first", 20), ("then", 30)]
    assert estimate["steps"] == 50
    assert estimate["gpu_hours_at_most"] == 2 * estimate["phases"][0]["gpu_hours_at_most"] > 0
    assert estimate["gpu_hours"] == pytest.approx(sum(p["gpu_hours"] for p in estimate["phases"]))
    assert "phase then, iterations 21-50" in run("estimate")


def fixes_of(*changes: str) -> dict[str, str | None]:
    return {problem.code: problem.fix for problem in found(*changes).problems}


def test_overriding_is_no_advice_for_another_rate() -> None:
    fixes = fixes_of('software.megatron="0.18.2"', "phases.then.train.lr=0.02")
    assert "set megatron.override_opt_param_scheduler" not in str(fixes["phase-schedule"])


def test_the_way_to_grow_the_batch_is_one_that_the_release_has() -> None:
    for version, flag in (("0.17.1", "rampup_batch_size"), ("0.18.2", "step_batch_size_schedule")):
        fixes = fixes_of(f'software.megatron="{version}"', "phases.then.batch.global=16")
        assert f"megatron.{flag}" in str(fixes["phase-global-batch"])


def test_a_phase_with_another_rate_is_refused_from_0_19_on() -> None:
    problems = {problem.code: problem for problem in found(OVERRIDE, "phases.then.train.lr=0.02").problems}
    assert problems["phase-learning-rate"].severity == "error"

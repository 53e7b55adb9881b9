"""Each known bug is reported for the releases and settings that have it, and for no others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from advisory_sets import CASES, PER_TOKEN, SAVED, problems
from continued_runs import OVERRIDE, continued, written_by
from sets import FSDP, MOE, TP2, Set

from fp8launch.check.checker import CheckResult, check
from fp8launch.check.resolved_run import resolve_run
from fp8launch.check.rule import all_rules
from fp8launch.cli import run as command
from fp8launch.diagnostics import Problem, UserError
from fp8launch.job.prepared import prepare
from fp8launch.plugins.advisories.advisory import PUBLISHED
from fp8launch.plugins.advisories.plugin import CODES
from fp8launch.plugins.advisories.table import ADVISORIES

ROWS = {row.id: row for row in ADVISORIES}
DECIDED = [name for name, row in ROWS.items() if row.affected]
OF_BRIDGE = [name for name in DECIDED if "megatron_bridge" in ROWS[name].affected]


def reported(case: Set, folder: Path) -> set[str]:
    return {problem.code for problem in problems(resolve_run(case.prepare(folder)))}


def test_every_row_has_a_case() -> None:
    # Those about Megatron-Bridge and about a change between two runs have tests of their own.
    elsewhere = {*OF_BRIDGE, "mfsdp-pp-reshard"}
    assert list(CASES) == [name for name in DECIDED if name not in elsewhere]
    assert len(ROWS) == len(ADVISORIES)


@pytest.mark.parametrize("name", CASES)
def test_a_bug_is_reported_for_its_releases_only(name: str, tmp_path: Path) -> None:
    case, row = CASES[name], ROWS[name]
    for release in PUBLISHED["megatron_core"]:
        affected = release in row.affected.get("megatron_core", PUBLISHED["megatron_core"])
        try:
            found = reported(case.run(megatron=release), tmp_path)
        except UserError as refused:
            # A release without the flag cannot have the bug.
            assert {problem.code for problem in refused.problems} == {"flag-unknown"}, refused
            assert release not in row.affected.get("megatron_core", ())
            continue
        assert (name in found) == affected, release
    for release in PUBLISHED["transformer_engine"]:
        if "transformer_engine" in row.affected:
            found = reported(case.run(engine=release), tmp_path)
            assert (name in found) == (release in row.affected["transformer_engine"]), release


@pytest.mark.parametrize("name", CASES)
def test_a_run_without_the_setting_is_not_affected(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    assert name in reported(case.run(), tmp_path)
    assert name not in reported(case.run(fixed=True), tmp_path)


@pytest.mark.parametrize("release", PUBLISHED["megatron_core"])
def test_the_plain_run_has_no_known_bug(release: str, tmp_path: Path) -> None:
    assert reported(Set(software={"megatron": release}), tmp_path) == set()


# Measured on two H100 with Megatron-Core 0.19.2 and Transformer Engine 2.20.2: they train what one GPU trains.
RIGHT: dict[str, dict[str, Any]] = {
    "tp 2": TP2,
    "pp 2 x vp 2": {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2},
    "cp 2": {"context_parallel_size": 2},
    "cp 2 by all-to-all": {"context_parallel_size": 2, "cp_comm_type": ["a2a"]},
    "cp 2 with token prediction": {"context_parallel_size": 2, "mtp_num_layers": 1},
    "token prediction with per-token loss": {**PER_TOKEN, "mtp_num_layers": 1},
    "experts": MOE,
    "tp 2 x ep 2, expert tp 1": {
        **MOE, **TP2, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1, "moe_aux_loss_coeff": 0.01,
    },
    "tp 2 x ep 2, expert tp 2": {**MOE, **TP2, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 2},
    "experts with cp 2": {
        **MOE, "context_parallel_size": 2, "moe_aux_loss_coeff": 0.01, "moe_z_loss_coeff": 0.001,
        "expert_model_parallel_size": 4,
    },
    "local CUDA graphs": {"cuda_graph_impl": "local"},
    "op fuser": {**MOE, "use_transformer_engine_op_fuser": True},
    "offloaded optimizer": {"optimizer_cpu_offload": True, "use_precision_aware_optimizer": True},
    "delayed, recomputed": {
        "fp8_recipe": "delayed", "fp8_param_gather": None, "recompute_granularity": "full",
        "recompute_method": "uniform", "recompute_num_layers": 1,
    },
    "saved and resumed": {**SAVED, **TP2, "async_save": True},
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_what_was_measured_to_be_right_raises_no_alarm(name: str, tmp_path: Path) -> None:
    software = {"megatron": "0.19.2", "transformer_engine": "2.20.2"}
    assert reported(Set(RIGHT[name], software=software), tmp_path) == set()


@pytest.mark.parametrize("name", CASES)
def test_an_advisory_says_what_to_do_and_where_it_is_known_from(name: str, tmp_path: Path) -> None:
    found = problems(resolve_run(CASES[name].run().prepare(tmp_path)))
    problem = next(problem for problem in found if problem.code == name)
    assert (problem.severity, problem.kind) == ("warning", "advisory")
    assert problem.source is not None and problem.source.startswith("https://github.com/")
    assert problem.where is not None and problem.fix
    versions = [release for releases in ROWS[name].affected.values() for release in releases]
    assert any(f" {release}: " in problem.message for release in versions)


def test_undecided_rows_are_never_reported(tmp_path: Path) -> None:
    change = {"recompute_granularity": "full", "fp8_recipe": "delayed", "fp8_amax_compute_algo": "max"}
    case = Set({**change, "recompute_method": "uniform", "recompute_num_layers": 1})
    assert {name for name, row in ROWS.items() if not row.affected} >= {"te-recompute-amax", "hdo-weights-only"}
    assert reported(case, tmp_path) == set()


@pytest.mark.parametrize(
    ("engine", "change", "affected"),
    [
        ("2.16.0", {"expert_tensor_parallel_size": 1}, True),
        ("2.16.0", {"expert_tensor_parallel_size": 2}, True),
        # Transformer Engine marked grouped weights itself.
        ("2.12.0", {"expert_tensor_parallel_size": 1}, False),
        ("2.16.0", {"expert_tensor_parallel_size": 1, "moe_single_grouped_weight": True}, False),
        ("2.16.0", {"expert_tensor_parallel_size": 1, "moe_grouped_gemm": None}, False),
        ("2.16.0", {"expert_tensor_parallel_size": 1, "moe_grouped_gemm": None, "disable_bias_linear": None}, True),
        ("2.16.0", {"expert_tensor_parallel_size": 2, "moe_grouped_gemm": None, "disable_bias_linear": None}, False),
    ],
)
def test_which_experts_the_gradient_norm_leaves_out(
    engine: str, change: dict[str, Any], affected: bool, tmp_path: Path
) -> None:
    software = {"megatron": "0.18.0", "transformer_engine": engine}
    case = Set({**MOE, **TP2, "expert_model_parallel_size": 4, **change}, software=software)
    assert ("moe-tp-ep-norm" in reported(case, tmp_path)) == affected


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"expert_model_parallel_size": 8}, {"mfsdp-2n"}),
        ({"expert_model_parallel_size": 4}, set()),
        ({"expert_model_parallel_size": 4, **TP2, "expert_tensor_parallel_size": 2}, {"mfsdp-2n"}),
        ({"expert_model_parallel_size": 4, **TP2, "expert_tensor_parallel_size": 1}, set()),
        ({"expert_model_parallel_size": 8, "no_gradient_accumulation_fusion": None}, {"mfsdp-zero1-fusion"}),
        ({"expert_model_parallel_size": 4, "no_gradient_accumulation_fusion": None}, set()),
    ],
)
def test_experts_that_megatron_fsdp_does_not_divide(change: dict[str, Any], found: set[str], tmp_path: Path) -> None:
    """With fused accumulation nothing was reported: on two H200, gradients of experts were off by 65 %."""
    assert reported(Set({**FSDP, **MOE, **change}), tmp_path) & {"mfsdp-2n", "mfsdp-zero1-fusion"} == found


def test_an_unpublished_release_was_not_examined(tmp_path: Path) -> None:
    case = CASES["rampup-ignored"]
    assert reported(case.run(megatron="0.18.7"), tmp_path) == set()


def test_a_minor_version_is_affected_if_all_its_releases_are(tmp_path: Path) -> None:
    # 2.14 is the image's version of Transformer Engine, 2.18 is one release.
    for engine, affected in (("2.14", True), ("2.18", True), ("2.13", False)):
        case = CASES["te-hybrid-grouped-mlp"].run(engine=engine)
        assert ("te-hybrid-grouped-mlp" in reported(case, tmp_path)) == affected, engine


def test_the_image_says_which_release_runs(tmp_path: Path) -> None:
    image = {"container": {"image": "nemo-26.06"}, "software": {}}
    found = list(problems(resolve_run(Set({"rampup_batch_size": [8, 8, 1000]}, more=image).prepare(tmp_path))))
    assert [problem.code for problem in found] == ["rampup-ignored"]
    assert "Megatron-Core 0.18.0" in found[0].message


def of_bridge(folder: Path, name: str, release: str, overrides: dict[str, Any]) -> set[str]:
    recipe = folder / "bridge.yaml"
    text = {"name": "bridge", "bridge": {"recipe": name, "release": release, "overrides": overrides}}
    recipe.write_text(yaml.safe_dump(text), encoding="utf-8")
    return {problem.code for problem in problems(resolve_run(prepare(str(recipe))))}


@pytest.mark.needs_plugin("bridge")
def test_a_batch_ramp_in_megatron_bridge(tmp_path: Path) -> None:
    ramp = {"train": {"rampup_batch_size": [8, 8, 1000]}}
    # 0.4.0 trains with Megatron-Core 0.17.0, which ramps; 0.6.0 with 0.19.0, which ignores the ramp.
    old = of_bridge(tmp_path, "llama3_8b_pretrain_8gpu_gb200_fp8cs_v1_config", "0.4.0", ramp)
    new = of_bridge(tmp_path, "llama3_8b_pretrain_32gpu_gb200_fp8cs_config", "0.6.0", ramp)
    assert (old, new) == ({"bridge-rampup-lr"}, {"rampup-ignored"})


@pytest.mark.needs_plugin("bridge")
@pytest.mark.parametrize(
    ("release", "name", "affected"),
    [
        ("0.4.0", "deepseek_v3_pretrain_1024gpu_h100_bf16_v1_config", True),
        ("0.5.0", "deepseek_v3_pretrain_1024gpu_h100_bf16_v1_config", True),
        ("0.6.0", "deepseek_v3_pretrain_1024gpu_h100_bf16_config", False),
    ],
)
def test_token_prediction_on_a_stage_of_its_own_in_megatron_bridge(
    release: str, name: str, affected: bool, tmp_path: Path
) -> None:
    for layout, alone in (("Et*3|(tt|)*13t*16|ttt|m|L", True), ("Et*3|(tt|)*13t*16|ttt|t|mL", False)):
        found = of_bridge(tmp_path, name, release, {"model": {"pipeline_model_parallel_layout": layout}})
        assert ("bridge-mtp-embedding-group" in found) == (affected and alone)


@pytest.mark.needs_plugin("bridge")
def test_masked_tokens_and_token_prediction_in_megatron_bridge(tmp_path: Path) -> None:
    name = "deepseek_v3_pretrain_1024gpu_h100_bf16_config"
    for masked in (True, False):
        found = of_bridge(tmp_path, name, "0.6.0", {"dataset": {"eod_mask_loss": masked}})
        assert ("bridge-mtp-mask" in found) == masked


def test_bugs_of_megatron_bridge_are_not_those_of_other_engines(tmp_path: Path) -> None:
    found = reported(Set({"mtp_num_layers": 1, "eod_mask_loss": True}), tmp_path)
    assert not {name for name in found if name.startswith("bridge-")}


# --- as a command ------------------------------------------------------------------------------------------------


def checked(case: Set, folder: Path) -> CheckResult:
    return check(case.prepare(folder), layers=("schema", "rules"))


def test_an_advisory_changes_no_verdict_and_can_be_silenced(tmp_path: Path) -> None:
    case = CASES["rampup-ignored"].run()
    result = checked(case, tmp_path)
    assert result.ok
    assert [problem.code for problem in result.problems] == ["rampup-ignored"]
    reason = {"silence": {"rampup-ignored": "the ramp is for 0.17"}}
    silenced = checked(Set(case.change, software=case.software, more=reason), tmp_path)
    assert silenced.problems == ()
    assert [one.as_json()["reason"] for one in silenced.silenced] == ["the ramp is for 0.17"]


def test_json_marks_advisories_and_leaves_other_problems_as_they_were(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case = CASES["global-aux-dp"].run()
    case = Set({**case.change, "recompute_num_layers": 5}, software=case.software)
    case.prepare(tmp_path, "mixed")
    assert command(["check", str(tmp_path / "mixed.yaml"), "--json"]) == 0
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    by_code = {problem["code"]: problem for problem in answer["problems"]}
    plain = {"severity", "code", "message", "where", "fix"}
    assert set(by_code["flag-without-effect"]) == plain
    assert set(by_code["global-aux-dp"]) == plain | {"kind", "source"}
    assert by_code["global-aux-dp"]["kind"] == "advisory"


def test_text_fits_80_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, case in CASES.items():
        case.run().prepare(tmp_path, "short")
        command(["check", "short.yaml", "--set", "silence={}"])
        text = capsys.readouterr().out
        start = text.index("known bug in")
        assert f"[{name}]" in text
        lines = text[text.rindex("\n", 0, start) + 1 if "\n" in text[:start] else 0 :].splitlines()
        block = lines[: next(i for i, line in enumerate(lines) if line.startswith("    source: ")) + 1]
        assert all(len(line) <= 80 for line in block[:-1]), block


# --- changes between runs ----------------------------------------------------------------------------------------


PHASES = ("phases={first: {iterations: 3}, then: {}}", "train.iterations=6", "checkpoint={dir: ckpt, interval: 100}")


def phased(*changes: str) -> dict[str, Problem]:
    result = check(prepare("tiny_cpu", [*PHASES, *changes]), layers=("schema", "rules"))
    return {problem.code: problem for problem in result.problems}


@pytest.mark.parametrize("version", ["0.17.1", "0.18.2"])
def test_a_phase_with_another_rate_keeps_the_old_one(version: str) -> None:
    software = f'software.megatron="{version}"'
    found = phased(software, OVERRIDE, "phases.then.train.lr=0.02")
    assert "override-sched-ignored" in found
    assert found["override-sched-ignored"].message.startswith("phase then after first: ")
    # What does change is the schedule, not the rate.
    assert "phase-schedule-breaks" not in found
    same_rate = phased(software, OVERRIDE, "phases.then.megatron.lr_decay_iters=9")
    assert "override-sched-ignored" not in same_rate
    assert "phase-schedule-breaks" in same_rate


def test_a_phase_with_another_rate_is_refused_from_0_19_on() -> None:
    found = phased(OVERRIDE, "phases.then.train.lr=0.02")
    assert "override-sched-ignored" not in found
    assert found["phase-learning-rate"].severity == "error"


def test_a_checkpoint_of_a_run_with_another_rate(tmp_path: Path) -> None:
    load = written_by(tmp_path)
    assert "override-sched-ignored" in continued(load, "train.lr=0.02", "train.min_lr=0.001")


def test_a_checkpoint_of_a_run_with_the_same_rate_raises_nothing(tmp_path: Path) -> None:
    load = written_by(tmp_path)
    for version in ("0.18.2", "0.19.2"):
        found = continued(load, "train.lr=0.01", "train.min_lr=0.001", "train.iterations=99", version=version)
        assert not {"override-sched-ignored", "checkpoint-learning-rate"} & set(found), found


def test_of_an_unknown_checkpoint_the_advisory_says_what_holds(tmp_path: Path) -> None:
    found = continued(tmp_path)
    assert "a different lr or min_lr has no effect" in found["override-sched-ignored"].message


def test_a_run_that_loads_its_own_checkpoints_keeps_its_rate(tmp_path: Path) -> None:
    own = ['software.megatron="0.18.2"', OVERRIDE, "checkpoint={dir: ckpt, load: ckpt, interval: 100}"]
    for folder, affected in (("ckpt", False), (str(tmp_path), True)):
        recipe = prepare("tiny_cpu", [change.replace("ckpt", folder) for change in own])
        found = {problem.code for problem in problems(resolve_run(recipe))}
        assert ("override-sched-ignored" in found) == affected


def test_megatron_fsdp_with_another_pipeline(tmp_path: Path) -> None:
    shared = {"use_megatron_fsdp": True, "pipeline_model_parallel_size": 2}
    load = written_by(tmp_path, **shared)
    for stages, affected in ((1, True), (2, False)):
        changes = {**CASES["mfsdp-zero1-fusion"].change, "load": str(load), "pipeline_model_parallel_size": stages}
        result = check(Set(changes).prepare(tmp_path), layers=("schema", "rules", "machine"))
        assert ("mfsdp-pp-reshard" in {problem.code for problem in result.problems}) == affected


def test_the_plugin_lists_the_codes_of_the_table() -> None:
    """Without the plugin, its codes may still be silenced."""
    assert list(CODES) == list(ROWS)
    assert {code for code, rule in all_rules().items() if rule.known_bug} == set(CODES)

"""Megatron's verdict in the check: never lost, never about this machine's own packages and files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from sets import BF16, RULES, Set

from fp8launch.check.checker import LAYERS, CheckResult, by_place, check, check_all
from fp8launch.check.job_paths import job_paths
from fp8launch.check.phases import CODES
from fp8launch.check.resolved_run import resolve_run
from fp8launch.cli import run
from fp8launch.cluster.profile import Cluster
from fp8launch.diagnostics import Problem
from fp8launch.job.prepared import prepare
from fp8launch.plugins.validators import megatron_core
from fp8launch.plugins.validators.layer import request

POISON = {"checkpoint_activations": True}
DESCRIPTION = {
    "hidden_act": "silu", "num_hidden_layers": 2, "hidden_size": 256, "num_attention_heads": 8, "rope_theta": 500000,
    "tie_word_embeddings": False, "rms_norm_eps": 1e-5, "rope_scaling": {"factor": 8.0},
    "block_configs": [
        {"attention": {"n_heads_in_group": 4, "no_op": False, "replace_with_linear": False},
         "ffn": {"ffn_mult": 1.5, "no_op": False, "replace_with_linear": False}}
    ] * 2,
}  # fmt: skip


def checked(cases: list[Set], folder: Path, cluster: Cluster | None = None) -> list[CheckResult]:
    return check_all([case.prepare(folder, f"run{i}") for i, case in enumerate(cases)], cluster, layers=RULES)


def test_one_recipe_does_not_switch_the_validators_off_for_others(tmp_path: Path) -> None:
    bad = Set({"recompute_granularity": "full"})
    poisoned, refused, good = checked([Set(POISON), bad, Set()], tmp_path)
    assert [p.code for p in poisoned.problems] == ["megatron-validate"]
    assert [p.code for p in refused.problems] == ["megatron-transformer-config"]
    assert good.ok
    assert not good.problems


def test_a_run_without_a_verdict_is_not_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fp8launch.check.resolved_run.ASSUMED_TE", "not a version")
    no_te = Set(software={"transformer_engine": None})
    lost, good = checked([no_te, Set()], tmp_path)
    assert [p.code for p in lost.problems if p.severity == "error"] == ["megatron-no-verdict"]
    assert good.ok


def test_validators_that_cannot_be_had_are_never_exit_code_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("FP8LAUNCH_MEGATRON", raising=False)
    monkeypatch.setenv("FP8LAUNCH_OFFLINE", "1")
    monkeypatch.setattr(megatron_core, "_installed", lambda: iter(()))
    recipe = tmp_path / "run.yaml"
    recipe.write_text(yaml.safe_dump({"name": "run", **Set().recipe()}), encoding="utf-8")
    assert run(["check", str(recipe)]) == 3


def test_a_model_description_is_read_where_the_mount_has_it(tmp_path: Path) -> None:
    (tmp_path / "host").mkdir()
    (tmp_path / "host/model.json").write_text(json.dumps(DESCRIPTION), encoding="utf-8")
    flags = {
        **BF16, "num_layers": 2, "hidden_size": 256, "num_attention_heads": 8, "group_query_attention": True,
        "num_query_groups": 2, "swiglu": True, "normalization": "RMSNorm", "position_embedding_type": "rope",
        "use_rotary_position_embeddings": True, "rotary_base": 500000, "use_rope_scaling": True,
        "rope_scaling_factor": 8.0, "untie_embeddings_and_output_weights": True, "ffn_hidden_size": 512,
    }  # fmt: skip
    more = {"container": {"image": "/images/x.sqsh", "mounts": [f"{tmp_path}/host:/models"]}}
    cluster = Cluster(runtime="pyxis")
    for inside, warned in (("/models/model.json", []), ("/opt/in/the/image.json", ["model-not-known-here"])):
        case = Set({**flags, "heterogeneous_layers_config_path": inside}, more=more)
        [result] = checked([case], tmp_path, cluster)
        assert result.ok, [str(p) for p in result.problems]
        assert [p.code for p in result.problems] == warned


def test_the_architecture_may_be_in_the_checkpoint(tmp_path: Path) -> None:
    sizes = dict.fromkeys(
        ("num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "max_position_embeddings",
         "num_query_groups", "group_query_attention")
    )  # fmt: skip
    divided = {"pipeline_model_parallel_size": 2, "tensor_model_parallel_size": 2, "sequence_parallel": True}
    for more in ({}, divided, {**divided, "num_layers_per_virtual_pipeline_stage": 3}):
        case = Set({**sizes, **more, "use_checkpoint_args": True, "load": "/checkpoints"})
        [result] = checked([case], tmp_path)
        assert result.ok, [str(p) for p in result.problems]
        assert [p.code for p in result.problems] == ["model-not-known-here"]
    # What does not depend on the sizes is still refused.
    case = Set({**sizes, "use_checkpoint_args": True, "load": "/c", "min_lr": 1.0})
    [result] = checked([case], tmp_path)
    assert [p.code for p in result.problems if p.severity == "error"] == ["megatron-validate"]


def test_megatron_s_verdict_is_asked_of_each_phase() -> None:
    changes = (
        "train.iterations=6",
        "checkpoint={dir: ckpt, interval: 100}",
        "phases={first: {iterations: 3}, then: {}}",
        "phases.then.megatron.fp16=true",
    )
    run = prepare("tiny_cpu", changes)
    problems = [p for p in check(run, layers=RULES).problems if p.code not in CODES]
    assert [p.code for p in problems] == ["megatron-validate"]
    assert problems[0].message.startswith("phase then: ")


def test_problems_are_sorted_by_severity_and_place() -> None:
    problems = [
        Problem("warning", "a", "m", "x.yaml:3"), Problem("error", "b", "m", "x.yaml:20"),
        Problem("error", "c", "m", "x.yaml:3"), Problem("error", "d", "m"), Problem("warning", "e", "m", "x.yaml"),
    ]  # fmt: skip
    assert [p.code for p in sorted(problems, key=by_place)] == ["d", "c", "b", "e", "a"]


def test_megatron_points_at_the_line_that_it_speaks_of(tmp_path: Path) -> None:
    [result] = checked([Set({"max_position_embeddings": 4096})], tmp_path)
    [problem] = result.problems
    path, _, line = str(problem.where).rpartition(":")
    assert "max_position_embeddings: 4096" in Path(path).read_text().splitlines()[int(line) - 1]
    assert "max_position_embeddings (4096)" in problem.message
    assert problem.fix == "set `model: {max_position_embeddings: 8192}`, or lower batch.sequence"


def test_a_misleading_message_is_put_right(tmp_path: Path) -> None:
    [result] = checked([Set({"eval_global_batch_size": 12})], tmp_path)
    [problem] = result.problems
    assert "eval_global_batch_size" in str(problem.fix)
    assert "Megatron rejects" not in problem.message


def test_every_layer_says_whether_it_looked(tmp_path: Path) -> None:
    layers = check(Set(BF16).prepare(tmp_path)).layers
    assert tuple(layers) == LAYERS
    assert {name: state for name, state in layers.items() if state != "ran"} == {}
    [some] = checked([Set()], tmp_path)
    assert some.layers["machine"] == "not run: not requested"


def test_runs_of_several_versions_are_checked_in_one_call(tmp_path: Path) -> None:
    cases = {
        "new": Set(),
        "old": Set(software={"megatron": "0.17"}),
        "old and bad": Set({"min_lr": 1.0}, software={"megatron": "0.17"}),
        "new and bad": Set({"min_lr": 1.0}),
    }
    found = check_all([case.prepare(tmp_path, name) for name, case in cases.items()], layers=RULES)
    assert [result.ok for result in found] == [True, True, False, False]


@pytest.mark.parametrize("variable", ["WORLD_SIZE=3", "WORLD_SIZE=x", "RANK=x", "LOCAL_RANK=x"])
def test_a_variable_of_the_ranks_in_a_recipe_is_reported_once(variable: str) -> None:
    """Megatron's validators took it for the world size, and reported a batch that it does not divide."""
    result = check(prepare("llama8b_fp8", [f"env.{variable}"]))
    assert [problem.code for problem in result.problems if problem.severity == "error"] == ["reserved-variable"]
    assert "env." in str(result.problems[0].where) and result.layers["megatron"] == "ran"


def test_arguments_that_are_not_megatrons_do_not_reach_its_validators(tmp_path: Path) -> None:
    """Megatron's parser would refuse flags of a script, and anything in launch.arguments."""
    recipe = tmp_path / "r.yaml"
    for launch in (
        "launch: {script: /m/pretrain_vlm.py}\nmegatron: {dataloader_seq_length: 64}",
        "launch: {script: /m/train.py, arguments: [--my-flag, 3, --other=a b, -x, -1]}",
    ):
        recipe.write_text(f"extends: tiny_cpu\nname: r\n{launch}\n", encoding="utf-8")
        one = prepare(str(recipe))
        asked = request(resolve_run(one), job_paths(one.loaded, Cluster())).argv
        own = {"--dataloader-seq-length", "--my-flag", "3", "--other=a b", "-x", "-1"}
        assert own & set(one.args.argv) and not own & set(asked)

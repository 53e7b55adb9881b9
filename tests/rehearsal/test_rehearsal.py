"""A step of Megatron's and Transformer Engine's own Python code, as any rank of a run, without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8launch.check.checker import CheckResult, check_all
from fp8launch.check.rehearsal import LAYER, with_rehearsal
from fp8launch.cluster.profile import Cluster
from fp8launch.job.prepared import prepare
from fp8launch.rehearsal.roles import roles_of
from fp8launch.rehearsal.shrink import BLOCK, residue, shrink

needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")

# What two H200 did with each: the first two died in their first forward pass, with these sentences.
QK_NORM = """
name: qk_norm_fused_rope
extends: [models/qwen3_4b, parts/pretrain, parts/distributed_optimizer, parts/fused_kernels, precision/tensorwise,
          hardware/h200]
batch: {micro: 1, global: 4, sequence: 4096}
train: {iterations: 3, lr: 3.0e-4, min_lr: 3.0e-5, warmup: 1}
resources: {nodes: 1, gpus_per_node: 2}
"""
DENSE = """
name: dense
extends: [models/llama3_8b, parts/pretrain, parts/distributed_optimizer, precision/tensorwise, hardware/h200]
precision: {param_gather: true}
batch: {micro: 1, global: 4, sequence: 8192}
train: {iterations: 3, lr: 3.0e-4, min_lr: 3.0e-5, warmup: 1}
resources: {nodes: 1, gpus_per_node: 2}
"""


def rehearsed(recipe: str) -> CheckResult:
    run = prepare(recipe)
    return with_rehearsal([run], check_all([run]), Cluster())[0]


@needs_torch
@pytest.mark.train
def test_a_refusal_reached_only_by_a_step_is_found(write: Callable[[str, str], str]) -> None:
    result = rehearsed(write("r.yaml", QK_NORM))
    [problem] = [p for p in result.problems if p.severity == "error"]
    assert "fused_single_qkv_rope requested but not available/supported for the config." in problem.message
    assert "megatron/core/transformer/attention.py" in problem.message
    assert problem.fix is not None
    assert "fused_single_qkv_rope: false" in problem.fix


@needs_torch
@pytest.mark.train
def test_a_run_that_trains_on_gpus_passes(write: Callable[[str, str], str]) -> None:
    result = rehearsed(write("r.yaml", DENSE))
    assert result.ok, result.problems
    assert result.layers[LAYER] == "ran"


def test_without_torch_the_command_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from support import only, refused

    from fp8launch.rehearsal import rehearse

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    problem = only(refused(rehearse.require_torch, exit_code=3))
    assert "fp8launch[rehearse]" in str(problem.fix)


@given(real=st.integers(1, 200_000), unit=st.sampled_from([BLOCK, 4 * BLOCK, 64 * BLOCK]))
def test_a_shrunk_size_divides_as_the_real_one_does(real: int, unit: int) -> None:
    small = residue(real, unit)
    assert small <= real
    for divisor in (2, 3, 8, 16, 32, 128):
        if unit % divisor == 0:
            assert (small % divisor == 0) == (real % divisor == 0)


def test_the_world_and_its_groups_stay() -> None:
    run = prepare("llama405b_tensorwise_h100")
    small = shrink(run.args.values, run.layout).values
    for flag in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"):
        assert small.get(flag) == run.args.values.get(flag)
    assert small["num_attention_heads"] == run.args.values["num_attention_heads"]


def test_other_sizes_divide_alike() -> None:
    run = prepare("llama405b_tensorwise_h100")
    small, larger = (shrink(run.args.values, run.layout, scale) for scale in (1, 3))
    unit = BLOCK * run.layout.tp
    for flag in ("hidden_size", "ffn_hidden_size"):
        real, first, second = small.sizes[flag][0], small.sizes[flag][1], larger.sizes[flag][1]
        assert first < second < real
        assert first % unit == second % unit == real % unit


def test_each_stage_and_the_last_rank_have_a_role() -> None:
    run = prepare("llama405b_tensorwise_h100")
    roles = roles_of(run.layout)
    stage = run.layout.world // run.layout.pp
    assert [role.rank for role in roles] == [0, stage, (run.layout.pp - 1) * stage, run.layout.world - 1]

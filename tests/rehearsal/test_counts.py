"""A step counted in small rehearsals, against closed formulas and against a profile of the real run."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import sitting

from fp8launch.check.checker import check_all
from fp8launch.check.rehearsal import with_rehearsal
from fp8launch.cli import run as run_command
from fp8launch.cluster.profile import Cluster
from fp8launch.engines.base import Layout
from fp8launch.job.prepared import Prepared, prepare
from fp8launch.megatron.parameters import parameters
from fp8launch.rehearsal.counting import PRIMES, CountingPlan, NotCountable, Sizes, counts
from fp8launch.rehearsal.roles import Role, roles_of

ROOT = Path(__file__).resolve().parents[2]

needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")

DENSE = f"""
name: dense
extends: [{ROOT}/benchmarks/h200/recipes/tune_base.yaml]
software: {{megatron: "0.19", transformer_engine: "2.20"}}
"""
PARALLEL = """
name: parallel
extends: [models/llama3_8b, parts/pretrain, parts/distributed_optimizer, precision/tensorwise, hardware/h200]
software: {megatron: "0.19", transformer_engine: "2.20"}
parallel: {tp: 2, pp: 2, cp: 1, sequence: auto}
batch: {micro: 1, global: 32, sequence: 8192}
train: {iterations: 7, lr: 3.0e-4, min_lr: 3.0e-5, warmup: 2}
resources: {nodes: 1, gpus_per_node: 8}
"""
EXPERTS = """
name: experts
extends: [models/qwen3_30b_a3b, parts/pretrain, parts/distributed_optimizer, moe/alltoall, precision/tensorwise,
          hardware/h200]
software: {megatron: "0.19", transformer_engine: "2.20"}
parallel: {ep: 4}
batch: {micro: 1, global: 32, sequence: 4096}
train: {iterations: 7, lr: 3.0e-4, min_lr: 3.0e-5, warmup: 2}
resources: {nodes: 1, gpus_per_node: 8}
"""


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[dict[str, Any]]]:
    """Counts a step of the first role of a run, or of the roles named."""

    def count(run: Prepared, *names: str) -> list[dict[str, Any]]:
        def chosen(layout: Layout) -> list[Role]:
            found = roles_of(layout)
            return [role for role in found if role.name in names] or found[:1]

        monkeypatch.setattr("fp8launch.rehearsal.rehearse.roles_of", chosen)
        [result] = with_rehearsal([run], check_all([run], layers=("schema",)), Cluster(), count=True)
        assert result.rehearsal is not None
        roles: list[dict[str, Any]] = json.loads(json.dumps(result.rehearsal.as_json()))["roles"]
        assert all(role.get("counts_exact") for role in roles), roles
        return roles

    return count


def volume(role: Mapping[str, Any], collective: str, group: str) -> tuple[float, float]:
    """Calls and bytes of a kind of collective in a group."""
    found = [e for e in role["traffic"] if (e["collective"], e["group"]) == (collective, group)]
    return sum(e["calls"] for e in found), sum(e["bytes"] for e in found)


@needs_torch
@pytest.mark.train
@pytest.mark.slow
def test_a_step_of_llama_is_that_of_its_profile_on_four_h200(
    write: Callable[[str, str], str], counted: Callable[..., list[dict[str, Any]]]
) -> None:
    run = prepare(write("r.yaml", DENSE))
    [role] = counted(run)
    text = (sitting("2026-11-20-profile") / "base.log").read_text()
    [profile] = map(json.loads, re.findall(r"^fp8launch-kernels: (\{.*)$", text, re.MULTILINE))
    fp8 = sum(e["count"] for e in role["gemms"] if e["kind"] == "gemm" and e["dtype"] == "fp8")
    assert fp8 == profile["families"]["fp8_gemm"]["count"] == 3072
    forward = [e["count"] for e in role["gemms"] if e["kind"] == "attention" and e["pass"] == "forward"]
    assert forward == [kernel["count"] for kernel in profile["top"] if "flash_fprop" in kernel["name"]]
    # The LM head in bf16, by its three kernels.
    head = [e for e in role["gemms"] if e["kind"] == "matmul"]
    kernels = [kernel["count"] for kernel in profile["top"] if kernel["name"].startswith("nvjet_sm90_tst")]
    assert [e["count"] for e in head] == kernels == [8, 8, 8]
    assert all(sorted(e["shape"]) == [4096, 8192, 128256] for e in head)
    # Every parameter is reduced, and gathered in bf16.
    whole = parameters(run.args.attributes, run.layout.world)
    assert whole is not None
    each = 2 if run.args.values.get("grad_reduce_in_bf16") else 4
    assert volume(role, "reduce_scatter", "dp")[1] == whole.total * each
    assert volume(role, "all_gather", "dp")[1] == whole.total * 2


@needs_torch
@pytest.mark.train
@pytest.mark.slow
def test_tensor_and_pipeline_traffic_is_that_of_the_activations(
    write: Callable[[str, str], str], counted: Callable[..., list[dict[str, Any]]]
) -> None:
    run = prepare(write("r.yaml", PARALLEL))
    first, last = counted(run, "first stage", "last stage")
    microbatches, layers, activations = run.layout.microbatches, 16, 8192 * 4096 * 2
    # Sequence parallelism: two scatters a layer in each direction, and one of the embedding.
    scatters = (4 * layers + 1) * microbatches
    assert volume(first, "reduce_scatter", "tp") == (scatters, scatters * activations)
    for role in (first, last):
        for kind in ("send", "receive"):
            assert volume(role, kind, "pp") == (microbatches, microbatches * activations // 2)


@needs_torch
@pytest.mark.train
@pytest.mark.slow
def test_experts_get_every_token_as_often_as_it_is_routed(
    write: Callable[[str, str], str], counted: Callable[..., list[dict[str, Any]]]
) -> None:
    run = prepare(write("r.yaml", EXPERTS))
    [role] = counted(run)
    steps, tokens, chosen, width = 48 * run.layout.microbatches, 4096, 8, 2048
    # There and back, forward and backward, in bf16; the probabilities of the rows, in fp32, go there and back once.
    rows = steps * tokens * chosen
    assert volume(role, "all_to_all", "ep") == (6 * steps, rows * (4 * width * 2 + 2 * 4))
    grouped = [e for e in role["gemms"] if e["kind"] == "grouped gemm" and e["pass"] == "forward"]
    assert [(e["count"], e["groups"], *e["shape"]) for e in grouped] == [
        (steps, 32, tokens * chosen, 2 * 768, width),
        (steps, 32, tokens * chosen, width, 768),
    ]


widths = st.fixed_dictionaries({}, optional={name: st.integers(1, 300) for name in PRIMES})


@given(small=widths, factor=st.integers(1, 400), blocks=st.integers(1, 50), data=st.data())
def test_a_size_that_is_a_product_is_resolved_exactly(
    small: dict[str, int], factor: int, blocks: int, data: st.DataObject
) -> None:
    pairs = {name: (blocks * size + 1, size) for name, size in small.items()}
    chosen = data.draw(st.lists(st.sampled_from(sorted(small)), max_size=3, unique=True)) if small else []
    rehearsed = factor * math.prod(small[name] for name in chosen)
    wide = rehearsed * math.prod(PRIMES[name] for name in chosen)
    sizes = Sizes(pairs)
    assert sizes.real(rehearsed, wide) == factor * math.prod(pairs[name][0] for name in chosen)
    assert sizes.exact


def test_a_size_that_is_a_sum_is_not_called_exact() -> None:
    sizes = Sizes({"hidden_size": (4096, 128), "ffn_hidden_size": (14336, 128)})
    sizes.real(128 + 128, 3 * 128 + 7 * 128)
    assert not sizes.exact


def step(microbatches: int, layers: int, width: int) -> list[dict[str, Any]]:
    """A product for each layer and micro batch, a message for each micro batch, a reduction of all weights."""
    product = {"what": "gemm", "pass": "forward", "dtype": "fp8", "groups": 1, "shapes": [[64, width, width]]}
    message = {
        "what": "send",
        "group": "pp",
        "ranks": 2,
        "nodes": 1,
        "item": 2,
        "shapes": [[64, width]],
        "bucket": None,
    }
    weights = {"what": "reduce_scatter", "group": "dp", "ranks": 4, "nodes": 1, "item": 4, "shapes": [[0]], "bucket": 0}
    return [*[product] * (microbatches * layers), *[message] * microbatches, weights]


def recorded(layers: int, width: int) -> dict[str, Any]:
    steps = [step(microbatches, layers, width) for microbatches in (4, 2)]
    return {"steps": steps, "buckets": [[[width, width]] * layers]}


def plan(microbatches: int, layers: int) -> CountingPlan:
    return CountingPlan((), {"hidden_size": (4096, 128)}, Fraction(layers - 2), (4, 2), microbatches)


@given(microbatches=st.integers(1, 500), layers=st.integers(1, 200))
def test_counts_are_linear_in_layers_and_micro_batches(microbatches: int, layers: int) -> None:
    four = [recorded(number, width) for number in (2, 3) for width in (128, 384)]
    found = counts(plan(microbatches, layers), four)
    [product] = found.gemms
    assert (product["count"], product["shape"]) == (microbatches * layers, [64, 4096, 4096])
    amounts = {entry["collective"]: (entry["calls"], entry["bytes"]) for entry in found.traffic}
    assert amounts == {
        "send": (microbatches, microbatches * 64 * 4096 * 2),
        "reduce_scatter": (1, layers * 4096 * 4096 * 4),
    }
    assert found.exact


def test_a_message_whose_size_is_not_resolved_has_none() -> None:
    def sums(width: int) -> dict[str, Any]:
        found = recorded(2, width)
        gather = {"what": "all_gather", "group": "dp", "ranks": 4, "nodes": 1, "item": 2, "shapes": [[width + 64]]}
        return {**found, "steps": [[*events, {**gather, "bucket": None}] for events in found["steps"]]}

    found = counts(plan(4, 2), [sums(128), sums(384)])
    volumes = {entry["collective"]: entry["bytes"] for entry in found.traffic}
    assert volumes["all_gather"] is None
    assert volumes["send"] == 4 * 64 * 4096 * 2
    assert not found.exact


def test_rehearsals_that_do_not_correspond_are_not_counted() -> None:
    with pytest.raises(NotCountable, match="have 2 and 3 parameters"):
        counts(plan(8, 2), [recorded(2, 128), recorded(3, 384)])


def test_counting_belongs_to_a_rehearsal_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["check", "tiny_cpu", "--count"]) == 2
    assert "--count belongs to --rehearse --json" in capsys.readouterr().err

"""What differs, whatever logs and manifests hold: symmetric, quiet about equals, never a crash."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_runs import Made, of, write_run

from fp8launch.report.comparison import Comparison
from fp8launch.report.differences import (
    PARITY,
    UNLIKE,
    FactDifference,
    differing,
    facts_of_axis,
    kind_of,
    parity_differences,
    speed_comparability,
)
from fp8launch.report.export import differences_table

value = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=60),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=5,
)
names = st.sampled_from(sorted(UNLIKE)[:5] + sorted(PARITY)[:5] + ["seq_length", "tensor_model_parallel_size", "image"])
facts = st.dictionaries(names | st.text(max_size=8), value, max_size=8)


@given(facts, facts)
def test_both_sides_see_the_same(a: dict[str, object], b: dict[str, object]) -> None:
    assert differing([a, b]) == differing([b, a])
    one, other = speed_comparability(a, b), speed_comparability(b, a)
    assert one.comparable == other.comparable
    assert len(one.noted) == len(other.noted)
    assert len(parity_differences(a, b)) == len(parity_differences(b, a))


@given(facts)
def test_a_run_does_not_differ_from_itself(a: dict[str, object]) -> None:
    assert differing([a, a]) == []
    assert speed_comparability(a, a).comparable


@given(facts, facts)
def test_an_axis_of_the_study_never_makes_runs_unlike(a: dict[str, object], b: dict[str, object]) -> None:
    assert speed_comparability(a, b, axes=set(UNLIKE)).comparable


@given(st.lists(value, min_size=1, max_size=4))
def test_any_value_can_be_shown(values: list[object]) -> None:
    found = FactDifference("x", "noted", False, {str(i): v for i, v in enumerate(values)})
    table = differences_table(Comparison((), (found,), (), None, ()))
    assert table.rows[0][:2] == ("x", "may change the speed")
    assert found.as_json()["name"] == "x"


@pytest.mark.parametrize(("a", "b"), [(1e-5, 1.0e-05), (8, 8.0), (None, False), (True, 1), ("None", None)])
def test_the_same_in_other_words(a: object, b: object) -> None:
    assert differing([{"x": a}, {"x": b}]) == []


def test_a_zero_is_a_number_and_not_off() -> None:
    assert "seed 0 against 1" in parity_differences({"seed": 0}, {"seed": 1})
    assert "clip_grad off against 1.0" in parity_differences({"clip_grad": False}, {"clip_grad": 1.0})


@pytest.mark.parametrize(
    ("key", "fact"),
    [
        ("parallel.tp", "tensor_model_parallel_size"),
        ("batch.sequence", "seq_length"),
        ("precision.recipe", "precision"),
        ("precision.amax_history", "precision"),
        ("env.NCCL_ALGO", "env NCCL_ALGO"),
        ("model.num_layers", "num_layers"),
        ("megatron.overlap_grad_reduce", "overlap_grad_reduce"),
        ("container.image", "image"),
    ],
)
def test_what_an_axis_varies(key: str, fact: str) -> None:
    assert facts_of_axis(key) == {fact}


def test_a_gpu_as_an_axis_has_the_drivers_name_for_it_too() -> None:
    assert facts_of_axis("resources.gpu") == {"gpu", "GPU"}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("num_layers", "unlike"), ("seq_length", "unlike"), ("gpu", "unlike"), ("world_size", "unlike"),
        ("tensor_model_parallel_size", "noted"), ("image", "noted"), ("env NCCL_ALGO", "noted"), ("optimizer", "noted"),
        ("seed", "neutral"), ("lr", "neutral"), ("save", "neutral"), ("data_parallel_size", "neutral"),
        ("inprocess_active_world_size", "neutral"),
    ],
)  # fmt: skip
def test_kinds(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_a_field_is_compared_in_effect_however_it_was_set(tmp_path: Path) -> None:
    """Two facts of one field contradicted each other, and experts' settings of a dense model were said to differ."""
    arguments = {
        "num_experts": None,
        "cross_entropy_fusion_impl": "native",
        "moe_token_dispatcher_type": "allgather",
        "expert_tensor_parallel_size": 1,
    }
    ours = write_run(
        tmp_path / "ours",
        Made(arguments=arguments),
        environment={
            "FP8LAUNCH_CONFIG": json.dumps({"cross_entropy_fusion_impl": "te", "fused_single_qkv_rope": True})
        },
    )
    other = {**arguments, "cross_entropy_fusion_impl": "te", "moe_token_dispatcher_type": "alltoall"}
    other["expert_tensor_parallel_size"] = 2
    theirs = write_run(tmp_path / "theirs", Made(arguments=other))
    found = {one.name: one.values for one in of(ours, theirs).differences}
    assert "cross_entropy_fusion_impl" not in found
    assert "config cross_entropy_fusion_impl" not in found
    assert not {"moe_token_dispatcher_type", "expert_tensor_parallel_size"} & {*found}
    assert set(found["config fused_single_qkv_rope"].values()) == {True, "unset"}

"""Grids: their points, keys and ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import only, refused

from fp8launch.job.prepared import prepare
from fp8launch.recipe.load import load_recipe
from fp8launch.rundir.registry import find_study
from fp8launch.rundir.study import add_points, create_study
from fp8launch.submit.grid import Point, expand, parse_axis, parse_nodes, point_key, run_name, study_id


def test_the_grid_is_the_product_with_repeats_outermost() -> None:
    points = expand(["a", "b"], [1, 2], {"train.lr": [0.1, 0.2]}, 2)
    assert len(points) == 16
    assert [p.repeat for p in points] == [1] * 8 + [2] * 8
    assert points[0] == Point("a", 1, {"train.lr": 0.1}, 1)


def test_without_axes_there_is_one_point_that_leaves_the_recipe_alone() -> None:
    assert expand(["a"], [], {}, 1) == [Point("a", None, {}, 1)]
    assert Point("a", None).overrides == []


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("precision.recipe=bf16,tensorwise", ["bf16", "tensorwise"]),
        ("batch.sequence=2048,4096", [2048, 4096]),
        ("train.lr=3e-4,1.0e-3", [3e-4, 1e-3]),
        ("precision.param_gather=true,false", [True, False]),
        ("env.NCCL_ALGO='Ring,Tree',Ring", ["Ring,Tree", "Ring"]),
        ("container.image=null,a", [None, "a"]),
    ],
)
def test_axis_values_are_yaml(text: str, values: list[Any]) -> None:
    assert parse_axis(text) == (text.partition("=")[0], values)


@pytest.mark.parametrize(
    "text", ["", "lr", "train.lr", "train.lr=", "=1", "lr=1", "train.lr=1,1", "a b.c=1", "train.lr=[1", "x.y=a: b: c"]
)
def test_a_bad_axis_is_refused(text: str) -> None:
    refused(parse_axis, text)


@pytest.mark.parametrize("text", ["0", "1,1", "a", "-1", "1.5", "1,,2", ",", "1e3", "999999", "9" * 5000])
def test_bad_node_counts_are_refused(text: str) -> None:
    assert only(refused(parse_nodes, text)).code == "bad-nodes"


def test_node_counts() -> None:
    assert parse_nodes("1, 2,16") == [1, 2, 16]


def test_a_grid_that_explodes_is_refused() -> None:
    axes = {f"model.f{i}": list(range(10)) for i in range(5)}
    assert only(refused(expand, ["a"], [], axes, 1)).code == "too-many-points"


TEXT = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs", "Zl", "Zp"]))
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT


@given(SCALARS | st.lists(SCALARS, max_size=3))
def test_any_value_of_an_axis_reaches_the_recipe_as_it_is(value: Any) -> None:
    from fp8launch.recipe.load import _apply
    from fp8launch.recipe.yaml_source import Node

    (override,) = Point("r", None, {"a.b": value}).overrides
    assert _apply(Node({}, ""), override).plain() == {"a": {"b": value}}


def test_a_key_is_what_would_run() -> None:
    one, two = Point("tiny_cpu", None), Point("tiny_cpu", None, repeat=2)
    prepared, other = prepare("tiny_cpu"), prepare("tiny_cpu", ["train.lr=0.5"])
    assert point_key(one, prepared) == point_key(one, prepare("tiny_cpu"))
    assert len({point_key(one, prepared), point_key(two, prepared), point_key(one, other)}) == 3
    # How a value is written down does not matter, only what it means.
    assert point_key(one, prepare("tiny_cpu", ["train.lr=1.0e-2"])) == point_key(one, prepared)


def test_the_same_points_in_another_order_are_the_same_study() -> None:
    assert study_id("a", ["1", "2"]) == study_id("a", ["2", "1"]) != study_id("a", ["1", "3"])


@given(st.text(max_size=200))
def test_a_run_name_is_a_safe_folder(value: str) -> None:
    name = run_name(Point("r", 2, {"a.b": value}, 1), "tiny", "0123456789ab")
    assert name.endswith("-012345")
    assert set(name) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_.-")
    assert len(name) < 110


def test_weak_scaling_grows_the_batch_and_strong_does_not() -> None:
    assert prepare("llama8b_fp8", nodes=4).layout.global_batch == 4 * load_recipe("llama8b_fp8").recipe.batch.global_
    assert prepare("llama8b_fp8", ["batch.scaling=strong"], 4).layout.global_batch == 128


def test_the_start_of_two_studies_is_reported(home: Path) -> None:
    root = home / "fp8launch-runs"
    for name in ("tiny-study-aaa111", "tiny-study-bbb222"):
        create_study(root, name, {"points": []})
    assert only(refused(find_study, "tiny-study")).code == "ambiguous-study"
    found = find_study("tiny-study-a")
    assert found is not None
    assert found.study_id == "tiny-study-aaa111"
    assert find_study("other") is None


def test_points_that_the_check_left_out_are_remembered_until_they_pass(tmp_path: Path) -> None:
    good = {"run": "a", "recipe": "tiny", "nodes": 1, "values": {"batch.micro": 2}, "repeat": 1}
    bad = {"run": "micro=3", "recipe": "tiny", "nodes": 1, "values": {"batch.micro": 3}, "repeat": 1, "why": "first"}
    study = create_study(tmp_path, "grid", {"points": [good]})
    add_points(study, [good], [bad])
    add_points(study, [good], [{**bad, "why": "second"}])
    assert [point["why"] for point in study.record()["left_out"]] == ["second"]
    assert study.missing() == ["a"]
    add_points(study, [{**bad, "run": "b"}], [])
    assert study.record()["left_out"] == []
    assert [point["run"] for point in study.record()["points"]] == ["a", "b"]

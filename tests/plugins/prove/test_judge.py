"""What counts as rounding and what as an error, from numbers alone."""

from __future__ import annotations

from typing import Any

import pytest

from fp8launch.plugins.prove.judge import (
    Difference,
    check_gradients,
    check_loss,
    check_norm,
    different_copies,
    different_tensors,
)

ROUNDED = 4e-7


def row(first: float | None = 1.0, difference: float | None = 2e-7, scale: float | None = 1.0, **other: Any) -> Any:
    return {"first": first, "second": first, "difference": difference, "scale": scale, **other}


PERTURBED = {"a": row(difference=ROUNDED), "b": row(difference=ROUNDED), "noise": row(difference=0.5)}


@pytest.mark.parametrize(
    ("name", "candidate", "text"),
    [
        ("a", row(second=2.0, difference=1.0, scale=2.0), "a: 2 times"),
        ("a", row(second=0.5, difference=0.5, scale=0.5), "a: 0.5 times"),
        ("a", row(second=0.0, difference=1.0, scale=0.0), "a: missing"),
        ("a", row(second=None, difference=None, scale=None), "a: missing"),
        ("a", row(second=1.0, difference=0.2, scale=0.98), "a: off by 20 %"),
        ("a", row(second=1.0, difference=None, scale=None), "a: another shape"),
    ],
)
def test_a_difference_is_named_by_its_factor(name: str, candidate: Any, text: str) -> None:
    assert [one.text for one in different_tensors(PERTURBED, {name: candidate})] == [text]


def test_rounding_is_no_difference() -> None:
    """Also of a tensor that is nothing but rounding, such as the bias of keys, and of one that does not move."""
    assert not different_tensors(PERTURBED, {"a": row(difference=5 * ROUNDED), "noise": row(difference=0.9)})
    assert not different_tensors({**PERTURBED, "still": row(difference=0.0)}, {"still": row(difference=ROUNDED)})
    assert not different_tensors({"unused": row(0.0, 0.0, None)}, {"unused": row(0.0, 0.0, None)})


def test_a_gradient_where_there_was_none_differs() -> None:
    (found,) = different_tensors({"unused": row(0.0, 0.0, None)}, {"unused": row(0.0, 1.0, None, second=1.0)})
    assert found.tensor == "unused"


def test_updated_weights_are_compared_where_gradients_agree() -> None:
    perturbed = {"gradients": {"a": row(difference=ROUNDED)}, "weights": {"a": row(difference=ROUNDED)}}
    candidate = {"gradients": {"a": row()}, "weights": {"a": row(difference=0.01)}}
    check = check_gradients(perturbed, candidate)
    assert not check.ok
    assert "updated weights differ" in check.detail


def test_losses_are_compared_by_name() -> None:
    assert check_loss({"lm loss": 5.0}, {"lm loss": 5.0}, {"lm loss": 5.000001}).ok
    assert not check_loss({"lm loss": 5.0}, {"lm loss": 5.0}, {"lm loss": 5.01}).ok
    assert "mtp_1 loss is None" in check_loss({"mtp_1 loss": 5.0}, {"mtp_1 loss": 5.0}, {}).detail
    assert not check_loss({"lm loss": 5.0}, {"lm loss": 5.0}, {"lm loss": float("nan")}).ok


def test_each_tensor_counts_once_in_the_norm() -> None:
    gradients = {"a": row(3.0), "b": row(4.0)}
    assert check_norm(5.0, {"a": 3.0, "b": 4.0}, gradients).ok
    half = check_norm(4.5, {"a": 3.0, "b": 2.0}, gradients)
    assert half.differences == (Difference("b", 0.5, 0.5),)
    assert "(4.5, not 5)" in half.detail
    assert check_norm(3.0, {"a": 3.0}, gradients).differences == (Difference("b", 0.0, 1.0),)
    assert not check_norm(5.1, {"a": 3.0, "b": 4.0}, gradients).ok


def test_parts_of_a_tensor_count_as_one() -> None:
    parts = {"in_proj.weight.query": row(3.0), "in_proj.weight.key": row(4.0)}
    assert check_norm(5.0, {"in_proj.weight": 5.0}, parts).ok
    (half,) = check_norm(2.5, {"in_proj.weight": 2.5}, parts).differences
    assert (half.tensor, half.factor) == ("in_proj.weight", 0.5)


# On an H100: a layout with TP 2 against one rank in tensorwise FP8, and one rank against itself with other roundings.
LOW = {"a": row(difference=0.086, scale=1.002), "b": row(difference=0.009, scale=0.996)}


def test_rounding_of_low_precision_is_no_difference() -> None:
    layout = {"a": row(difference=0.083, scale=1.012), "b": row(difference=0.009, scale=0.996)}
    assert not different_tensors(LOW, layout, low_precision=True)
    assert check_loss({"lm loss": 4.9733}, {"lm loss": 4.9757}, {"lm loss": 4.9752}, low_precision=True).ok


@pytest.mark.parametrize("factor", [0.5, 0.93, 1.06, 2.0])
def test_a_factor_is_found_in_low_precision(factor: float) -> None:
    layout = {"a": row(second=factor, difference=abs(factor - 1), scale=factor)}
    (found,) = different_tensors(LOW, layout, low_precision=True)
    assert found.factor == factor
    assert not check_loss({"lm loss": 4.9733}, {"lm loss": 4.9757}, {"lm loss": 4.99}, low_precision=True).ok


def test_copies_of_a_part_must_be_the_same_on_all_ranks() -> None:
    first = {"embedding.weight (0, 0)": [2.0, 1.0], "mlp.weight (0, 0)": [1.0, 0.5]}
    second = {"embedding.weight (0, 0)": [2.0, 1.5], "mlp.weight (1, 0)": [3.0, 0.7]}
    assert different_copies([first, first]) == []
    assert different_copies([first, second]) == [Difference("embedding.weight", None, 0.25)]
    check = check_gradients(
        {"gradients": {}, "weights": {}}, {"gradients": {}, "weights": {}}, [Difference("a", None, 1)]
    )
    assert not check.ok
    assert "different copies of 1 tensor" in check.detail


def test_what_is_not_a_number_agrees_with_nothing() -> None:
    nan = float("nan")
    broken = row(second=nan, difference=nan, scale=nan)
    for low_precision in (False, True):
        found = different_tensors(PERTURBED, {"a": broken, "b": row()}, low_precision)
        assert [one.text for one in found] == ["a: not a number"]
        assert found[0].as_json() == {"tensor": "a", "factor": None, "relative": None}
    assert not check_norm(nan, {"a": nan}, {"a": broken}).ok
    assert not check_norm(nan, {"a": 1.0}, {"a": row()}).ok
    assert not check_loss({"lm loss": 5.0}, {"lm loss": 5.0}, {"lm loss": nan}).ok
    assert different_copies([{"a (0,)": [1.0, 2.0]}, {"a (0,)": [nan, nan]}])

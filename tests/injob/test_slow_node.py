"""Which node slows a run: the decision, from how long the forward pass takes on each node."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8launch.injob.supervisor.health_rules import change_point
from fp8launch.injob.supervisor.slow_node import (
    NodeTimes,
    SlowNode,
    find_slow_node,
    lasts,
    node_times_in,
    record_of,
    recorded_in,
)

BEGIN = 1000


def measured(
    slow: dict[str, float],
    nodes: int = 4,
    count: int = 20,
    noise: float = 0.05,
    stages: float = 0.0,
    seed: int = 1,
    everybody: float = 1.0,
) -> list[NodeTimes]:
    """`count` measurements before and after iteration BEGIN, from which on nodes are slower by the factors in `slow`.

    `stages` is the difference between two neighbours; `noise` the relative standard deviation.
    """
    chance = random.Random(seed)
    found = []
    for number in range(-count, count):
        first = BEGIN + 10 * number
        times = {}
        for i in range(1, nodes + 1):
            ms = 20 * (1 + stages * i) * max(0.2, chance.gauss(1, noise))
            if number >= 0:
                ms *= slow.get(f"node{i}", 1.0) * everybody
            times[f"node{i}"] = ms
        found.append(NodeTimes(first, first + 9, times))
    return found


def named(times: list[NodeTimes], step_factor: float) -> str | None:
    slow = find_slow_node(times, BEGIN, 100.0, 100 * step_factor, 0.25)
    return None if slow is None else slow.node


@pytest.mark.parametrize("nodes", [2, 3, 4, 100])
@pytest.mark.parametrize("noise", [0.0, 0.05, 0.15])
def test_the_slow_node_is_named(nodes: int, noise: float) -> None:
    assert named(measured({"node2": 2.0}, nodes, noise=noise), 1.9) == "node2"


def test_nodes_with_other_stages_are_compared_with_themselves() -> None:
    """The last stage takes longer than all others, always."""
    assert named(measured({"node1": 1.6}, stages=0.4), 1.4) == "node1"
    assert named(measured({}, stages=0.4), 1.4) is None


def test_the_record_says_by_how_much() -> None:
    slow = find_slow_node(measured({"node2": 2.0}, noise=0.0), BEGIN, 100.0, 190.0, 0.25)
    assert slow == SlowNode("node2", 190.0, 1.9, 2.0, 3, 1.0, BEGIN, BEGIN + 199, (20, 20))
    assert slow.sentence == (
        "node2 slows the run from iteration 1000 on: steps take 1.90 times as long as before, and the forward pass "
        "2.00 times on node2, 1.00 times on the 3 other nodes"
    )
    assert recorded_in(f"words\n{record_of(slow)}\nmore") == slow
    assert recorded_in(f"0: {record_of(slow)}") is None, "a rank cannot speak for the supervisor"


@pytest.mark.parametrize("noise", [0.05, 0.2])
def test_nobody_is_named_when_all_became_slower(noise: float) -> None:
    assert named(measured({}, everybody=2.0, noise=noise), 2.0) is None


def test_nobody_is_named_when_the_time_is_spent_elsewhere() -> None:
    """Data, checkpoints and the network do not touch the forward pass."""
    assert named(measured({}), 2.0) is None
    # Within the usual, and far from the whole increase.
    assert named(measured({"node2": 1.2}), 1.3) is None
    assert named(measured({"node2": 1.4}), 3.0) is None


def test_a_node_is_not_named_because_another_became_faster() -> None:
    """As on a GPU that another program shares: kernels wait, and then run without gaps."""
    assert named(measured({"node1": 0.6}, nodes=2), 1.4) is None


def test_nobody_is_named_when_several_nodes_became_slower() -> None:
    assert named(measured({"node2": 2.0, "node3": 1.9}), 2.0) is None


def test_nobody_is_named_after_too_few_measurements_or_without_others() -> None:
    times = measured({"node2": 2.0})
    assert named(times[:24], 1.9) is None
    assert named(times[16:], 1.9) is None
    assert named([NodeTimes(one.first, one.last, {"node2": one.forward_ms["node2"]}) for one in times], 1.9) is None


def test_a_hiccup_is_not_a_slow_node() -> None:
    """A few long passes, as of a busy machine, move no median."""
    times = measured({})
    for one in times[20:29]:
        one.forward_ms["node2"] *= 5  # type: ignore[index]
    assert named(times, 1.5) is None


@given(seed=st.integers(0, 10**6), nodes=st.integers(2, 8), noise=st.floats(0, 0.5), everybody=st.floats(0.5, 4))
def test_noise_names_nobody(seed: int, nodes: int, noise: float, everybody: float) -> None:
    assert named(measured({}, nodes, noise=noise, seed=seed, everybody=everybody), 1.5) is None


@given(seed=st.integers(0, 10**6), nodes=st.integers(2, 8), noise=st.floats(0, 0.2), factor=st.floats(1.8, 10))
def test_never_another_node_is_named(seed: int, nodes: int, noise: float, factor: float) -> None:
    times = measured({"node1": factor}, nodes, noise=noise, seed=seed)
    assert named(times, 1.5) in ("node1", None)


@given(
    st.text() | st.sampled_from(['{"first":1,"last":2,"forward_ms":{"a b":1}}', "[1]", '{"first":true}', "9" * 9999])
)
def test_any_text_is_read(text: str) -> None:
    node_times_in("fp8launch-nodes: " + text)
    assert recorded_in("fp8launch: slow-node: " + text) is None


def test_a_record_nested_too_deeply_is_none() -> None:
    assert recorded_in("fp8launch: slow-node: " + "[" * 100_000) is None


def test_numbers_that_no_iteration_has_are_left_out() -> None:
    line = 'fp8launch-nodes: {"v":1,"first":1,"last":%s,"forward_ms":{"node1":1.5}}'
    assert node_times_in(line % "2") == NodeTimes(1, 2, {"node1": 1.5})
    assert node_times_in(line % ("9" * 400)) is None


def test_names_that_are_no_nodes_are_left_out() -> None:
    line = '0: fp8launch-nodes: {"v":1,"first":1,"last":2,"forward_ms":{"node1":1.5,"--help":2,"a,b":3,"n2":"x"}}'
    assert node_times_in(line) == NodeTimes(1, 2, {"node1": 1.5})


@pytest.mark.parametrize(("step_ms", "measurements", "given_up"), [(2000, 10, False), (3000, 10, True), (10, 30, True)])
def test_a_node_is_given_up_only_after_minutes(step_ms: float, measurements: int, given_up: bool) -> None:
    slow = SlowNode("node2", step_ms, 2.0, 2.0, 3, 1.0, 101, 200, (20, measurements))
    assert lasts(slow) == given_up


@given(st.integers(10, 100), st.integers(10, 100), st.integers(0, 10**6))
def test_the_change_is_found_where_it_is(before: int, after: int, seed: int) -> None:
    chance = random.Random(seed)
    values = [chance.uniform(90, 110) for _ in range(before)] + [chance.uniform(150, 900) for _ in range(after)]
    # The first slow lines may be among the fastest of them, and a few lines before the change may be slow by chance:
    # 3 in 1,000 such series are off by more than 5 lines, and none of 6,000 by more than 11.
    assert abs(change_point(values, 10) - before) <= 15


@given(st.lists(st.floats(0, 1e9), min_size=6), st.integers(1, 3))
def test_a_change_leaves_lines_on_both_sides(values: list[float], margin: int) -> None:
    assert margin <= change_point(values, margin) <= len(values) - margin


def test_equal_values_have_equal_ranks() -> None:
    assert change_point([100.0] * 50 + [250.0] * 40, 10) == 50

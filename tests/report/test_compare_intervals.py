"""Intervals: known quantiles, coverage of what they claim to cover, and what holds for any numbers."""

from __future__ import annotations

import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8launch.report.intervals import mean_interval, ratio_interval, t_quantile

times = st.lists(st.floats(1, 1e6), min_size=4, max_size=40)
runs = st.lists(times, min_size=2, max_size=4)


@pytest.mark.parametrize(
    ("freedom", "value"),
    [
        (1, 12.7062),
        (2, 4.30265),
        (3, 3.18245),
        (4, 2.77645),
        (10, 2.22814),
        (30, 2.04227),
        (200, 1.97190),
        (1e6, 1.95997),
    ],
)
def test_t_quantiles_of_the_tables(freedom: float, value: float) -> None:
    assert t_quantile(freedom) == pytest.approx(value, rel=2e-5)


@given(st.floats(1, 1e4), st.floats(1, 1e4))
def test_more_freedom_never_widens(a: float, b: float) -> None:
    low, high = sorted((a, b))
    assert t_quantile(high) <= t_quantile(low) * (1 + 1e-6)


@settings(max_examples=30, deadline=None)
@given(runs, runs)
def test_the_other_way_round_is_the_reciprocal(a: list[list[float]], b: list[list[float]]) -> None:
    there, back = ratio_interval(a, b), ratio_interval(b, a)
    assert there is not None and back is not None
    assert there.low == pytest.approx(1 / back.high)
    assert there.low <= there.high


@settings(max_examples=30, deadline=None)
@given(times, times, st.floats(0.01, 100))
def test_a_change_of_units_changes_nothing(a: list[float], b: list[float], unit: float) -> None:
    one, other = ratio_interval([a], [b]), ratio_interval([[unit * x for x in a]], [[unit * x for x in b]])
    assert one is not None and other is not None
    assert (one.low, one.high) == pytest.approx((other.low, other.high))
    assert one.covers == "iterations"


@given(st.lists(st.floats(1, 1e6), max_size=3), times)
def test_too_few_iterations_give_no_interval(a: list[float], b: list[float]) -> None:
    assert ratio_interval([a], [b]) is None


def test_runs_that_agree_exactly() -> None:
    found = ratio_interval([[2.0] * 5] * 3, [[1.0] * 5] * 3)
    assert (found.low, found.high) == pytest.approx((2, 2))


def test_one_repeated_side_stands_for_both() -> None:
    found = ratio_interval([[1.0] * 5], [[1.0] * 5, [1.02] * 5, [0.98] * 5])
    assert found.covers == "runs"
    assert found.low < 1 < found.high


def test_repeats_cover_the_truth_as_often_as_they_say() -> None:
    """300 pairs of three runs whose medians differ by 1 % from run to run; the true ratio is 1.3."""
    dice = random.Random(3)

    def measured(centre: float) -> list[list[float]]:
        return [[centre * (1 + dice.gauss(0, 0.01))] * 5 for _ in range(3)]

    hits = sum(
        found.low <= 1.3 <= found.high for found in (ratio_interval(measured(1.3), measured(1)) for _ in range(300))
    )
    assert 0.90 <= hits / 300 <= 0.995


def test_iterations_cover_a_correlated_run_better_than_if_they_were_independent() -> None:
    """Neighbouring iterations share half of their noise, so an interval of single values would be too narrow."""
    dice = random.Random(4)

    def correlated(n: int = 120) -> list[float]:
        noise, out = 0.0, []
        for _ in range(n):
            noise = 0.5 * noise + dice.gauss(0, 0.01)
            out.append(1 + noise)
        return out

    found = [ratio_interval([correlated()], [correlated()]) for _ in range(40)]
    assert sum(one.low <= 1 <= one.high for one in found) >= 32


def test_mean_of_runs() -> None:
    found = mean_interval([10.0, 11.0, 12.0])
    half = 4.30265 * statistics.stdev([10, 11, 12]) / 3**0.5
    assert (found.low, found.high) == pytest.approx((11 - half, 11 + half), rel=1e-4)
    assert mean_interval([10.0]) is None

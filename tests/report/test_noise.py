"""A speed-up that may be noise is no headline: its interval includes 1."""

from __future__ import annotations

from pathlib import Path

import pytest
from made_runs import FP8, Made, of, write_study

from fp8launch.report.columns import main_table
from fp8launch.report.export import to_csv


def cells(tmp_path: Path, bf16: tuple[float, float], fp8: tuple[float, float]) -> str:
    """The speed-up of FP8 in the table, of two repeats each with these step times in ms."""
    points = []
    for precision, times in (("bf16", bf16), (FP8, fp8)):
        for repeat, ms in enumerate(times, 1):
            made = Made(ms=lambda i, ms=ms: ms, precision=precision)  # type: ignore[misc]
            points.append(({"precision.recipe": precision}, 1, repeat, made))
    found = of(write_study(tmp_path, points), gpu=None)
    table = main_table(found.rows)
    assert "speedup" in to_csv(found)
    assert found.rows[1].speedup is not None and found.rows[1].speedup.value is not None
    return table.rows[1][table.headers.index("speed-up [95 % interval]")]


def test_repeats_that_differ_more_than_the_variants(tmp_path: Path) -> None:
    assert cells(tmp_path, (1000.0, 2000.0), (900.0, 1800.0)).startswith("not distinguishable [0.")


def test_a_difference_beyond_the_repeats_is_a_ratio(tmp_path: Path) -> None:
    assert cells(tmp_path, (1000.0, 1001.0), (500.0, 501.0)).startswith("2.00× [1.9")


@pytest.mark.parametrize("same", [1000.0])
def test_the_baseline_is_one(tmp_path: Path, same: float) -> None:
    points = [({"precision.recipe": p}, 1, 1, Made(ms=lambda i: same, precision=p)) for p in ("bf16", FP8)]
    table = main_table(of(write_study(tmp_path, points), gpu=None).rows)
    assert table.rows[0][table.headers.index("speed-up [95 % interval]")] == "1.00×"

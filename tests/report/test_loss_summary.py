"""The loss in `compare`: always in JSON and CSV, in the table where the rows differ in how they learn."""

from __future__ import annotations

import csv
import io
import math
from pathlib import Path

import pytest
from made_runs import FP8, Made, of, write_study

from fp8launch.report.columns import main_table
from fp8launch.report.export import to_csv
from fp8launch.report.losses import loss_summary

HEADER = "loss at the end (perplexity)"


def made(lr: float, offset: float = 0.0, precision: str = "bf16", seed: int = 1234) -> Made:
    arguments = {"lr": lr, "seed": seed}
    return Made(loss=lambda i: 3.0 + offset - 0.01 * i, iterations=100, precision=precision, arguments=arguments)


def study(root: Path) -> Path:
    points = [
        ({"train.lr": lr, "megatron.seed": repeat}, 1, 1, made(lr, offset + 0.02 * repeat, seed=repeat))
        for lr, offset in ((1e-4, 0.0), (1e-3, 0.5))
        for repeat in (1, 2)
    ]
    return write_study(root, points)


def test_of_a_study_over_the_learning_rate_the_table_is_about_loss(tmp_path: Path) -> None:
    found = of(study(tmp_path), gpu=None)
    table = main_table(found.rows)
    assert table.headers.index(HEADER) == table.headers.index("runs") + 1
    best = found.rows[0].loss
    assert best is not None
    # By hand: the last ten iterations are 91 to 100, on the mean 3 - 0.955 and 0.02 or 0.04 more.
    assert best.smoothed == pytest.approx(3 - 0.955 + 0.03)
    assert best.last == pytest.approx(2.03)
    assert best.perplexity == pytest.approx(math.exp(best.smoothed))
    assert (best.spread, best.iterations, best.runs) == (pytest.approx(0.02), 10, 2)
    cells = {row[0]: row[table.headers.index(HEADER)] for row in table.rows}
    assert "2.0750 ± 0.0141 (7.96)" in cells.values()


def test_of_a_study_over_the_precision_it_is_about_speed(tmp_path: Path) -> None:
    points = [({"precision.recipe": p}, 1, 1, made(1e-4, precision=p)) for p in ("bf16", FP8)]
    found = of(write_study(tmp_path, points), gpu=None)
    assert HEADER not in main_table(found.rows).headers
    row = next(csv.DictReader(io.StringIO(to_csv(found))))
    assert float(row["loss_last"]) == pytest.approx(2.0)
    assert float(row["perplexity"]) == pytest.approx(math.exp(float(row["loss_smoothed"])))
    rows = found.as_json()["rows"]
    assert isinstance(rows, list) and rows[0]["loss"]["iterations"] == 10


def test_no_loss_is_none_and_a_huge_one_has_no_perplexity(tmp_path: Path) -> None:
    assert loss_summary([]) is None
    huge = Made(loss=lambda i: 1e4, arguments={"lr": 1e-4})
    found = of(write_study(tmp_path, [({"train.lr": 1e-4}, 1, 1, huge)]), gpu=None).rows[0].loss
    assert found is not None and found.perplexity is None
    missing = Made(loss=lambda i: None)
    assert of(write_study(tmp_path / "none", [({}, 1, 1, missing)]), gpu=None).rows[0].loss is None

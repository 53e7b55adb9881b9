"""The validation loss in `compare`, over seeds and relative to the baseline."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping
from pathlib import Path

import pytest
from made_runs import FP8, Made, of, write_log
from rich.console import Console

from fp8launch.plugins.validation_loss.columns import LOSS
from fp8launch.plugins.validation_loss.losses import ValidationLoss, validation_loss
from fp8launch.report.columns import main_table
from fp8launch.report.comparison import Comparison
from fp8launch.report.conclusion import conclusion
from fp8launch.report.export import doubts, remarks, to_csv, to_terminal
from fp8launch.report.rows import Row

BF16 = {1: 2.0, 2: 2.5, 3: 4.0}
# 1 %, 2 % and 6 % higher with the same seed.
HIGHER = {1: 2.02, 2: 2.55, 3: 4.24}
TIME_LIMIT = "slurmstepd: error: *** STEP 5.0 ON n1 CANCELLED AT 2026-11-20T10:00:00 DUE TO TIME LIMIT ***"


def logs(
    root: Path,
    precision: str,
    ends: Mapping[int, float],
    iterations: int = 20,
    arguments: Mapping[str, object] | None = None,
    validations: Mapping[int, float] | None = None,
) -> list[Path]:
    """Write one log for each seed. The loss at iteration 10 is 5, and at iteration 20 the one in `ends`."""
    paths = []
    for seed, end in ends.items():
        made = Made(
            iterations=iterations,
            precision=precision,
            arguments={"eval_iters": 4, "seed": seed, "split": "98,2,0", **(arguments or {})},
            validations=validations or {10: 5.0, 20: end},
        )
        paths.append(write_log(root / f"{precision}_{seed}.log", made))
    return paths


def row_of(comparison: Comparison, precision: str = FP8) -> Row:
    return next(row for row in comparison.rows if row.facts["precision"] == precision)


def loss_of(comparison: Comparison, precision: str = FP8) -> ValidationLoss | None:
    return validation_loss(row_of(comparison, precision))


def cells_of(comparison: Comparison, precision: str = FP8) -> dict[str, str]:
    table = main_table(comparison.rows)
    cells = table.rows[comparison.rows.index(row_of(comparison, precision))]
    return dict(zip(table.headers, cells, strict=True))


RELATIVE = "relative validation loss (%) [95 % interval]"


def test_differences_within_equal_seeds_have_a_t_interval(tmp_path: Path) -> None:
    found = of(*logs(tmp_path, "bf16", BF16), *logs(tmp_path, FP8, HIGHER))
    loss = loss_of(found)
    assert loss is not None and loss.interval is not None
    # By hand: the mean of 1, 2 and 6 is 3, their variance (4 + 1 + 9) / 2 = 7, and t(2) = 4.30265.
    assert loss.relative == pytest.approx(0.03)
    half = 0.01 * 4.30265 * math.sqrt(7 / 3)
    assert (loss.interval.low, loss.interval.high) == pytest.approx((0.03 - half, 0.03 + half), rel=1e-4)
    assert (loss.iteration, loss.tokens, loss.seeds, loss.against) == (20, 20 * 64 * 4096, 3, "bf16")
    assert loss.loss is not None and loss.loss.mean == pytest.approx((2.02 + 2.55 + 4.24) / 3)
    base = loss_of(found, "bf16")
    assert base is not None and (base.relative, base.against, base.reasons) == (None, None, ())
    # The sample's standard deviation of 2.0, 2.5 and 4.0 is sqrt(13 / 12).
    assert cells_of(found, "bf16")["validation loss"] == "2.8333 ± 1.0408"
    assert cells_of(found)[RELATIVE] == "+3.00 [-3.57, +9.57]"
    assert "Validation loss relative to bf16: tensorwise +3.00 % (95 % interval -3.57 to +9.57 %)." in conclusion(found)
    said = (
        "validation loss of tensorwise: at iteration 20 (5,242,880 tokens); relative to bf16: t over 3 pairs of equal "
    )
    assert f"{said}seeds" in remarks(found)


def test_json_and_csv_have_it_unrounded(tmp_path: Path) -> None:
    found = of(*logs(tmp_path, "bf16", BF16), *logs(tmp_path, FP8, HIGHER))
    rows = found.as_json()["rows"]
    assert isinstance(rows, list)
    [loss] = [row["validation"] for row in rows if row["validation"]["against"]]
    assert loss["relative"] == pytest.approx(0.03)
    assert loss["interval"]["method"] == "t over 3 pairs of equal seeds"
    assert loss["loss"]["seed_values"] == [2.02, 2.55, 4.24]
    assert (loss["iteration"], loss["tokens"], loss["seeds"], loss["reasons"]) == (20, 5242880, 3, [])
    cells = list(csv.DictReader(io.StringIO(to_csv(found))))[-1]
    assert float(cells["validation_relative"]) == loss["relative"]
    assert float(cells["validation_relative_low"]) == loss["interval"]["low"]
    assert (cells["validation_iteration"], cells["validation_against"]) == ("20", "bf16")


def test_it_is_computed_once_for_all_columns(tmp_path: Path) -> None:
    """Every column and cell computed it again."""
    found = of(*logs(tmp_path, "bf16", BF16), *logs(tmp_path, FP8, HIGHER))
    [row] = [row for row in found.rows if row.base]
    assert LOSS.value(row) is LOSS.value(row) is validation_loss(row) is not None


def test_eighty_columns_show_it(tmp_path: Path) -> None:
    found = of(*logs(tmp_path, "bf16", BF16), *logs(tmp_path, FP8, HIGHER))
    out = io.StringIO()
    Console(file=out, width=80).print(to_terminal(found, 80, details=False))
    lines = out.getvalue().splitlines()
    assert max(len(line.rstrip()) for line in lines) <= 80
    assert any("+3.00" in line for line in lines)
    assert "[-3.57, +9.57]" in out.getvalue() and "2.9367 ± 1.1594" in out.getvalue()


def test_the_last_iteration_that_all_runs_evaluated_counts(tmp_path: Path) -> None:
    """Runs that a time limit ended have no last evaluation, nor a speed that counts."""
    shorter = logs(tmp_path, FP8, dict.fromkeys((1, 2, 3), 9.0), validations={5: 6.0, 10: 5.5})
    for path in shorter:
        path.write_text(path.read_text().replace("[after training is done]", "[killed]"))
    found = of(*logs(tmp_path, "bf16", BF16), *shorter)
    loss = loss_of(found)
    assert loss is not None and (loss.iteration, loss.relative) == (10, pytest.approx(0.1))
    assert cells_of(found)[RELATIVE] == "+10.00 [+10.00, +10.00]"
    assert "validation loss of bf16: at iteration 20 (5,242,880 tokens)" in remarks(found)


def test_runs_that_a_time_limit_ended_have_no_speed_but_a_validation_loss(tmp_path: Path) -> None:
    """The report compared their validation losses, next to "No run has a number to compare"."""
    paths = [*logs(tmp_path, "bf16", BF16), *logs(tmp_path, FP8, HIGHER)]
    for path in paths:
        path.write_text(path.read_text().replace("[after training is done]", TIME_LIMIT))
    found = of(*paths)
    assert conclusion(found) == (
        "No run has a speed or a final loss (failed: time-limit). Validation loss relative to bf16: tensorwise +3.00 % "
        "(95 % interval -3.57 to +9.57 %)."
    )
    assert found.problems == ("no run has a speed or a final loss",)
    assert cells_of(found)[RELATIVE] == "+3.00 [-3.57, +9.57]"


def test_only_common_seeds_are_paired(tmp_path: Path) -> None:
    found = of(*logs(tmp_path, "bf16", BF16), *logs(tmp_path, FP8, {2: 2.55, 3: 4.24, 4: 9.0}))
    loss = loss_of(found)
    assert loss is not None and loss.loss is not None
    assert (loss.relative, loss.seeds, loss.loss.seeds) == (pytest.approx(0.04), 2, 3)


def test_no_loss_is_lower_by_more_than_itself(tmp_path: Path) -> None:
    loss = loss_of(of(*logs(tmp_path, "bf16", BF16), *logs(tmp_path, FP8, {1: 0.1, 2: 2.5})))
    assert loss is not None and loss.interval is not None
    assert (loss.relative, loss.interval.low) == (pytest.approx(-0.475), -1.0)


def test_a_single_seed_has_no_interval(tmp_path: Path) -> None:
    found = of(*logs(tmp_path, "bf16", {1: 2.0}), *logs(tmp_path, FP8, {1: 2.02}))
    loss = loss_of(found)
    assert loss is not None and (loss.relative, loss.interval) == (pytest.approx(0.01), None)
    assert RELATIVE not in main_table(found.rows).headers
    assert "alidation loss" not in " ".join([conclusion(found), *remarks(found), *doubts(found)])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"split": "90,10,0"}, "split (90, 10, 0) against (98, 2, 0)"),
        ({"eval_iters": 8}, "eval_iters 8 against 4"),
    ],
)
def test_different_validation_sets_are_not_compared(tmp_path: Path, change: dict[str, object], reason: str) -> None:
    found = of(*logs(tmp_path, "bf16", BF16), *logs(tmp_path, FP8, HIGHER, arguments=change))
    loss = loss_of(found)
    assert loss is not None and (loss.relative, loss.reasons) == (None, (reason,))
    line = f"validation loss of {row_of(found).name} not compared with {loss.against}: {reason}"
    assert line in doubts(found) and line in remarks(found)
    assert "relative to" not in conclusion(found).split("Validation loss")[-1]


def test_other_seeds_iterations_and_infinite_losses_are_not_compared(tmp_path: Path) -> None:
    base = logs(tmp_path, "bf16", BF16)
    cases = {
        "no seed in common": logs(tmp_path / "seeds", FP8, {7: 2.0, 8: 2.0}),
        "its runs and the baseline's evaluated no validation set at a common iteration": logs(
            tmp_path / "iterations", FP8, HIGHER, validations={7: 4.0, 14: 3.0}
        ),
        "a loss is NaN or infinite at iteration 20": logs(tmp_path / "nan", FP8, {**HIGHER, 2: math.nan}),
    }
    for reason, others in cases.items():
        found = of(*base, *others)
        loss = loss_of(found)
        assert loss is not None and (loss.relative, loss.reasons) == (None, (reason,))
        assert f"validation loss of tensorwise not compared with bf16: {reason}" in doubts(found)


def test_a_baseline_without_evaluations_is_named(tmp_path: Path) -> None:
    base = logs(tmp_path, "bf16", BF16)
    for path in base:
        path.write_text("".join(line for line in path.read_text().splitlines(True) if "validation loss" not in line))
    loss = loss_of(of(*base, *logs(tmp_path, FP8, HIGHER)))
    assert loss is not None and loss.reasons == ("the baseline logged no validation loss",)


def test_the_test_set_and_the_last_evaluation_are_told_apart(tmp_path: Path) -> None:
    """After the last iteration, Megatron evaluates both sets and names them."""
    both = [*logs(tmp_path, "bf16", BF16), *logs(tmp_path, FP8, HIGHER)]
    for path in both:
        text = path.read_text().replace("loss at iteration 20 |", "loss at iteration 20 on validation set |")
        path.write_text(f"{text} validation loss at iteration 20 on test set | lm loss value: 1.0E+00 | \n")
    loss = loss_of(of(*both))
    assert loss is not None and loss.relative == pytest.approx(0.03)

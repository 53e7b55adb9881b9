"""What the report of a small study says about its numbers: four learning rates with two seeds, on a CPU."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from made_runs import Made, of, write_log, write_rates
from rich.console import Console

from fp8launch.report.columns import main_table
from fp8launch.report.comparison import Comparison
from fp8launch.report.conclusion import conclusion
from fp8launch.report.export import differences_table, doubts, remarks, to_terminal


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    return of(write_rates(tmp_path_factory.mktemp("runs")), gpu=None)


def test_one_meaning_of_the_spread(study: Comparison) -> None:
    """It was a standard deviation after a loss, and half the range after a speed."""
    table = main_table(study.rows)
    first = dict(zip(table.headers, table.rows[0], strict=True))
    # By hand: |70 - 60| / sqrt(2) and |2.3 - 2.2| / sqrt(2).
    assert first["step time (ms)"] == "65.0 ± 7.1"
    assert first["loss at the end (perplexity)"].startswith("2.2500 ± 0.0707")
    assert [line for line in remarks(study) if "±" in line] == ["±: standard deviation over the runs of a row"]


def test_a_cpu_has_processes_and_three_digits(study: Comparison) -> None:
    table = main_table(study.rows)
    assert not any("GPU" in header for header in table.headers)
    assert {"processes", "tokens/s/process", "TFLOP/s/process"} <= set(table.headers)
    flops = table.rows[0][table.headers.index("TFLOP/s/process")]
    assert len(flops.replace(".", "").lstrip("0")) == 3
    assert float(flops) == pytest.approx(study.rows[0].tflops.median, rel=5e-3)


def test_the_interval_of_a_loss_ends_at_zero(study: Comparison) -> None:
    by_lr = {row.facts["lr"]: row.loss.interval for row in study.rows}
    assert (by_lr[0.01].low, by_lr[0.03].low) == (0.0, 0.0)
    assert by_lr[0.01].method == "t over 2 runs, cut off at 0"
    # t(1) = 12.706 times 0.1 / 2 on either side.
    assert by_lr[0.001].low == pytest.approx(2.25 - 12.706 * 0.05, abs=1e-3)
    assert by_lr[0.001].method == "t over 2 runs"


def test_few_seeds_and_untested_speeds_are_named(study: Comparison) -> None:
    assert conclusion(study).startswith("Lowest loss at the end: lr 0.01 with 0.0070 ± 0.0028, next lr 0.03 ")
    assert "; 2 seeds each cannot separate lr 0.01 from lr 0.03 (lr 0.03 minus lr 0.01: -" in conclusion(study)
    assert conclusion(study).endswith("; lr 0.003 and lr 0.001 are worse than lr 0.01 after 40 iterations (95 %).")
    assert doubts(study) == ["only 2 seeds, so the intervals are wide: --seeds 1,2,3,4,5 narrows them"]
    assert "speed: differences not tested, because these settings do not change the work of a step" in remarks(study)


def test_averages_and_the_test_are_explained(study: Comparison) -> None:
    """ "At least 5" was said of 40 iterations, and an interval below 0 stood next to one cut off at 0."""
    said = remarks(study)
    assert "loss at the end: mean of the last 5 logged iterations of each run, over all seeds" in said
    assert "speed and step time: median of a run's iterations; for several runs, the median of their medians" in said
    [tested] = [line for line in said if "Welch" in line]
    assert "not corrected for several comparisons" in tested and "not cut off at 0" in tested


def test_no_test_of_losses_is_claimed_of_single_seeds(tmp_path: Path) -> None:
    logs = []
    for lr, count in ((0.001, 40), (0.01, 220)):
        logs.append(write_log(tmp_path / f"{lr}.log", Made(iterations=count, arguments={"lr": lr})))
    said = remarks(of(*logs))
    assert "loss at the end: mean of the last 5 to 22 logged iterations of each run" in said
    assert not any("Welch" in line for line in said)


def test_what_names_the_rows_is_no_further_difference(study: Comparison) -> None:
    assert [one.name for one in study.differences] == ["lr"]
    assert differences_table(study).rows == ()


@pytest.mark.parametrize("width", [80, 120])
def test_doubts_are_wrapped(tmp_path: Path, width: int) -> None:
    """They were cut at the width of the terminal."""
    logs = [write_log(tmp_path / f"{n}.log", Made(arguments={f"option_{i}": n for i in range(9)})) for n in (1, 2)]
    comparison = of(*logs)
    [doubt] = doubts(comparison)
    assert len(doubt) > 160
    out = io.StringIO()
    Console(file=out, width=width).print(to_terminal(comparison, width, details=False))
    lines = out.getvalue().splitlines()
    assert max(map(len, map(str.rstrip, lines))) <= width
    assert " ".join(doubt.split()) in " ".join(out.getvalue().split())

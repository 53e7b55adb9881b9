"""benchmarks/plan/calibrated.py: the rates of a machine make the predictions for it better."""

from __future__ import annotations

import runpy
import statistics
from pathlib import Path

import pytest

PLAN = Path(__file__).resolve().parents[2] / "benchmarks" / "plan"


def test_rates_of_a_machine_correct_the_predictions_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PLAN))
    monkeypatch.syspath_prepend(str(PLAN.parent / "h200"))
    found = list(runpy.run_path(str(PLAN / "calibrated.py"))["errors"]())
    assert len(found) == 14
    page = (PLAN / "kernel_rates.md").read_text()
    for one in found:
        row = f"| {one.name} | {one.before:+.1%} | {one.after:+.1%} | {one.by_other:+.1%} |"
        assert row in page
    for after in ([one.after for one in found], [one.by_other for one in found]):
        assert statistics.median(map(abs, after)) < 0.12 and max(map(abs, after)) < 0.25

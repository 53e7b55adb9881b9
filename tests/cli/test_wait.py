"""`submit --wait` on this machine: each run once, and at the end what `parse` says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fp8launch.cli import run

SMALL = ["submit", "tiny_cpu", "--backend", "local", "--wait", "--yes"]


@pytest.mark.train
def test_a_study_prints_each_run_once(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*SMALL, "--sweep", "train.lr=0.01,0.02", "--set", "train.iterations=4", "--study", "s"]) == 0
    shown = capsys.readouterr().err
    assert shown.count(": completed\n") == 2
    assert shown.count("iteration 4/4 ") == 2
    assert "2 runs completed; `fp8launch compare s`" in shown


@pytest.mark.train
def test_a_run_that_is_nan_to_its_end_fails_although_its_job_completes(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    diverges = ["train.lr=1e30", "train.min_lr=1e29", "train.iterations=8"]
    assert run([*SMALL, *(word for setting in diverges for word in ("--set", setting))]) == 1
    shown = capsys.readouterr().err
    assert ": completed\n" in shown and "nan, line " in shown and "[nan]" in shown
    assert run(["runs", "--json"]) == 0
    [row] = json.loads(capsys.readouterr().out)
    assert row["progress"]["loss"] is None


FAILS = """
import sys
print("Traceback (most recent call last):", file=sys.stderr)
print('  File "train.py", line 1, in <module>', file=sys.stderr)
print("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", file=sys.stderr)
sys.exit(1)
"""


def test_a_failure_ends_with_its_cause_and_advice(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "fails.py"
    script.write_text(FAILS)
    assert run([*SMALL, "--set", f"launch.script={script}"]) == 1
    shown = capsys.readouterr().err
    assert "failed (exit status 1)" in shown
    assert "out-of-memory, line " in shown
    assert "advice: " in shown
    assert "--- end of the traceback in " in shown
    assert '  File "train.py", line 1, in <module>\ntorch.OutOfMemoryError: CUDA out of memory.' in shown


def test_an_exception_without_a_pattern_shows_its_traceback(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "fails.py"
    script.write_text("def inner():\n    raise LookupError('no such thing')\n\ninner()\n")
    assert run([*SMALL, "--set", f"launch.script={script}"]) == 1
    shown = capsys.readouterr().err
    assert "exception, line " in shown and "traceback above" not in shown
    assert "in inner\n" in shown.partition("--- end of the traceback in ")[2]

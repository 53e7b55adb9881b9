"""benchmarks/plan/errors.md: published and measured throughput beside what the speed model predicts today."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "plan" / "errors.py"


def test_the_table_is_of_the_model_and_its_errors_are_within_the_bounds() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

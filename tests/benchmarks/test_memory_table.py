"""benchmarks/h200/memory.md: what the committed logs measured, and what the estimate says today."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "h200" / "memory.py"


def test_the_table_is_of_the_logs_and_no_run_is_off_by_more_than_a_tenth() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

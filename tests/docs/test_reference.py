"""What the docs repeat from the code is as the code has it, and what they say of GPUs is what check says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fp8launch.hardware.quantization import precision_names
from fp8launch.plugin_registry import SELECTION

ROOT = Path(__file__).parents[2]


def write_docs(*arguments: str) -> subprocess.CompletedProcess[str]:
    # The pages describe all plugins, whichever of them a run of the tests selects.
    env = {name: value for name, value in os.environ.items() if name != SELECTION}
    command = [sys.executable, "tools/reference.py", *arguments]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)


def test_no_page_is_stale() -> None:
    done = write_docs("--check")
    assert (done.returncode, done.stderr) == (0, "")


def test_every_precision_is_in_the_decision_table() -> None:
    table = (ROOT / "docs/precision.md").read_text(encoding="utf-8").split("## Turn it on")[0]
    takes = " ".join(row.split("|")[2] for row in table.splitlines() if row.startswith("|"))
    assert all(name in takes for name in precision_names())


@pytest.mark.parametrize(("gpu", "precision"), [("a100", "tensorwise"), ("h100", "mxfp8"), ("b200", "mxfp8")])
def test_the_gpu_table_is_what_check_says(gpu: str, precision: str) -> None:
    lines = (ROOT / "docs/gpus.md").read_text(encoding="utf-8").splitlines()
    head = next(line for line in lines if line.startswith("| GPU |"))
    row = next(line for line in lines if line.startswith(f"| {gpu} |"))
    column = [cell.strip() for cell in head.split("|")].index(precision)
    verdict = row.split("|")[column].strip()
    check = [sys.executable, "-m", "fp8launch", "check", "llama8b_bf16", "--gpu", gpu, "--json"]
    done = subprocess.run(
        [*check, "--set", f"precision.recipe={precision}"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    refused = bool(re.search(r'"code": "(fp8-needs-newer-gpu|mxfp8-needs-blackwell)"', done.stdout))
    assert verdict == ("no" if refused else "yes")

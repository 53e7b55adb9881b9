"""The ways of a precision and of a log line in docs/design.md are those of the running program."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "launchers" / "fp8launch"

# Runs a command and prints every file of the package that has a frame with the value in a local variable, in what it
# returns, or directly inside one of these.
TRACER = """
import json, os, sys
import fp8launch
from fp8launch.cli import main

MARK = sys.argv[1]
ROOT = os.path.dirname(fp8launch.__file__) + os.sep

def is_it(value):
    if isinstance(value, str):
        return MARK in value
    return isinstance(value, float) and str(value) == MARK

def holds(value):
    if is_it(value):
        return True
    if isinstance(value, dict):
        value = list(value.values())
    elif type(value).__module__.startswith("fp8launch"):
        value = list(getattr(value, "__dict__", {}).values())
    return isinstance(value, (list, tuple)) and any(map(is_it, value[:300]))

found = set()
def look(frame, event, result):
    file = frame.f_code.co_filename
    if event == "return" and file.startswith(ROOT) and frame.f_code.co_name != "<module>" and file not in found:
        if holds(result) or any(map(holds, list(frame.f_locals.values()))):
            found.add(file)

sys.argv = ["fp8launch", *sys.argv[2:]]
sys.setprofile(look)
try:
    main()
except SystemExit:
    pass
finally:
    sys.setprofile(None)
    print("\\n" + json.dumps(sorted(file.removeprefix(ROOT) for file in found)))
"""
RECIPE = """
extends: [models/llama3_8b, data/mock, hardware/h100]
name: traced
precision: {recipe: tensorwise, format: hybrid}
batch: {micro: 1, global: 8, sequence: 8192}
train: {iterations: 5, lr: 3.0e-4}
"""
# They look at the value and hand nothing on: checks, the search for secrets, statistics of the run's end, a sentence.
ONLY_LOOK = {
    "precision": {
        "engines/megatron_lm/flag_conflicts.py", "megatron/flag_problems.py", "megatron/model_arithmetic.py",
        "megatron/schema.py", "job/reserved_env.py", "secrets.py",
    },
    "step time": {"report/conclusion.py", "report/health.py", "report/intervals.py", "report/run_status.py"},
}  # fmt: skip
# `render` prints the script; the first line of a format is read by its labels.
AT_THE_ENDS = {"cli/output.py", "logs/lines.py", "injob/supervisor/log_lines.py"}


def way(title: str) -> list[str]:
    """The files of the table whose head has these words."""
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    table = text.partition(f"| | {title}")[2].partition("\n\n")[0]
    return [match[1] for line in table.splitlines() if (match := re.match(r"\| \d+ \| `([\w/]+\.py)`", line))]


def traced(mark: str, *command: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", TRACER, mark, *command], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert mark in done.stdout
    return set(re.findall(r'"([\w/]+\.py)"', done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("title", ["precision", "step time"])
def test_a_way_has_twelve_files(title: str) -> None:
    files = way(title)
    assert 0 < len(files) <= 12
    assert len(set(files)) == len(files)
    assert [name for name in files if not (PACKAGE / name).is_file()] == []


def test_a_precision_passes_no_other_file(tmp_path: Path) -> None:
    recipe = tmp_path / "traced.yaml"
    recipe.write_text(RECIPE, encoding="utf-8")
    found = traced("tensorwise", "render", str(recipe), "--as", "sbatch")
    assert {"recipe/yaml_source.py", "megatron/arguments.py", "job/batch_script.py"} <= found
    assert found - set(way("precision")) - ONLY_LOOK["precision"] - AT_THE_ENDS == set()


def test_a_step_time_passes_no_other_file(tmp_path: Path) -> None:
    line = (
        " [2026-11-20 10:00:{0:02}.000000] iteration {0:8}/      30 | elapsed time per iteration (ms): 987.6 | x: 1 |\n"
    )
    log = tmp_path / "traced.log"
    log.write_text("".join(line.format(number) for number in range(1, 31)), encoding="utf-8")
    found = traced("987.6", "compare", str(log))
    assert {"logs/table.py", "report/columns.py"} <= found
    assert found - set(way("step time")) - ONLY_LOOK["step time"] - AT_THE_ENDS == set()

"""`submit --wait` notifies once about the end of each run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fp8launch.cli import run
from fp8launch.plugins.notify.notify import config_file

# Prints what Megatron prints of an iteration, with the loss of the test.
PRINTS = """
for i in range(1, 9):
    print(f" [2026-11-26 10:00:0{i}] iteration {i:8d}/       8 | consumed samples: {i * 8:12d} |"
          f" elapsed time per iteration (ms): 100.0 | learning rate: 1.000000E-02 | global batch size:     8 |"
          " LOSS number of skipped iterations:   0 | number of nan iterations:   NAN |", flush=True)
"""


def script(tmp_path: Path, loss: str, nan_iterations: int) -> str:
    file = tmp_path / "prints.py"
    file.write_text(PRINTS.replace("LOSS", loss).replace("NAN", str(nan_iterations)))
    return f"launch.script={file}"


@pytest.fixture
def told(home: Path, tmp_path: Path) -> Path:
    """The file to which the configured command appends its messages."""
    config_file().parent.mkdir(parents=True)
    config_file().write_text(f"notify: {{command: [tee, -a, {tmp_path / 'told'}]}}\n")
    return tmp_path / "told"


def messages(told: Path) -> list[dict[str, Any]]:
    decoder, text, found = json.JSONDecoder(), told.read_text(), []
    while text:
        message, end = decoder.raw_decode(text)
        found.append(message)
        text = text[end:].lstrip()
    return found


def submit(*words: str) -> int:
    return run(["submit", "tiny_cpu", "--backend", "local", "--wait", "--yes", *words])


def test_each_run_of_a_study_is_notified_once(told: Path, tmp_path: Path) -> None:
    prints = script(tmp_path, "lm loss: 1.000000E+00 |", 0)
    assert submit("--set", prints, "--sweep", "train.lr=0.01,0.02", "--study", "s") == 0
    assert [message["state"] for message in messages(told)] == ["completed", "completed"]


def test_a_run_that_is_nan_to_its_end_is_a_failure_although_its_job_completes(told: Path, tmp_path: Path) -> None:
    config_file().write_text(config_file().read_text().replace("]}", "], when: failure}"))
    assert submit("--set", script(tmp_path, "", 1)) == 1
    last = messages(told)[-1]
    assert last["state"] == "completed" and last["failure"]["code"] == "nan"

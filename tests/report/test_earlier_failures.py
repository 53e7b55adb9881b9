"""The status of a run whose newest log shows no training: its program writes a log of another format."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from made_runs import Made, write_run

from fp8launch.report.read_run import run_from_folder
from fp8launch.rundir.run_dir import RunFolder

OUT_OF_MEMORY = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
OTHER_FORMAT = "epoch 3 done, loss 2.1\n"


def status(folder: Path, finished: bool, exit_status: int, first: str = OUT_OF_MEMORY) -> str:
    run = write_run(folder / "made-1", None, jobs=[{"id": "1", "submitted": "2026-11-20T13:00:00+01:00"}])
    logs = run / "logs"
    logs.mkdir()
    for name, text, code in (("1-0", first, 1), ("1-1", OTHER_FORMAT, exit_status)):
        (logs / f"{name}.log").write_text(text)
        (logs / f"{name}.exit").write_text(f"{code}\n")
    attempts = [{"name": name, "job": "1", "before": 0} for name in ("1-0", "1-1")]
    (run / "attempts.json").write_text(json.dumps({"attempts": attempts, "finished": finished}))
    return run_from_folder(RunFolder(run)).status


@pytest.mark.parametrize(
    ("finished", "exit_status", "expected"), [(True, 0, "no_data"), (False, 0, "failed"), (True, 1, "failed")]
)
def test_a_completed_attempt_ends_the_failure_of_an_earlier_one(
    tmp_path: Path, finished: bool, exit_status: int, expected: str
) -> None:
    assert status(tmp_path, finished, exit_status) == expected


def test_iterations_of_an_earlier_attempt_count(tmp_path: Path) -> None:
    assert status(tmp_path, True, 0, Made(end=OUT_OF_MEMORY).text()) == "ok"

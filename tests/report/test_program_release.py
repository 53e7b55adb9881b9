"""Reports name the release of a program that ran, not the requested one."""

from __future__ import annotations

from pathlib import Path

import pytest
from made_runs import Made, write_run

from fp8launch.report.named_runs import report_of
from fp8launch.rundir.run_dir import RunFolder


@pytest.mark.parametrize(
    ("requested", "printed", "reported"),
    [
        ("Megatron-Bridge 0.6.0", " > Megatron-Bridge version ... 0.6.2", "Megatron-Bridge 0.6.2"),
        ("Megatron-Bridge 0.6.0", "", "Megatron-Bridge 0.6.0"),
        ("train.py", " > PyTorch version ... 2.11.0", "train.py"),
    ],
)
def test_the_release_that_ran(tmp_path: Path, requested: str, printed: str, reported: str) -> None:
    folder = write_run(tmp_path / "run", Made(), engine={"entry": requested})
    log = folder / "logs" / "1-0.log"
    log.write_text(f"{printed}\n{log.read_text()}")
    assert report_of(RunFolder(folder)).facts["script"] == reported

"""benchmarks/plan/host_reference.py: the speed of a host, from runs that waited for it and from those that did not."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SCRIPT = BENCHMARKS / "plan" / "host_reference.py"
EXPERTS, DENSE = "2026-11-28-host-h100/experts.log", "2026-11-27-startup/new_dense1.log"


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("logs")
    with tarfile.open(BENCHMARKS / "h200" / "logs.tar.xz") as archive:
        archive.extractall(folder, [archive.getmember(EXPERTS), archive.getmember(DENSE)], filter="data")
    return folder


def rates(folder: Path, device: str = "NVIDIA H100 80GB HBM3") -> str:
    rows = [{"kernel": "host", "shape": "small layers", "rate": 500.0, "unit": "microseconds per layer"}]
    file = folder / "rates_1.json"
    file.write_text(json.dumps({"format": 1, "device": device, "date": "2026-11-27", "rates": rows, "skipped": {}}))
    return str(file)


def reference(*files: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *files], capture_output=True, text=True, check=False)


def test_only_runs_that_wait_for_the_host_tell_its_speed(logs: Path) -> None:
    done = reference(rates(logs), str(logs / EXPERTS), str(logs / DENSE))
    assert done.returncode == 0, done.stderr
    told = re.search(r"experts: (\d\.\d\d) times as slow as the model's host, reference (\d+)", done.stdout)
    assert told is not None and 3.5 < float(told[1]) < 5
    assert int(told[2]) == pytest.approx(500 / float(told[1]), abs=2)
    assert "new_dense1: does not tell the host's speed" in done.stdout
    assert done.stdout.splitlines()[-1].startswith(f"h100,host,small layers,{told[2]},")
    alone = reference(rates(logs), str(logs / DENSE))
    assert alone.returncode == 1 and "No reference" in alone.stdout


def test_the_speed_of_a_host_is_found_again(logs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    program = runpy.run_path(str(SCRIPT))
    run = program["measured_run"](logs / EXPERTS, "experts")
    slow = program["step_on_host"](run, 2.5)
    found = program["slowness_of"](replace(run, measured=slow.tokens_per_s_per_gpu))
    assert found == pytest.approx(2.5, rel=0.001)


def test_results_of_other_machines_are_refused(logs: Path) -> None:
    done = reference(rates(logs, "NVIDIA H200"), str(logs / EXPERTS))
    assert done.returncode == 2 and "several GPU types: h100, h200" in done.stderr

"""Live tracking of a job that Slurm starts twice."""

from __future__ import annotations

import json
import subprocess

import pytest
from launching import ROOT, Site, sets
from support import wait_for

from fp8launch.injob.supervisor.checkpoints import latest

pytestmark = [pytest.mark.needs_plugin("tracking"), pytest.mark.train, pytest.mark.slow]

PYTHON = ROOT / ".cache/trackers/bin/python"
READS = """
import sys
from pathlib import Path
from fp8launch.plugins.tracking.injob.wandb_run import records_in
for file in sorted(Path(sys.argv[1]).glob("tracking/wandb/offline-run-*/*.wandb")):
    print(*[record.history.step.num for record in records_in(file) if record.HasField("history")])
"""


def test_two_attempts_are_one_run(site: Site) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trackers = sets("tracking.tensorboard={}")
    if PYTHON.is_file():
        trackers += sets("tracking.wandb.mode=offline", f"tracking.python={PYTHON}")
    trained = sets("checkpoint.dir=checkpoints", "checkpoint.interval=20", "train.iterations=400")
    run = site.submit("--yes", "--attempts", "2", *trained, *trackers)
    folder = site.runs / run
    wait_for(lambda: latest(folder / "checkpoints") >= 40, 180)
    site.requeue(run)
    wait_for(lambda: site.state(run)["state"] == "completed", 300)
    assert len(json.loads((folder / "attempts.json").read_text())["attempts"]) == 2
    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    assert len(list((folder / "tensorboard").iterdir())) == 2
    assert [event.step for event in events.Scalars("loss")] == list(range(1, 401))
    if PYTHON.is_file():
        command = [str(PYTHON), "-c", READS, str(folder)]
        environment = {"PYTHONPATH": str(ROOT / "launchers")}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        first, second = done.stdout.splitlines()
        assert list(map(int, f"{first} {second}".split())) == list(range(1, 401))

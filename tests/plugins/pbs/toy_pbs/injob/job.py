"""The half inside the job, with Python's standard library only."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fp8launch.injob.local_job import end_all, processes_with, send
from fp8launch.injob.supervisor.job_scheduler import JobScheduler, State, Submitted, Training


class PbsTraining(Training):
    def __init__(self, job: str) -> None:
        self.job = job

    def ask_to_save(self) -> bool:
        send(signal.SIGTERM, processes_with("TOY_TRAINING", self.job))
        return True

    def end(self, at_once: bool = False) -> bool:
        end_all(lambda: set(processes_with("TOY_TRAINING", self.job)), 0.0 if at_once else 5.0)
        return True


class PbsJob(JobScheduler):
    def state(self) -> State:
        return State(ending=self._jobs()[self.job]["deleted"])

    def hosts(self) -> list[str]:
        return Path(self.env["PBS_NODEFILE"]).read_text().split()

    def training(self) -> PbsTraining | None:
        return PbsTraining(self.job) if any(processes_with("TOY_TRAINING", self.job)) else None

    def how_ended(self, job: str) -> str | None:
        return "cancelled" if self._jobs()[job]["deleted"] else None

    def submit_next(self, key: str, exclude: Sequence[str]) -> Submitted:
        for job in self._jobs().values():
            if job["name"] == key:
                return Submitted(job["id"])
        waits = ["-W", f"depend=afterany:{self.job}", "-N", key]
        return Submitted(_pbs("qsub", *waits, str(self.folder / "job.pbs")).strip())

    def cancel(self, job: str) -> None:
        _pbs("qdel", job)

    def _jobs(self) -> dict[str, dict[str, Any]]:
        return {job["id"]: job for job in json.loads(_pbs("qstat"))}


def _pbs(*command: str) -> str:
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout

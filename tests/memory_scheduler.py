"""A scheduler that is nothing but a dictionary: the proof that a new one needs only the interface.

`fp8launch` runs in this process (`command`), so that the jobs live as long as the test. A job does not run: the test
says how it ends, and its run folder gets what the script would have left there.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from fp8launch.diagnostics import UserError, error
from fp8launch.job.job import Job
from fp8launch.rundir.registry import job_ids
from fp8launch.rundir.run_dir import RunFolder
from fp8launch.schedulers.base import FINAL, Capabilities, JobState, Scheduler, Status

NAME = "memory"
TOO_FEW = "there are not enough nodes without these"
EVERYTHING = Capabilities(arrays=True, continue_by=("dependency",), poll_seconds=0.01)


@dataclass
class MemoryJob:
    """A job by its id; tasks of an array share a key."""

    key: str
    run: RunFolder
    status: Status = "pending"
    exit_code: int | None = None
    excluded: tuple[str, ...] = ()


@dataclass
class Memory:
    """What the scheduler knows, and how it behaves: silent, refusing, forgetting to answer a submission, interrupted
    before it answers, or without enough nodes for a job that excludes some."""

    jobs: dict[str, MemoryJob] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    silent: bool = False
    refusal: str | None = None
    loses_answers: bool = False
    interrupted: bool = False
    needs_all_nodes: bool = False
    ends_at_once: int | None = None

    def start(self, run: RunFolder) -> None:
        self.jobs[job_ids(run)[-1]].status = "running"

    def end(self, run: RunFolder, exit_code: int = 0, status: Status | None = None) -> None:
        job_id = job_ids(run)[-1]
        job = self.jobs[job_id]
        job.status, job.exit_code = status or ("failed" if exit_code else "completed"), exit_code
        leave(run, job_id, exit_code)

    def need_answer(self) -> None:
        if self.silent:
            raise error("memory-silent", "the memory scheduler does not answer", exit_code=3)


def leave(run: RunFolder, job_id: str, exit_code: int, text: str = "trained\n") -> None:
    """Write what an attempt's script leaves in the run folder."""
    (run.path / "logs" / f"{job_id}-0.log").write_text(text)
    (run.path / "logs" / f"{job_id}-0.exit").write_text(f"{exit_code}\n")


def leave_attempt(run: RunFolder, folder: Path, iteration: int, excluded: Sequence[str] = ()) -> None:
    """Write what an attempt that failed at `iteration` leaves: the supervisor's record, and a whole checkpoint."""
    why = "exception: another attempt would fail again"
    job = job_ids(run)[-1]
    attempt = {"name": f"{job}-0", "job": job, "before": 0, "after": iteration, "ended": 1.0, "counts": True}
    attempt |= {"cause": "exception", "then": why}
    record = {"attempts": [attempt], "waiting": None, "excluded": list(excluded), "stopped": why, "finished": False}
    (run.path / "attempts.json").write_text(json.dumps(record))
    save(folder, iteration)


def save(folder: Path, iteration: int) -> None:
    """Write a checkpoint as Megatron does in the format `torch`: a zip file for each rank, then the tracker."""
    part = folder / f"iter_{iteration:07d}" / "mp_rank_00" / "model_optim_rng.pt"
    part.parent.mkdir(parents=True)
    with zipfile.ZipFile(part, "w") as archive:
        archive.writestr("data.pkl", b"weights")
    (folder / "latest_checkpointed_iteration.txt").write_text(str(iteration))


class MemoryScheduler(Scheduler):
    name = NAME
    capabilities: ClassVar[Capabilities] = EVERYTHING

    def __init__(self, memory: Memory) -> None:
        self.memory = memory

    def script(self, job: Job) -> tuple[str, str]:
        return "job.sh", f"# {job.name} in memory\n"

    def submit(self, job: Job, run: RunFolder, key: str) -> str:
        return self._add([run], key)[0]

    def array_groups(self, jobs: Sequence[Job]) -> list[list[int]]:
        return [list(range(len(jobs)))] if jobs else []

    def submit_array(
        self, group: Sequence[tuple[RunFolder, Job]], key: str, folder: Path, max_running: int | None = None
    ) -> list[str]:
        return self._add([run for run, _ in group], key)

    def resume(self, run: RunFolder, key: str, exclude: Sequence[str] = ()) -> str:
        return self._add([run], key, tuple(exclude))[0]

    def is_impossible(self, refusal: UserError) -> bool:
        return refusal.problems[0].message == TOO_FEW

    def find(self, keys: Sequence[str]) -> dict[str, str]:
        self.memory.need_answer()
        return {job.key: job_id.partition("_")[0] for job_id, job in self.memory.jobs.items() if job.key in keys}

    def states(self, runs: Sequence[RunFolder]) -> list[JobState]:
        if self.memory.silent:
            return [JobState("unknown", "the memory scheduler does not answer", source=NAME) for _ in runs]
        found = []
        for run in runs:
            job = self.memory.jobs.get(job_ids(run)[-1]) if job_ids(run) else None
            if job is None:
                found.append(JobState("unknown", "is not there", source=NAME, dropped=bool(job_ids(run))))
            else:
                found.append(JobState(job.status, job.status.upper(), job.exit_code, NAME))
        return found

    def cancel(self, runs: Sequence[RunFolder]) -> None:
        self.memory.need_answer()
        for run in runs:
            for job_id in job_ids(run):
                if self.memory.jobs[job_id].status not in FINAL:
                    self.memory.jobs[job_id].status = "cancelled"
                    self.memory.calls.append(f"cancel {job_id}")

    def version(self) -> str | None:
        return "1.0"

    def _add(self, runs: Sequence[RunFolder], key: str, excluded: tuple[str, ...] = ()) -> list[str]:
        self.memory.need_answer()
        if self.memory.refusal:
            raise error("memory-refused", self.memory.refusal, exit_code=3)
        if self.memory.needs_all_nodes and excluded:
            raise error("memory-refused", TOO_FEW, exit_code=3)
        assert not any(job.key == key for job in self.memory.jobs.values()), "submitted twice"
        number = str(1 + len(self.memory.calls))
        self.memory.calls.append(f"submit {key}")
        ids = [number] if len(runs) == 1 else [f"{number}_{index}" for index in range(len(runs))]
        for job_id, run in zip(ids, runs, strict=True):
            self.memory.jobs[job_id] = MemoryJob(key, run, excluded=excluded)
            if self.memory.ends_at_once is not None:
                job = self.memory.jobs[job_id]
                job.exit_code = self.memory.ends_at_once
                job.status = "failed" if job.exit_code else "completed"
                leave(run, job_id, job.exit_code)
        if self.memory.interrupted:
            raise KeyboardInterrupt
        if self.memory.loses_answers:
            raise error("memory-lost", "timed out", exit_code=3)
        return ids

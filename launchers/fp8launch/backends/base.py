"""What a backend does, and the states that all of them speak."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from fp8launch.job.job import Job
from fp8launch.runs.folder import RunFolder

Status = Literal[
    "pending", "running", "completed", "failed", "cancelled", "timeout", "node_fail", "out_of_memory", "unknown"
]
FINAL: frozenset[Status] = frozenset(("completed", "failed", "cancelled", "timeout", "node_fail", "out_of_memory"))


@dataclass(frozen=True)
class JobState:
    """`detail` is the scheduler's own word or reason; `source` says who told."""

    status: Status
    detail: str = ""
    exit_code: int | None = None
    source: str = ""

    @property
    def final(self) -> bool:
        return self.status in FINAL


class Backend(Protocol):
    """Submits jobs and answers for those that it submitted, from any later shell."""

    name: str

    def script(self, job: Job) -> tuple[str, str]:
        """The name and the text of the script that runs the job."""

    def submit(self, job: Job, run: RunFolder) -> str:
        """Start the run's script; return the job id. Raises UserError with the scheduler's own words."""

    def states(self, runs: Sequence[RunFolder]) -> list[JobState]:
        """The state of the newest job of each run."""

    def cancel(self, run: RunFolder) -> None:
        """End every job of the run."""

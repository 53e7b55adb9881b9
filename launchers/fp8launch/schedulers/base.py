"""The interface of schedulers, and their capabilities.

A scheduler starts jobs, finds them again, reports their state and ends them, from any later shell. Slurm and this
machine are implementations, and plugins add others. Other code depends on `Capabilities`, never on a scheduler's name.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, get_args

from fp8launch.cluster.profile import Cluster
from fp8launch.cluster.runtimes import Runtime
from fp8launch.diagnostics import Problem, Severity, UserError, error
from fp8launch.job.job import Job
from fp8launch.recipe.load import LoadedRecipe
from fp8launch.rundir.run_dir import RunFolder

Status = Literal[
    "pending",
    "running",
    "completed",
    "failed",
    "cancelled",
    "timeout",
    "node_fail",
    "out_of_memory",
    "interrupted",
    "unknown",
]
# The code of a refusal because the user would exceed the site's limit of jobs.
SUBMIT_LIMIT = "submit-limit"
# `interrupted`: nothing of the run is left in the scheduler, and its training is not done.
FINAL: frozenset[Status] = frozenset(get_args(Status)) - {"pending", "running", "unknown"}

# How the supervisor inside a job starts another attempt: `requeue` has the scheduler start the same job again,
# `dependency` submits a job that waits for this one, `rerun` runs the job's script again in the same job.
ContinueBy = Literal["requeue", "dependency", "rerun"]


@dataclass(frozen=True)
class JobState:
    """The state of a job. `detail` is the scheduler's own word or reason; `source` names its origin.

    `dropped`: the job never began, and the scheduler does not have it any more, so it can be submitted again.
    `folder_unseen`: the job ended at once, because its node does not see the run folder.
    """

    status: Status
    detail: str = ""
    exit_code: int | None = None
    source: str = ""
    dropped: bool = False
    folder_unseen: bool = False

    @property
    def final(self) -> bool:
        return self.status in FINAL

    def __str__(self) -> str:
        return f"{self.status} ({self.reason})" if self.reason else self.status

    @property
    def reason(self) -> str:
        """Return `detail` without the words that only repeat the status."""
        if self.status == "completed" and self.detail == "exit status 0":
            return ""
        if not self.detail.lower().startswith(self.status):
            return self.detail
        return self.detail[len(self.status) :].lstrip(":, ")


def ended_with(exit_status: int) -> JobState:
    """Return the state of a job whose exit status its run folder holds."""
    status: Status = "completed" if exit_status == 0 else "failed"
    return JobState(status, f"exit status {exit_status}", exit_status, "run folder")


@dataclass(frozen=True)
class JobTimes:
    """Times of a job as the scheduler prints them: elapsed, the limit, and the estimated start of a waiting job."""

    elapsed: str = ""
    limit: str = ""
    start: str = ""


@dataclass(frozen=True)
class Capabilities:
    """The capabilities of a scheduler.

    arrays             several runs can be submitted as one job array
    several_nodes      a job may use more than one node
    one_run_at_a_time  the points of a grid run sequentially, and the submitting command starts each
    on_this_machine    jobs are processes of the submitting host, so only that host can report on them
    pyxis              srun starts the processes, so pyxis' container options work
    holds              a job can be submitted that waits until it is released (`submit_held`, `JobScheduler.release`)
    continue_by        how another attempt of a run can be started, in order of preference; empty if it cannot
    time_limits        jobs are ended when their time is up
    poll_seconds       how often to query the state of a run that is followed
    """

    arrays: bool = False
    several_nodes: bool = True
    one_run_at_a_time: bool = False
    on_this_machine: bool = False
    pyxis: bool = False
    holds: bool = False
    continue_by: tuple[ContinueBy, ...] = ()
    time_limits: bool = True
    poll_seconds: float = 3.0

    @property
    def resumes(self) -> bool:
        """Return whether a run can have another attempt, by its supervisor or by `fp8launch resume`."""
        return bool(self.continue_by)


@dataclass(frozen=True)
class Submission:
    """A submission without a recorded outcome: its key, and the run's place in an array."""

    run: RunFolder
    key: str
    index: int | None = None


class Scheduler(ABC):
    """Starts jobs, and reports on them and ends them from any later shell.

    A submission has a key that no other submission has. The scheduler keeps it with the job, so that the job can be
    found again if the answer to the submission was lost.
    """

    name: ClassVar[str]
    capabilities: ClassVar[Capabilities]
    # Names in `request` that differ between two jobs without any effect on their speed.
    neutral_requests: ClassVar[frozenset[str]] = frozenset()
    # Variables that the scheduler sets and that the script reads: a recipe must not set them.
    script_variables: ClassVar[re.Pattern[str] | None] = None

    @abstractmethod
    def script(self, job: Job) -> tuple[str, str]:
        """Return the file name and the text of the script that runs the job."""

    def request(self, job: Job) -> dict[str, str | None]:
        """Return what the job requests, by the scheduler's own names; None for a name without a value.

        Manifests record it, and `diff` compares it. Raises UserError for a request that fp8launch cannot make.
        """
        return {}

    def plan_for_supervisor(self, job: Job) -> dict[str, str]:
        """Return entries of `survive.json` for the scheduler's half inside the job.

        `scheduler` names it as "module:class" (`fp8launch.injob.supervisor.job_scheduler`). Other entries are up to the
        scheduler.
        """
        return {}

    def validate(self, job: Job) -> None:
        """Raise UserError for a job that cannot be submitted here. Called before anything is written."""
        if job.nodes > 1 and not self.capabilities.several_nodes:
            raise error(
                f"{self.name}-is-one-node",
                f"the {self.name} backend runs on one node, but the recipe needs {job.nodes}",
                "resources.nodes",
                "use --nodes 1, or a Slurm backend",
            )

    @abstractmethod
    def submit(self, job: Job, run: RunFolder, key: str) -> str:
        """Start the script in the run folder; return the job id. Raises UserError with the scheduler's own message."""

    def array_groups(self, jobs: Sequence[Job]) -> list[list[int]]:
        """Divide jobs, given by their positions, into groups that `submit_array` takes; singles go to `submit`."""
        return [[position] for position in range(len(jobs))]

    def submit_array(
        self, group: Sequence[tuple[RunFolder, Job]], key: str, folder: Path, max_running: int | None = None
    ) -> list[str]:
        """Start a group of runs as one array; return a job id for each run.

        A job id is the array's id, `_` and the run's position in the group. `folder` is their study's, for files of
        the array; `max_running` limits how many of them run at the same time.
        """
        raise NotImplementedError(f"{self.name} has no job arrays")

    @abstractmethod
    def resume(self, run: RunFolder, key: str, exclude: Sequence[str] = ()) -> str:
        """Start the script in the run folder once more, without the nodes in `exclude`; return the job id."""

    def submit_held(self, run: RunFolder, key: str) -> str:
        """Submit the script in the run folder as a job that waits for its release; return the job id."""
        raise NotImplementedError(f"{self.name} cannot hold jobs")

    def release(self, run: RunFolder) -> bool:
        """Let a held job start. False if the request failed."""
        return False

    def is_impossible(self, refusal: UserError) -> bool:
        """Return whether a submission was refused because too few nodes are left without the excluded ones."""
        return False

    @abstractmethod
    def find(self, keys: Sequence[str]) -> dict[str, str]:
        """Return the jobs that exist for these submission keys: key to job id, an array's own id for an array.

        Raises UserError (exit code 3) when the scheduler does not answer: then nobody knows.
        """

    def recover(self, submissions: Sequence[Submission]) -> dict[RunFolder, str]:
        """Return the jobs of submissions that were cut off; a run whose job never reached the scheduler is left out.

        Raises UserError (exit code 3) when the scheduler does not answer.
        """
        jobs = self.find(list({one.key for one in submissions}))
        found = [one for one in submissions if one.key in jobs]
        return {one.run: jobs[one.key] + ("" if one.index is None else f"_{one.index}") for one in found}

    @abstractmethod
    def states(self, runs: Sequence[RunFolder]) -> list[JobState]:
        """Return the state of each run's newest job or, if that has ended, of the job that waited for its end.

        A run with a supervisor is not over while another attempt waits (`rundir.attempts.Attempts.waiting`).
        """

    def state(self, run: RunFolder) -> JobState:
        """Return the state of one run's newest job."""
        return self.states([run])[0]

    def job_times(self, runs: Sequence[RunFolder]) -> dict[RunFolder, JobTimes]:
        """Return the times of the newest jobs of runs that wait or run; runs without are left out."""
        return {}

    @abstractmethod
    def cancel(self, runs: Sequence[RunFolder]) -> None:
        """End every job of these runs."""

    def problems(self, job: Job, loaded: LoadedRecipe, environment: Mapping[str, str]) -> Iterable[Problem]:
        """Return what would keep this job from starting here, without submitting anything.

        `loaded` is the job's recipe, for the places of its values; `environment` is the submitting shell's.
        """
        return ()

    def problem_codes(self) -> Mapping[str, Severity]:
        """Return the codes of `problems`, with their severity."""
        return {}

    def require(self) -> None:  # noqa: B027 (most need nothing)
        """Raise UserError (exit code 3) if nothing can be submitted from this machine. Called before any write."""

    def lacks(self, gpu: str) -> Problem | None:
        """Return the problem if jobs can never get this GPU model from here; None if they may."""
        return None

    def is_expected(self, profile: Cluster) -> bool:
        """Return whether this machine or the profile belongs to a cluster of this scheduler, up or down."""
        return False

    def has_no_cluster(self, environment: Mapping[str, str]) -> bool:
        """Return whether its programs are installed on this machine, but are not configured for any cluster.

        False if a cluster is configured and does not answer.
        """
        return False

    def answers(self, environment: Mapping[str, str]) -> bool:
        """Return whether jobs can be submitted from this machine now."""
        return True

    def uses_other_hosts(self, environment: Mapping[str, str]) -> bool:
        """Return whether jobs run on hosts other than this one, as far as the scheduler says."""
        return False

    def container_runtimes(self, environment: Mapping[str, str]) -> Iterable[tuple[Runtime, str]]:
        """Return the container runtimes that belong to the scheduler, each with its origin."""
        return ()

    def version(self) -> str | None:
        """Return the version of the scheduler's software; None if it has none."""
        return None

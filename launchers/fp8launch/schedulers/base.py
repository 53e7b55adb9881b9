"""The scheduler interface: what every scheduler can be asked, and what it says it can do.

A scheduler starts jobs, finds them again, reports their state and ends them, from any later shell. Slurm (by sbatch,
submitit or NeMo-Run) and this machine are implementations. Code outside this package decides by `Capabilities`, never
by a scheduler's name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar, Literal

from fp8launch.cluster.profile import Cluster
from fp8launch.diagnostics import MACHINE_LACKS, Problem, error
from fp8launch.job.job import Job
from fp8launch.recipe.load import LoadedRecipe
from fp8launch.rundir.run_dir import RunFolder
from fp8launch.schedulers.site_offers import SiteOffers

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
# The code of a refusal because the user has, or would have, as many jobs as the site allows.
SUBMIT_LIMIT = "submit-limit"
# `interrupted`: nothing of the run is left in the scheduler, and its training is not done.
FINAL: frozenset[Status] = frozenset(
    ("completed", "failed", "cancelled", "timeout", "node_fail", "out_of_memory", "interrupted")
)

# How the supervisor inside a job starts another attempt: `requeue` has the scheduler start the same job again,
# `dependency` submits a job that waits for this one, `rerun` runs the job's script again in the same job.
ContinueBy = Literal["requeue", "dependency", "rerun"]


@dataclass(frozen=True)
class JobState:
    """The state of a job. `detail` is the scheduler's own word or reason; `source` names who reported it.

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
        if self.reason:
            return f"{self.status} ({self.reason})"
        return self.status

    @property
    def reason(self) -> str:
        """`detail` without the words that only repeat the status."""
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
    """Times of a job in the scheduler's own words: elapsed, the limit, and the estimated start of one that waits."""

    elapsed: str = ""
    limit: str = ""
    start: str = ""


@dataclass(frozen=True)
class Capabilities:
    """The capabilities of a scheduler.

    arrays             several runs can be submitted as one job array
    several_nodes      a job may use more than one node
    one_run_at_a_time  the points of a grid run one after the other, and the submitting command starts each
    on_this_machine    jobs are processes of the submitting host, so only that host can report on them
    pyxis              srun starts the processes, so pyxis' container options work
    continue_by        how another attempt of a run can be started, in order of preference; empty: not at all
    time_limits        jobs are ended when their time is up
    poll_seconds       how often a state may be asked for while a run is followed
    """

    arrays: bool = False
    several_nodes: bool = True
    one_run_at_a_time: bool = False
    on_this_machine: bool = False
    pyxis: bool = False
    continue_by: tuple[ContinueBy, ...] = ()
    time_limits: bool = True
    poll_seconds: float = 3.0

    @property
    def resumes(self) -> bool:
        """A run can have another attempt, by its supervisor or by `fp8launch resume`."""
        return bool(self.continue_by)


State = Literal["ok", "missing", "note"]


@dataclass(frozen=True)
class Finding:
    """Something that a machine offers or lacks: "ok", "missing" for what some run needs, or "note"."""

    state: State
    what: str
    found: str
    advice: str | None = None

    def as_json(self) -> dict[str, str | None]:
        return asdict(self)


@dataclass(frozen=True)
class Submission:
    """A submission that has begun and whose outcome is not recorded: its key, and the run's place in an array."""

    run: RunFolder
    key: str
    index: int | None = None


class Scheduler(ABC):
    """Starts jobs and answers for those it started, from any later shell.

    A submission has a key that no other submission has. The scheduler keeps it with the job, so that the job can be
    found again when the answer to the submission was lost.
    """

    name: ClassVar[str]
    capabilities: ClassVar[Capabilities]

    @abstractmethod
    def script(self, job: Job) -> tuple[str, str]:
        """Return the file name and the text of the script that runs the job."""

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
        """Start the script in the run folder; return the job id. Raises UserError with the scheduler's own words."""

    def array_groups(self, jobs: Sequence[Job]) -> list[list[int]]:
        """Divide jobs, given by their positions, into groups that `submit_array` takes; singles go to `submit`."""
        return [[position] for position in range(len(jobs))]

    def submit_array(
        self, group: Sequence[tuple[RunFolder, Job]], key: str, folder: Path, max_running: int | None = None
    ) -> list[str]:
        """Start a group of runs as one array; return a job id for each run.

        A job id is the array's id, `_` and the run's position in the group. `folder` is that of their study, for files
        of the array; `max_running` limits how many of them run at the same time.
        """
        raise NotImplementedError(f"{self.name} has no job arrays")

    @abstractmethod
    def resume(self, run: RunFolder, key: str, exclude: Sequence[str] = ()) -> str:
        """Start the script in the run folder once more, without the nodes in `exclude`; return the job id."""

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
        found = {}
        for one in submissions:
            if one.key in jobs:
                task = "" if one.index is None else f"_{one.index}"
                found[one.run] = jobs[one.key] + task
        return found

    @abstractmethod
    def states(self, runs: Sequence[RunFolder]) -> list[JobState]:
        """Return the state of the newest job of each run."""

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
        """Return what would keep this job from starting here, asked without submitting anything.

        `loaded` is the job's recipe, for the places of its values; `environment` is the submitting shell's.
        """
        return ()

    def require(self) -> None:  # noqa: B027 (most need nothing)
        """Raise UserError (exit code 3) where nothing can be submitted from this machine. Called before any write."""

    def is_expected(self, profile: Cluster) -> bool:
        """Return whether this machine or the profile belongs to a cluster of this scheduler, up or down."""
        return False

    def answers(self, environment: Mapping[str, str]) -> bool:
        """Return whether jobs can be submitted from this machine now."""
        return True

    def uses_other_hosts(self, environment: Mapping[str, str]) -> bool:
        """Return whether jobs run on other hosts than this one, as far as the scheduler says."""
        return False

    def submit_script(self, script: Path, key: str, options: Sequence[str] = (), comment: str | None = None) -> str:
        """Submit a batch script that belongs to no run, under a key that `find` knows; return the job id.

        Raises UserError where the scheduler takes no such scripts, or does not accept this one.
        """
        message = f"the backend {self.name} takes no batch scripts"
        raise error("no-batch-scripts", message, None, "use a cluster with Slurm")

    def waiting_or_running(self, jobs: Sequence[str]) -> list[str]:
        """Return those of these jobs that have not ended. Raises UserError if the scheduler does not answer."""
        return []

    def array_limit(self) -> int:
        """Return the largest number of tasks of one array."""
        return 1

    def offers(self) -> SiteOffers:
        """Return what the user may choose on this cluster. Raises UserError (exit code 3) where there is none."""
        fix = "only schedulers of a cluster have partitions to choose from"
        raise error("no-partition", f"the scheduler '{self.name}' has no partitions", None, fix, MACHINE_LACKS)

    def refusal(self, options: Mapping[str, str]) -> str | None:
        """Return the scheduler's words against a job of one node with these options; None where it would take it."""
        return None

    def describe(self, cluster: Cluster, environment: Mapping[str, str]) -> Iterable[Finding]:
        """Return what the scheduler offers here, for `fp8launch doctor`."""
        return ()

    def container_runtimes(self, environment: Mapping[str, str]) -> Iterable[tuple[str, str]]:
        """Return the container runtimes that belong to the scheduler, each with where it comes from."""
        return ()

    def version(self) -> str | None:
        """Return the version of the scheduler's software; None where it has none."""
        return None

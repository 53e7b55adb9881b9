"""The state of runs: the scheduler's, their progress, and how they ended."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fp8launch import schedulers
from fp8launch.diagnostics import UserError
from fp8launch.injob.supervisor.failures import Failure
from fp8launch.report.progress import Progress, progress_of
from fp8launch.report.run_selection import tags_of
from fp8launch.rundir.attempts import attempts_of
from fp8launch.rundir.last_failure import last_failure
from fp8launch.rundir.registry import job_ids
from fp8launch.rundir.run_dir import RunFolder
from fp8launch.schedulers.base import JobState
from fp8launch.submit.resume import resumable_from
from fp8launch.submit.submission import recover_cut_off, without_job

# Characters of a failure's message in a listing. `parse` prints all of it.
MESSAGE = 90


@dataclass(frozen=True)
class RunStatus:
    """A run with its state and its progress."""

    run: RunFolder
    manifest: dict[str, Any]
    state: JobState
    progress: Progress

    @property
    def detail(self) -> str:
        """The reason why the run waits, its progress or its end, and from where it could continue. May be empty."""
        return detail_of(self.run, self.state, self.progress)

    def as_json(self) -> dict[str, Any]:
        failure = _failure(self.run, self.state)
        return {
            "run": self.run.run_id,
            "folder": str(self.run.path),
            "name": self.manifest.get("name"),
            "study": self.manifest.get("study"),
            "created": self.manifest.get("created"),
            "backend": self.manifest.get("backend"),
            "jobs": job_ids(self.run),
            "state": self.state.status,
            "detail": self.state.detail,
            "exit_code": self.state.exit_code,
            "source": self.state.source,
            "resumes_from": _resumable_from(self.run, self.state),
            "attempts": len(self.run.attempts()),
            "tags": tags_of(self.manifest),
            "title": self.manifest.get("title"),
            "note": self.manifest.get("note"),
            "survival": asdict(attempts_of(self.run)),
            "progress": self.progress.as_json(),
            "failure": failure and failure.as_json(),
        }


def run_statuses(runs: Sequence[RunFolder]) -> list[RunStatus]:
    """Return the status of runs, in their order."""
    statuses = []
    for run, state in zip(runs, run_states(runs), strict=True):
        manifest = run.manifest()
        statuses.append(RunStatus(run, manifest, state, progress_of(run, manifest, state)))
    return statuses


def run_states(runs: Sequence[RunFolder]) -> list[JobState]:
    """Return the states of runs of any schedulers. Each scheduler is asked once."""
    states: dict[RunFolder, JobState] = {}
    for name, members in by_scheduler(runs).items():
        try:
            scheduler = schedulers.by_name(name)
            recover_cut_off(members, scheduler)
            states.update(zip(members, scheduler.states(members), strict=True))
        except UserError as exc:
            states |= dict.fromkeys(members, JobState("unknown", str(exc)))
    for run in runs:
        if not job_ids(run):
            states[run] = without_job(run)
    return [states[run] for run in runs]


def by_scheduler(runs: Sequence[RunFolder]) -> dict[str, list[RunFolder]]:
    """Group runs by the name of their scheduler."""
    groups: dict[str, list[RunFolder]] = {}
    for run in runs:
        groups.setdefault(str(run.manifest().get("backend")), []).append(run)
    return groups


def detail_of(run: RunFolder, state: JobState, progress: Progress) -> str:
    """Return why a run waits, how it trains or how it ended, and from where it could continue. May be empty."""
    known = attempts_of(run)
    words = [state.reason, known.words]
    failure = _failure(run, state)
    if failure is not None and not known.stopped:
        words.append(f"{failure.code}: {textwrap.shorten(failure.message, MESSAGE, placeholder='...')}")
    words.append(progress.unhealthy)
    if iteration := _resumable_from(run, state):
        words.append(f"`fp8launch resume` continues from iteration {iteration}")
    return "; ".join(filter(None, words))


def _failure(run: RunFolder, state: JobState) -> Failure | None:
    if not state.final or state.status in ("completed", "cancelled"):
        return None
    return last_failure(run)


def _resumable_from(run: RunFolder, state: JobState) -> int | None:
    """Return the iteration from which `resume` could continue; None if the run continues or is complete."""
    if not state.final or state.status == "completed":
        return None
    return resumable_from(run)

"""Submitting a grid so that nothing is submitted twice and the same command completes what was cut short.

Every run folder is made before its job is submitted, and says by which submission (a key that the job carries as its
comment) it goes. A run with a submission and no job was cut off in between: Slurm is asked for the key first.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fp8launch.backends import slurm
from fp8launch.backends.base import Backend
from fp8launch.job.cluster import Cluster
from fp8launch.job.job import Job
from fp8launch.job.plan import submission_comment
from fp8launch.job.script import array_script
from fp8launch.problems import error
from fp8launch.runs.attempts import attempts_of, forbid_more
from fp8launch.runs.folder import MANIFEST, RunFolder, write_atomically
from fp8launch.runs.grid import Point, point_key, run_name, study_id
from fp8launch.runs.provenance import Origin
from fp8launch.runs.store import job_ids, remember_root
from fp8launch.runs.study import StudyFolder, create_study, locked
from fp8launch.runs.submit import Prepared, make_run, now, origin, plan_run, record_job

# Of a run that ended like this another attempt is worth its cost when the user asks for it.
RETRIED = frozenset(("failed", "cancelled", "timeout", "node_fail", "out_of_memory"))


@dataclass(frozen=True)
class GridPoint:
    """A point that is ready: prepared, checked, with its key."""

    point: Point
    prepared: Prepared
    checked: dict[str, Any] | None = None

    @property
    def key(self) -> str:
        return point_key(self.point, self.prepared)

    @property
    def run_name(self) -> str:
        return run_name(self.point, self.prepared.loaded.recipe.name, self.key)


@dataclass
class Outcome:
    """What a submission did: runs that got a job now, runs that had one, arrays that took several."""

    study: StudyFolder
    submitted: list[RunFolder] = field(default_factory=list)
    present: list[RunFolder] = field(default_factory=list)
    sbatch_calls: int = 0


def identify(points: Sequence[GridPoint], name: str | None) -> str:
    """The id of the study that these points make."""
    first = points[0].prepared.loaded.recipe.name
    return name or study_id(first, [p.key for p in points])


def submit_study(
    points: Sequence[GridPoint],
    cluster: Cluster,
    root: Path,
    backend: Backend,
    *,
    name: str | None = None,
    retry: bool = False,
    max_running: int | None = None,
    between: Callable[[RunFolder], object] | None = None,
    progress: Callable[[Sequence[GridPoint], str], Iterable[GridPoint]] = lambda items, _: items,
) -> Outcome:
    """Submit every point of a grid that has no job yet; with `retry` also those whose run failed.

    `between` is called after each submission: on this machine it waits for the run before the next one starts.
    """
    study = create_study(root, identify(points, name), _record(points))
    remember_root(root)
    outcome = Outcome(study)
    with locked(study):
        waiting = []
        origins: dict[str, Origin] = {}
        for one in progress(points, "making run folders"):
            run = study.run(one.run_name)
            job = plan_run(one.prepared, cluster, run.path, backend)
            if not (run.path / MANIFEST).is_file():
                place = {"name": study.study_id, "point": dict(one.point.values), "repeat": one.point.repeat}
                if one.point.recipe not in origins:
                    origins[one.point.recipe] = origin(one.prepared, backend)
                came_from = origins[one.point.recipe]
                run = make_run(one.prepared, cluster, job, backend, came_from, study=place, check=one.checked)
            waiting.append((run, job))
        _adopt([run for run, _ in waiting], backend)
        again = _failed([run for run, _ in waiting], backend) if retry else set()
        missing = [(run, job) for run, job in waiting if not job_ids(run) or run in again]
        outcome.present = [run for run, job in waiting if (run, job) not in missing]
        for group in _groups(missing, backend, cluster):
            if len(group) == 1:
                _submit_one(*group[0], backend)
            else:
                _submit_array(study, group, max_running)
            outcome.sbatch_calls += 1
            outcome.submitted += [run for run, _ in group]
            if between is not None:
                between(group[0][0])
    return outcome


def _record(points: Sequence[GridPoint]) -> dict[str, Any]:
    return {
        "format": 1,
        "created": now(),
        "command": sys.argv[1:],
        "points": [
            {
                "run": one.run_name,
                "key": one.key,
                "recipe": one.point.recipe,
                "nodes": one.prepared.loaded.recipe.resources.nodes,
                "values": dict(one.point.values),
                "repeat": one.point.repeat,
            }
            for one in points
        ],
    }


def _adopt(runs: Sequence[RunFolder], backend: Backend) -> None:
    """Give runs that were cut off between sbatch and its answer the job that they have."""
    open_ones: dict[str, list[tuple[RunFolder, int | None]]] = {}
    for run in runs:
        submission = run.manifest().get("submission")
        if submission and not submission.get("answered"):
            open_ones.setdefault(str(submission["key"]), []).append((run, submission.get("index")))
    if not open_ones:
        return
    found = {} if backend.name == "local" else slurm.find_jobs(list(open_ones))
    for key, members in open_ones.items():
        for run, index in members:
            job = found.get(key) or _job_that_logged(run, job_ids(run))
            if job is not None:
                _answered(run, job if index is None else f"{job}_{index}")


def _job_that_logged(run: RunFolder, known: Sequence[str]) -> str | None:
    """The job that began this run and was forgotten by Slurm since: its log bears its id."""
    new = [attempt.job_id for attempt in run.attempts() if attempt.job_id not in known]
    return new[-1].partition("_")[0] if new else None


def _failed(runs: Sequence[RunFolder], backend: Backend) -> set[RunFolder]:
    started = [run for run in runs if job_ids(run)]
    return {run for run, state in zip(started, backend.states(started), strict=True) if state.status in RETRIED}


Group = list[tuple[RunFolder, Job]]


def _groups(missing: Group, backend: Backend, cluster: Cluster) -> Iterator[Group]:
    """Runs that ask Slurm for the same become one array, as large as the site allows."""
    if backend.name != "sbatch" or not cluster.arrays or len(missing) < 2:
        yield from ([one] for one in missing)
        return
    alike: dict[tuple[tuple[str, str | None], ...], Group] = {}
    for run, job in missing:
        alike.setdefault(_asked(job), []).append((run, job))
    limit = slurm.array_limit()
    for group in alike.values():
        yield from (group[i : i + limit] for i in range(0, len(group), limit))


def _asked(job: Job) -> tuple[tuple[str, str | None], ...]:
    """What a job asks of Slurm, without what is each run's own."""
    return tuple((name, value) for name, value in job.slurm if name not in ("job-name", "output", "comment"))


def _submit_one(run: RunFolder, job: Job, backend: Backend) -> None:
    run.update(submission={"key": run.run_id, "answered": False})
    _answered(run, backend.submit(job, run))


def _submit_array(study: StudyFolder, group: Group, max_running: int | None) -> None:
    key = f"{study.study_id}.{len(list(study.path.glob('arrays/*.sbatch')))}"
    at_once = f"%{max_running}" if max_running else ""
    options = {
        "job-name": group[0][1].name,
        **dict(_asked(group[0][1])),
        "array": f"0-{len(group) - 1}{at_once}",
        "output": str(study.path / "logs" / "slurm-%A_%a.out"),
        "comment": submission_comment(key),
    }
    script, tasks = study.path / "arrays" / f"{key}.sbatch", study.path / "arrays" / f"{key}.txt"
    write_atomically(tasks, "".join(f"{run.path}\n" for run, _ in group))
    write_atomically(script, array_script(tuple(options.items()), str(tasks)))
    for index, (run, _) in enumerate(group):
        run.update(submission={"key": key, "index": index, "answered": False})
    job = slurm.sbatch(script, key)
    for index, (run, _) in enumerate(group):
        _answered(run, f"{job}_{index}")


def _answered(run: RunFolder, job: str) -> None:
    record_job(run, job, submission={**run.manifest().get("submission", {}), "answered": True})


def cancel_study(study: StudyFolder, backend: Backend) -> int:
    """End every job of a study; how many runs had one."""
    runs = [run for run in study.runs() if job_ids(run)]
    if backend.name == "local":
        for run in runs:
            backend.cancel(run)
    else:
        for run in runs:
            forbid_more(run)
        waiting = [job for run in runs if (job := attempts_of(run).waiting)]
        # An array is cancelled whole by its own id: one word for a thousand tasks.
        slurm.cancel(sorted({job.partition("_")[0] for run in runs for job in job_ids(run)} | {*waiting}))
    return len(runs)


def need_local_wait(points: Sequence[GridPoint], backend: Backend, wait: bool) -> None:
    """This machine runs one point at a time, which needs somebody to start the next."""
    if backend.name == "local" and len(points) > 1 and not wait:
        raise error("local-study", "a grid on this machine runs point by point", "--backend local", "add --wait")

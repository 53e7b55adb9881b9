"""Submitting a grid so that nothing is submitted twice and the same command completes what was cut short.

Every run folder is made before its job is submitted, and says by which submission (a key that the job carries as its
comment) it goes. A run with a submission and no job was cut off in between: Slurm is asked for the key first.
"""

from __future__ import annotations

import json
import re
import secrets
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
from fp8launch.problems import UserError, error
from fp8launch.runs.disk import uninterrupted
from fp8launch.runs.folder import MANIFEST, STUDY, RunFolder, write_atomically
from fp8launch.runs.grid import Point, point_key, run_name, study_id
from fp8launch.runs.provenance import Origin
from fp8launch.runs.store import job_ids, remember_root
from fp8launch.runs.study import StudyFolder, add_points, create_study, locked
from fp8launch.runs.submission import HELD_SECONDS, adopt, begin, now, record_job, refused, submit_job
from fp8launch.runs.submit import Prepared, make_run, origin, plan_run
from fp8launch.secrecy import refuse_secrets

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
    left_out: Sequence[tuple[Point, str]] = (),
    between: Callable[[RunFolder], object] | None = None,
    progress: Callable[[Sequence[GridPoint], str], Iterable[GridPoint]] = lambda items, _: items,
) -> Outcome:
    """Submit every point of a grid that has no job yet; with `retry` also those whose run failed.

    `left_out` are points that failed the check, with the reason: the study shows them and submits nothing of them.
    `between` is called after each submission: on this machine it waits for the run before the next one starts.
    """
    record = _record(points)
    refuse_secrets({STUDY: json.dumps(record)})
    study = create_study(root, identify(points, name), record)
    remember_root(root)
    outcome = Outcome(study)
    with locked(study, 0.0 if backend.name == "local" else HELD_SECONDS):
        add_points(study, record["points"], [_left_out(point, why) for point, why in left_out])
        there = [run for one in points if ((run := study.run(one.run_name)).path / MANIFEST).is_file()]
        adopt(there, backend)
        again = _failed(there, backend) if retry else set()
        origins: dict[str, Origin] = {}
        missing = []
        for one in progress(points, "making run folders"):
            run = study.run(one.run_name)
            if run in there and job_ids(run) and run not in again:
                outcome.present.append(run)
                continue
            job = plan_run(one.prepared, cluster, run.path, backend)
            if run not in again:
                place = {"name": study.study_id, "point": dict(one.point.values), "repeat": one.point.repeat}
                if one.point.recipe not in origins:
                    origins[one.point.recipe] = origin(one.prepared, backend)
                came_from, is_there = origins[one.point.recipe], run in there
                entries = {"study": place, "check": one.checked}
                # Nothing was submitted of one that is there: it is made anew, with what this command says.
                run = make_run(one.prepared, cluster, job, backend, came_from, replace=is_there, **entries)
            missing.append((run, job))
        for group in _groups(missing, backend, cluster):
            if len(group) == 1:
                submit_job(*group[0], backend)
            else:
                _submit_array(study, group, max_running)
            outcome.sbatch_calls += 1
            outcome.submitted += [run for run, _ in group]
            if between is not None:
                between(group[0][0])
    return outcome


def _left_out(point: Point, why: str) -> dict[str, Any]:
    label = re.sub(r"[^A-Za-z0-9_.=-]+", "_", point.label)
    entry = {"run": label, "recipe": point.recipe, "nodes": point.nodes, "values": dict(point.values)}
    return {**entry, "repeat": point.repeat, "why": why}


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


def _submit_array(study: StudyFolder, group: Group, max_running: int | None) -> None:
    # As for a single run, a key that no array before has, not even one of a study of this name that was removed.
    key = f"{study.study_id}.{len(list(study.path.glob('arrays/*.sbatch')))}-{secrets.token_hex(3)}"
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
    runs = [run for run, _ in group]
    with uninterrupted():
        begin(runs, key)
        try:
            job = slurm.sbatch(script, key)
        except UserError as exc:
            refused(runs, exc)
            raise
        for index, run in enumerate(runs):
            record_job(run, f"{job}_{index}")


def cancel_study(study: StudyFolder, backend: Backend) -> int:
    """End every job of a study; how many runs had one."""
    runs = [run for run in study.runs() if job_ids(run)]
    if backend.name == "local":
        for run in runs:
            backend.cancel(run)
    else:
        slurm.cancel_runs(runs)
    return len(runs)


def need_local_wait(points: Sequence[GridPoint], backend: Backend, wait: bool) -> None:
    """This machine runs one point at a time, which needs somebody to start the next."""
    if backend.name == "local" and len(points) > 1 and not wait:
        raise error("local-study", "a grid on this machine runs point by point", "--backend local", "add --wait")

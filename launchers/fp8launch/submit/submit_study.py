"""Submitting a grid so that nothing is submitted twice and the same command completes what was cut short.

Every run folder is made before its job is submitted, and records the key of its submission. A run with a submission and
no job was cut off in between: the scheduler is asked for the key first.
"""

from __future__ import annotations

import json
import re
import secrets
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fp8launch.cluster.profile import Cluster
from fp8launch.diagnostics import UserError, error
from fp8launch.job.job import Job
from fp8launch.job.prepared import Prepared
from fp8launch.rundir.atomic_io import uninterrupted
from fp8launch.rundir.registry import job_ids, need_mine, remember_root
from fp8launch.rundir.run_dir import MANIFEST, STUDY, RunFolder
from fp8launch.rundir.study import StudyFolder, add_points, create_study, locked
from fp8launch.rundir.trust import need_safe_root
from fp8launch.schedulers.base import SUBMIT_LIMIT, Scheduler
from fp8launch.secrets import refuse_secrets
from fp8launch.submit.grid import Point, point_key, run_name, study_id
from fp8launch.submit.provenance import Origin
from fp8launch.submit.submission import (
    HELD_SECONDS,
    now,
    record_begin,
    record_job,
    record_refusal,
    recover_jobs,
    submit_job,
)
from fp8launch.submit.submit import make_run, origin, plan_run
from fp8launch.wording import counted

# Of a run that ended like this another attempt is worth its cost when the user asks for it.
RETRIED = frozenset(("failed", "cancelled", "timeout", "node_fail", "out_of_memory", "interrupted"))


@dataclass(frozen=True)
class GridPoint:
    """A point that is ready: prepared and checked; `job` is the one that was checked."""

    point: Point
    prepared: Prepared
    checked: dict[str, Any] | None = None
    job: Job | None = None

    @property
    def key(self) -> str:
        return point_key(self.point, self.prepared)

    @property
    def run_name(self) -> str:
        return run_name(self.point, self.prepared.loaded.recipe.name, self.key)


@dataclass
class Outcome:
    """The result of a submission: the runs that got a job now, those that already had one, and the number of calls."""

    study: StudyFolder
    submitted: list[RunFolder] = field(default_factory=list)
    present: list[RunFolder] = field(default_factory=list)
    calls: int = 0


def identify(points: Sequence[GridPoint], name: str | None) -> str:
    """Return the id of the study that these points make."""
    first = points[0].prepared.loaded.recipe.name
    return name or study_id(first, [p.key for p in points])


def submit_study(
    points: Sequence[GridPoint],
    cluster: Cluster,
    root: Path,
    scheduler: Scheduler,
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
    `between` is called after each submission to a scheduler that runs one at a time: it waits for the run to end.
    """
    record = _record(points)
    refuse_secrets({STUDY: json.dumps(record)})
    need_safe_root(root, cluster.trust_run_root)
    study = create_study(root, identify(points, name), record)
    remember_root(root)
    outcome = Outcome(study)
    # A study whose runs are waited for is held for hours: no use waiting for that.
    patience = HELD_SECONDS
    if scheduler.capabilities.one_run_at_a_time:
        patience = 0.0
    with locked(study, patience):
        add_points(study, record["points"], [_left_out(point, why) for point, why in left_out])
        planned = [study.run(one.run_name) for one in points]
        there = [run for run in planned if (run.path / MANIFEST).is_file()]
        need_mine(*there)
        recover_jobs(there, scheduler)
        again: set[RunFolder] = set()
        if retry:
            again = _failed(there, scheduler)
        folders = _RunFolders(study, cluster, scheduler, set(there), again)
        missing = []
        for one in progress(points, "making run folders"):
            run = study.run(one.run_name)
            if run in there and job_ids(run) and run not in again:
                outcome.present.append(run)
            else:
                missing.append(folders.make(one, run))
        try:
            for group in _groups(missing, scheduler, cluster):
                for part in _submit_group(study, group, scheduler, max_running):
                    outcome.calls += 1
                    outcome.submitted += [run for run, _ in part]
                    if between is not None:
                        between(part[0][0])
        except UserError as exc:
            count = f"{len(outcome.submitted)} of {counted(len(missing), 'run')} submitted"
            raise UserError(
                [replace(one, message=f"{one.message} ({count})") for one in exc.problems], exc.exit_code
            ) from None
    return outcome


class _RunFolders:
    """Makes the run folders of a study's points. Points of one recipe share the record of where it came from."""

    def __init__(
        self, study: StudyFolder, cluster: Cluster, scheduler: Scheduler, there: set[RunFolder], again: set[RunFolder]
    ) -> None:
        self.study, self.cluster, self.scheduler = study, cluster, scheduler
        self.there, self.again = there, again
        self._origins: dict[str, Origin] = {}

    def make(self, one: GridPoint, run: RunFolder) -> tuple[RunFolder, Job]:
        job = plan_run(one.prepared, self.cluster, run.path, self.scheduler, one.job)
        if run in self.again:
            return run, job
        place = {"name": self.study.study_id, "point": dict(one.point.values), "repeat": one.point.repeat}
        if one.point.recipe not in self._origins:
            self._origins[one.point.recipe] = origin(one.prepared, self.scheduler)
        came_from = self._origins[one.point.recipe]
        entries = {"study": place, "check": one.checked}
        # Nothing was submitted of one that already exists: it is made anew, with what this command says.
        is_there = run in self.there
        made = make_run(one.prepared, self.cluster, job, self.scheduler, came_from, replace=is_there, **entries)
        return made, job


def _left_out(point: Point, why: str) -> dict[str, Any]:
    label = re.sub(r"[^A-Za-z0-9_.=-]+", "_", point.label)
    entry = {"run": label, "recipe": point.recipe, "nodes": point.nodes, "values": dict(point.values)}
    return {**entry, "repeat": point.repeat, "why": why}


def _record(points: Sequence[GridPoint]) -> dict[str, Any]:
    return {"format": 1, "created": now(), "command": sys.argv[1:], "points": list(map(_planned_point, points))}


def _planned_point(one: GridPoint) -> dict[str, Any]:
    return {
        "run": one.run_name,
        "key": one.key,
        "recipe": one.point.recipe,
        "nodes": one.prepared.loaded.recipe.resources.nodes,
        "values": dict(one.point.values),
        "repeat": one.point.repeat,
    }


def _failed(runs: Sequence[RunFolder], scheduler: Scheduler) -> set[RunFolder]:
    started = list(filter(job_ids, runs))
    found = set()
    for run, state in zip(started, scheduler.states(started), strict=True):
        if state.status in RETRIED or state.dropped:
            found.add(run)
    return found


Group = list[tuple[RunFolder, Job]]


def _groups(missing: Group, scheduler: Scheduler, cluster: Cluster) -> Iterator[Group]:
    """Divide runs into those that are submitted together."""
    if not (scheduler.capabilities.arrays and cluster.arrays):
        yield from ([one] for one in missing)
        return
    for positions in scheduler.array_groups([job for _, job in missing]):
        yield [missing[position] for position in positions]


def _submit_group(study: StudyFolder, group: Group, scheduler: Scheduler, max_running: int | None) -> Iterator[Group]:
    """Submit runs as one array, or in halves while the array exceeds the user's limit of jobs; yield each part."""
    if len(group) == 1:
        submit_job(*group[0], scheduler)
        yield group
        return
    try:
        _submit_array(study, group, scheduler, max_running)
    except UserError as exc:
        if exc.problems[0].code != SUBMIT_LIMIT:
            raise
        half = len(group) // 2
        yield from _submit_group(study, group[:half], scheduler, max_running)
        yield from _submit_group(study, group[half:], scheduler, max_running)
    else:
        yield group


def _submit_array(study: StudyFolder, group: Group, scheduler: Scheduler, max_running: int | None) -> None:
    # As for a single run, a key that no array before has, not even one of a study of this name that was removed.
    key = f"{study.study_id}.{len(list(study.path.glob('arrays/*.sbatch')))}-{secrets.token_hex(3)}"
    runs = [run for run, _ in group]
    with uninterrupted():
        record_begin(runs, key)
        try:
            jobs = scheduler.submit_array(group, key, study.path, max_running)
        except UserError as exc:
            record_refusal(runs, exc)
            raise
        for run, job in zip(runs, jobs, strict=True):
            record_job(run, job)


def require_wait(points: Sequence[GridPoint], scheduler: Scheduler, wait: bool) -> None:
    """Refuse a grid that nobody would continue: where runs go one at a time, this command starts the next one."""
    if scheduler.capabilities.one_run_at_a_time and len(points) > 1 and not wait:
        message = (
            f"the {scheduler.name} backend starts the points of a grid one after the other, so this command must "
            "keep running"
        )
        raise error(f"{scheduler.name}-study", message, f"--backend {scheduler.name}", "add --wait")

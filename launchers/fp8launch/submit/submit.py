"""Submit runs so that nothing is submitted twice and repeating an interrupted command completes it.

A single run takes the same path as the runs of a study. Every run folder is created before its job is submitted, and
its manifest has the key of the submission. If there is a key but no job, the submission was interrupted: the scheduler
is queried for the key before anything is submitted again.
"""

from __future__ import annotations

import json
import re
import secrets
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fp8launch.cluster.profile import Cluster
from fp8launch.diagnostics import UserError, error
from fp8launch.injob.supervisor.run_records import new_submission, now
from fp8launch.job.job import Job
from fp8launch.job.prepared import Prepared
from fp8launch.rundir.atomic_io import Busy, held
from fp8launch.rundir.registry import job_ids, need_mine, remember_root
from fp8launch.rundir.run_dir import MANIFEST, STUDY, RunFolder
from fp8launch.rundir.study import StudyFolder, add_points, create_study, locked
from fp8launch.rundir.trust import need_safe_root
from fp8launch.schedulers.base import FINAL, SUBMIT_LIMIT, Scheduler
from fp8launch.secrets import refuse_secrets
from fp8launch.submit.grid import Point, point_key, run_name, study_id
from fp8launch.submit.new_run import Origin, make_run, new_run_id, origin, plan_run
from fp8launch.submit.submission import (
    HELD_SECONDS,
    find_cut_off,
    next_key,
    recover_jobs,
    submit_held,
    submit_under,
)
from fp8launch.wording import counted

# The states of runs that `--retry-failed` resubmits.
RETRIED = FINAL - {"completed"}


@dataclass(frozen=True)
class GridPoint:
    """A prepared and checked run. `job` is the job that was checked. `name` is the run's id, by default automatic."""

    point: Point
    prepared: Prepared
    checked: dict[str, Any] | None = None
    job: Job | None = None
    name: str | None = None

    @property
    def key(self) -> str:
        return point_key(self.point, self.prepared)

    @property
    def run_name(self) -> str:
        return self.name or run_name(self.point, self.prepared.loaded.recipe.name, self.key)

    def as_json(self) -> dict[str, Any]:
        need = self.prepared.loaded.recipe.resources
        return {
            "run": self.run_name,
            "point": self.point.label,
            "nodes": need.nodes,
            "gpus_per_node": need.gpus_per_node,
            "gpu": need.gpu,
            "global_batch": self.prepared.layout.global_batch,
            "time": need.time,
            "gpu_hours": self.prepared.gpu_hours_at_most,
        }


def single(prepared: Prepared, checked: dict[str, Any] | None = None, job: Job | None = None) -> GridPoint:
    """Return a single run that is not part of a grid."""
    return GridPoint(Point(prepared.loaded.recipe.name, None), prepared, checked, job)


@dataclass
class Outcome:
    """The result of a submission: new runs, runs that already had a job, and the number of scheduler calls."""

    study: StudyFolder
    submitted: list[RunFolder] = field(default_factory=list)
    present: list[RunFolder] = field(default_factory=list)
    calls: int = 0


def identify(points: Sequence[GridPoint], name: str | None) -> str:
    """Return the id of the study that these points form."""
    first = points[0].prepared.loaded.recipe.name
    return name or study_id(first, [p.key for p in points])


def submit_run(one: GridPoint, cluster: Cluster, root: Path, scheduler: Scheduler) -> RunFolder:
    """Submit a single run, or complete an interrupted submission of the same run.

    If the scheduler refuses, the run folder is kept, because the error refers to it.
    """
    need_safe_root(root, cluster.trust_run_root)
    name = one.prepared.loaded.recipe.name
    cut_off = find_cut_off(root, name, one.key, scheduler)
    run = cut_off or RunFolder(root / new_run_id(name))
    entries = {"check": one.checked, "content": one.key, "submission": new_submission(run.run_id)}
    batch = _Batch(cluster, scheduler, lambda _: entries)
    try:
        with held(run.path, HELD_SECONDS) if cut_off else nullcontext():
            missing = batch.make_folders([(one, run)])
        remember_root(root)
        if missing:
            with held(run.path, HELD_SECONDS):
                for _ in batch.submit(missing):
                    pass
    except Busy:
        message = f"another launcher is submitting {run.run_id}"
        raise error("run-busy", message, str(run.path), "retry in a minute", 3) from None
    return run


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
    kind: str | None = None,
    progress: Callable[[Sequence[GridPoint], str], Iterable[GridPoint]] = lambda items, _: items,
) -> Outcome:
    """Submit every point of a grid that has no job yet, and with `retry`, also points whose run failed.

    `left_out` has points that failed the check, with the reason. The study lists them but does not submit them. If the
    scheduler runs one job at a time, `between` is called after each submission to wait for the run to end. Points of a
    `kind` of recipe form a sequence: each run waits until the run before it is complete.
    """
    record = _record(points)
    if kind is not None:
        record["kind"] = kind
    refuse_secrets({STUDY: json.dumps(record)})
    need_safe_root(root, cluster.trust_run_root)
    study = create_study(root, identify(points, name), record)
    remember_root(root)
    outcome = Outcome(study)
    # If runs go one at a time, another launcher may hold the study's lock for hours, so do not wait for it.
    patience = 0.0 if scheduler.capabilities.one_run_at_a_time else HELD_SECONDS
    wanted = [(one, study.run(one.run_name)) for one in points]
    names = [one.run_name for one in points]

    def entries(one: GridPoint) -> dict[str, Any]:
        place = {"name": study.study_id, "point": dict(one.point.values), "repeat": one.point.repeat}
        if kind is not None and one.run_name != names[0]:
            place["after"] = names[names.index(one.run_name) - 1]
        return {"study": place, "check": one.checked}

    batch = _Batch(cluster, scheduler, entries, study, retry, max_running, in_sequence=kind is not None)
    with locked(study, patience):
        if kind is not None and _keys(study.record()) != _keys(record):
            fix = "choose another --study, or leave it out"
            raise error("study-differs", "the study has other runs than this recipe", str(study.path), fix)
        if kind is not None and (wanted[0][1].path / MANIFEST).is_file() and job_ids(wanted[0][1]):
            outcome.present += [run for _, run in wanted]  # it was submitted last
            return outcome
        add_points(study, record["points"], [_left_out(point, why) for point, why in left_out])
        missing = batch.make_folders(wanted, progress)
        without_job = {run for run, _ in missing}
        outcome.present += [run for _, run in wanted if run not in without_job]
        try:
            for part in batch.submit(missing):
                outcome.calls += 1
                outcome.submitted += [run for run, _ in part]
                if between is not None:
                    between(part[0][0])
        except UserError as exc:
            count = f"{len(outcome.submitted)} of {counted(len(missing), 'run')} submitted"
            problems = [replace(one, message=f"{one.message} ({count})") for one in exc.problems]
            raise UserError(problems, exc.exit_code) from None
    return outcome


Group = list[tuple[RunFolder, Job]]


@dataclass
class _Batch:
    """Runs that are submitted together. The caller must hold the lock of the runs or their study.

    `entries` returns additional entries for the manifest of a new run. `study` is None for a single run.
    """

    cluster: Cluster
    scheduler: Scheduler
    entries: Callable[[GridPoint], dict[str, Any]]
    study: StudyFolder | None = None
    retry: bool = False
    max_running: int | None = None
    in_sequence: bool = False
    # All points of a recipe come from the same code, so read it once.
    origins: dict[str, Origin] = field(default_factory=dict)

    def make_folders(
        self,
        wanted: Sequence[tuple[GridPoint, RunFolder]],
        progress: Callable[[Sequence[GridPoint], str], Iterable[GridPoint]] = lambda items, _: items,
    ) -> Group:
        """Create the folders of runs that have no job yet, and return these runs with their planned jobs."""
        there = {run: None for _, run in wanted if (run.path / MANIFEST).is_file()}
        need_mine(*there)
        recover_jobs(list(there), self.scheduler)
        again = _failed(list(there), self.scheduler) if self.retry else set()
        missing: Group = []
        shown = progress([one for one, _ in wanted], "making run folders")
        for one, (_, run) in zip(shown, wanted, strict=True):
            if run in there and job_ids(run) and run not in again:
                continue
            job = plan_run(one.prepared, self.cluster, run.path, self.scheduler, one.job)
            if run not in again:
                # A run folder without a job is created again, so that it matches this command.
                self._make_folder(one, job, replace=run in there)
            missing.append((run, job))
        return missing

    def _make_folder(self, one: GridPoint, job: Job, replace: bool) -> None:
        recipe = one.point.recipe
        if recipe not in self.origins:
            self.origins[recipe] = origin(one.prepared, self.scheduler)
        entries = self.entries(one)
        make_run(one.prepared, self.cluster, job, self.scheduler, self.origins[recipe], replace, **entries)

    def submit(self, missing: Group) -> Iterator[Group]:
        """Submit runs, and yield the runs of each scheduler call."""
        if self.in_sequence:
            yield from self._submit_sequence(missing)
            return
        groups = [[one] for one in missing]
        if len(missing) > 1 and self.scheduler.capabilities.arrays and self.cluster.arrays:
            positions = self.scheduler.array_groups([job for _, job in missing])
            groups = [[missing[position] for position in members] for members in positions]
        for group in groups:
            yield from self._submit_group(group)

    def _submit_sequence(self, missing: Group) -> Iterator[Group]:
        """Submit runs, the last one first: each is in the queue before the run that it waits for can end.

        If the scheduler cannot hold jobs, the end of each run starts the next one.
        """
        assert self.study is not None
        first = self.study.runs()[0]
        for run, job in reversed(missing):
            if run == first:
                yield from self._submit_group([(run, job)])
            elif self.scheduler.capabilities.holds:
                submit_held(run, self.scheduler)
                yield [(run, job)]

    def _submit_group(self, group: Group) -> Iterator[Group]:
        """Submit runs as one array. Halve the array while it exceeds the user's job limit."""
        if len(group) == 1 or self.study is None:
            ((run, job),) = group
            key = next_key(run)
            submit_under(key, [run], lambda: [self.scheduler.submit(job, run, key)])
            yield group
            return
        folder = self.study.path
        # As for a single run, no earlier array may have this key, not even one of a deleted study with the same name.
        key = f"{self.study.study_id}.{len(list(folder.glob('arrays/*.txt')))}-{secrets.token_hex(3)}"
        runs = [run for run, _ in group]
        try:
            submit_under(key, runs, lambda: self.scheduler.submit_array(group, key, folder, self.max_running))
        except UserError as exc:
            if exc.problems[0].code != SUBMIT_LIMIT:
                raise
            half = len(group) // 2
            yield from self._submit_group(group[:half])
            yield from self._submit_group(group[half:])
        else:
            yield group


def _keys(record: Mapping[str, Any]) -> list[tuple[str, str | None]]:
    return [(point["run"], point.get("key")) for point in record["points"]]


def _record(points: Sequence[GridPoint]) -> dict[str, Any]:
    """Return the content of a new `study.json`."""
    planned = [
        {
            "run": one.run_name,
            "key": one.key,
            "recipe": one.point.recipe,
            "nodes": one.prepared.loaded.recipe.resources.nodes,
            "values": dict(one.point.values),
            "repeat": one.point.repeat,
        }
        for one in points
    ]
    return {"format": 1, "created": now(), "command": sys.argv[1:], "points": planned}


def _left_out(point: Point, why: str) -> dict[str, Any]:
    label = re.sub(r"[^A-Za-z0-9_.=-]+", "_", point.label)
    entry = {"run": label, "recipe": point.recipe, "nodes": point.nodes, "values": dict(point.values)}
    return {**entry, "repeat": point.repeat, "why": why}


def _failed(runs: Sequence[RunFolder], scheduler: Scheduler) -> set[RunFolder]:
    """Return the runs that `--retry-failed` resubmits."""
    started = [run for run in runs if job_ids(run)]
    states = zip(started, scheduler.states(started), strict=True)
    return {run for run, state in states if state.status in RETRIED or state.dropped}


def require_wait(points: Sequence[GridPoint], scheduler: Scheduler, wait: bool, kind: str | None = None) -> None:
    """Require `--wait` if runs go one at a time, because only this command would start the next run.

    In a sequence, each run starts the next one. Raises UserError if the scheduler cannot do that.
    """
    if kind is not None:
        if not (scheduler.capabilities.holds or scheduler.capabilities.one_run_at_a_time):
            message = f"the {scheduler.name} backend cannot hold jobs, so it cannot run `{kind}`"
            raise error(f"{scheduler.name}-{kind}", message, f"--backend {scheduler.name}", "use --backend sbatch")
        return
    if scheduler.capabilities.one_run_at_a_time and len(points) > 1 and not wait:
        message = (
            f"the {scheduler.name} backend runs the points of a grid one at a time, so this command must keep running"
        )
        raise error(f"{scheduler.name}-study", message, f"--backend {scheduler.name}", "add --wait")

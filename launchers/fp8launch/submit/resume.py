"""Resume a stopped run: same folder, same script, from the newest complete checkpoint."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fp8launch.diagnostics import ANSWER_IS_NO, UserError, error
from fp8launch.injob.supervisor import checkpoints
from fp8launch.injob.supervisor.attempt_log import CANCELLED
from fp8launch.injob.supervisor.run_records import read_json
from fp8launch.rundir.atomic_io import uninterrupted
from fp8launch.rundir.attempts import (
    SURVIVE,
    allow_more,
    attempts_of,
    forbid_more,
    read_attempt_log,
    write_attempt_log,
)
from fp8launch.rundir.registry import job_ids
from fp8launch.rundir.run_dir import RunFolder, write_atomically
from fp8launch.schedulers.base import JobState, Scheduler
from fp8launch.submit.submission import record_job
from fp8launch.untyped import as_mapping


def resume(
    run: RunFolder, scheduler: Scheduler, attempts: int = 1, report: Callable[[str], None] = lambda words: None
) -> tuple[str, int]:
    """Allow `attempts` more attempts and submit the first. Return its job id and the iteration that it starts from.

    `report` receives progress messages for the user. Raises UserError if the run has not ended, is complete, or has no
    checkpoints.
    """
    state = scheduler.state(run)
    _refuse(run, scheduler, state)
    plan = _plan(run)
    start = _repaired_start(run, plan)
    if _reaches_end(start, plan):
        message = f"{run.run_id} has completed its {plan['iterations']} iterations"
        fix = "to train further, submit a new recipe with checkpoint.load"
        raise error("run-done", message, None, fix, ANSWER_IS_NO)
    before, was_cancelled = read_attempt_log(run), (run.path / CANCELLED).exists()
    # Each resume has its own key, so that repeating an interrupted command finds the job it submitted.
    key, lost = _key_and_job(run, scheduler, f"{run.run_id}.r{len(before.get('attempts', []))}")
    # Write the log first, because the job may start before sbatch returns.
    write_attempt_log(run, _reopened(before, state, start))
    write_atomically(run.path / SURVIVE, json.dumps({**plan, "attempts": attempts}, indent=1) + "\n")
    allow_more(run)
    try:
        with uninterrupted():
            job = lost or _submit(run, scheduler, key, report)
            record_job(run, job)
    except UserError as problem:
        if not _is_refusal(problem):
            raise  # Slurm may have accepted the job anyway
        # There will be no attempt, so restore the recorded reason why the run stopped.
        write_attempt_log(run, before)
        write_atomically(run.path / SURVIVE, json.dumps(plan, indent=1) + "\n")
        if was_cancelled:
            forbid_more(run)
        raise
    return job, start


def _key_and_job(run: RunFolder, scheduler: Scheduler, first: str) -> tuple[str, str | None]:
    """Return a key for the next submission, and the job that an interrupted command already submitted under it.

    Keys of recorded jobs are skipped. Such a job ended without starting an attempt, or this key would not come up.
    """
    known = job_ids(run)
    key, number = first, 0
    while (job := scheduler.find([key]).get(key)) in known:
        number += 1
        key = f"{first}-{number:x}"
    return key, job


def _is_refusal(problem: UserError) -> bool:
    return any(one.code.endswith("-refused") for one in problem.problems)


def _reopened(before: dict[str, Any], state: JobState, start: int) -> dict[str, Any]:
    """Return the attempt log, changed so that another attempt may start."""
    attempts = [dict(attempt) for attempt in before.get("attempts", [])]
    for attempt in attempts:
        if "ended" not in attempt:
            # The last attempt ended without a record, and no later attempt could have written one.
            attempt.update(
                ended=time.time(), after=start, cause="interrupted", counts=True, then=f"{state.status}: resumed"
            )
    return {
        **before,
        "attempts": attempts,
        "stopped": None,
        "owner": None,
        "waiting": None,
        "finished": bool(before.get("finished")),
        "excluded": before.get("excluded", []),
        # Count from here: earlier attempts were charged to the earlier limit.
        "from": len(attempts),
    }


def _submit(run: RunFolder, scheduler: Scheduler, key: str, report: Callable[[str], None]) -> str:
    """Submit the next attempt without the failed nodes, or with them if too few others are left."""
    log = read_attempt_log(run)
    excluded = log["excluded"]
    try:
        return scheduler.resume(run, key, excluded)
    except UserError as problem:
        if not (excluded and _is_refusal(problem) and scheduler.is_impossible(problem)):
            raise
    report(f"{', '.join(excluded)} may be used again, because too few other nodes are left")
    write_attempt_log(run, {**log, "excluded": []})
    return scheduler.resume(run, key)


def resumable_from(run: RunFolder) -> int | None:
    """Return the iteration of the checkpoint from which another attempt would continue, or None."""
    if not (run.path / SURVIVE).is_file() or attempts_of(run).finished:
        return None
    try:
        plan = _plan(run)
        start = checkpoints.latest(Path(plan["checkpoint"]))
    except (UserError, OSError):
        return None
    if _reaches_end(start, plan) or start == 0:
        return None
    return start


def close_trained(run: RunFolder) -> bool:
    """Mark a stopped run as finished if it has saved its last iteration. Return whether it has.

    A job that is killed after that checkpoint, for example during the last evaluation, cannot do this itself.
    """
    plan = _plan(run)
    if not _reaches_end(_repaired_start(run, plan), plan):
        return False
    write_attempt_log(run, {**read_attempt_log(run), "finished": True})
    return True


def _repaired_start(run: RunFolder, plan: dict[str, Any]) -> int:
    """Repair the checkpoint folder, and return the iteration of its newest checkpoint, 0 without one."""
    folder = Path(plan["checkpoint"])
    for words in checkpoints.repair(folder):
        run.update(repaired=words)
    return checkpoints.latest(folder)


def _reaches_end(start: int, plan: dict[str, Any]) -> bool:
    return plan["iterations"] is not None and start >= int(plan["iterations"])


def _plan(run: RunFolder) -> dict[str, Any]:
    """Read `survive.json`. Raises UserError if the content cannot come from a submission."""
    file = run.path / SURVIVE
    fix = f"continue from its checkpoints in a new run: fp8launch submit {run.run_id} --set checkpoint.load=FOLDER"
    try:
        plan = read_json(file)
    except (OSError, ValueError) as exc:
        raise error("bad-survive", f"cannot be read: {exc}", str(file), fix) from None
    found = as_mapping(plan)
    iterations = found.get("iterations")
    if not isinstance(found.get("checkpoint"), str) or not (iterations is None or isinstance(iterations, int)):
        raise error("bad-survive", "does not contain the plan of a run", str(file), fix)
    # Both None and a missing key mean that the run has no last iteration.
    return {"iterations": None, **found}


def _refuse(run: RunFolder, scheduler: Scheduler, state: JobState) -> None:
    """Raise UserError unless the run has ended, is incomplete, and saves checkpoints."""
    known = attempts_of(run)
    if run.is_plain_job:
        message = f"{run.run_id} was started by a portable script, which does not record how to continue"
        fix = (
            "submit that script again with --load and its checkpoint folder; runs started by `fp8launch submit` can be "
            "resumed"
        )
        raise error("plain-sbatch", message, "resume", fix, ANSWER_IS_NO)
    if not scheduler.capabilities.resumes:
        message = f"the {scheduler.name} backend starts each run only once"
        raise error(f"{scheduler.name}-resume", message, fix="submit the run to Slurm", exit_code=2)
    if not (run.path / SURVIVE).is_file():
        message = f"{run.run_id} writes no checkpoints to continue from"
        fix = "submit it with checkpoint.dir and checkpoint.interval"
        raise error("no-checkpoints", message, "checkpoint", fix, ANSWER_IS_NO)
    if state.status == "unknown":
        message = f"cannot determine whether {run.run_id} is still running: {state.detail}"
        raise error("state-unknown", message, None, "retry when the scheduler answers", 3)
    if not state.final or (known.waiting and state.status != "interrupted"):
        fix = "it continues automatically; `fp8launch cancel` ends it"
        raise error("still-running", f"{run.run_id} is {state.status}", None, fix, ANSWER_IS_NO)
    if known.finished:
        raise error("run-done", f"{run.run_id} has finished its training", exit_code=ANSWER_IS_NO)

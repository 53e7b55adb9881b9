"""The stages of a recipe after their submission: which one is under way, and how the sequence continues."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fp8launch import schedulers
from fp8launch.diagnostics import ANSWER_IS_NO, error
from fp8launch.rundir.atomic_io import held
from fp8launch.rundir.attempts import SURVIVE, allow_more, attempts_of
from fp8launch.rundir.registry import job_ids, need_mine
from fp8launch.rundir.run_dir import RunFolder
from fp8launch.rundir.study import StudyFolder
from fp8launch.schedulers.base import JobState, Scheduler
from fp8launch.submit.resume import close_trained
from fp8launch.submit.resume import resume as resume_run
from fp8launch.submit.submission import HELD_SECONDS, next_key, recover_jobs, submit_held, submit_under


def is_complete(run: RunFolder, state: JobState) -> bool:
    """Return whether a stage has done its work, so that the next one may start."""
    if (run.path / SURVIVE).is_file():
        return attempts_of(run).finished
    return state.status == "completed"


def position(runs: Sequence[RunFolder], states: Sequence[JobState]) -> tuple[RunFolder, str]:
    """Return the run of the stage that is under way or has stopped, or of the last one, and where it is."""
    at = _current(runs, states)
    name = runs[at].run_id.rpartition("-")[0]
    return runs[at], f"stage {at + 1} of {len(runs)} ({name})"


def _current(runs: Sequence[RunFolder], states: Sequence[JobState]) -> int:
    """Return the position of the first stage that is not complete, or of the last stage."""
    open_stages = (i for i, (run, state) in enumerate(zip(runs, states, strict=True)) if not is_complete(run, state))
    return next(open_stages, len(runs) - 1)


def resume(study: StudyFolder, attempts: int, say: Callable[[str], None]) -> RunFolder:
    """Continue the first stage that is not complete, and have the later ones wait for it. Return its run.

    The caller must hold the study's lock. Raises UserError if all stages are complete, one is running, or the
    scheduler does not answer.
    """
    runs = study.runs()
    need_mine(*runs)
    if missing := study.missing():
        message = f"{', '.join(missing)} was never submitted"
        raise error("stages-incomplete", message, str(study.path), "repeat the submit command", ANSWER_IS_NO)
    scheduler = schedulers.of_run(runs[0])
    recover_jobs(runs, scheduler)
    states = scheduler.states(runs)
    at = _current(runs, states)
    if states[at].final and (runs[at].path / SURVIVE).is_file() and close_trained(runs[at]):
        say(f"{runs[at].run_id} had already saved its last iteration")
        at = _current(runs, states)
    run, state = runs[at], states[at]
    if is_complete(run, state):
        raise error("run-done", f"all {len(runs)} stages of {study.study_id} are complete", None, None, ANSWER_IS_NO)
    if state.status == "unknown" and job_ids(run) and not state.dropped:
        message = f"cannot determine whether {run.run_id} is still running: {state.detail}"
        raise error("state-unknown", message, None, "retry when the scheduler answers", 3)
    if scheduler.capabilities.holds:
        # The last one first, as at the submission: each is in the queue before the run that it waits for can end.
        for later, its_state in reversed(list(zip(runs[at + 1 :], states[at + 1 :], strict=True))):
            if its_state.final or its_state.dropped or not job_ids(later):
                allow_more(later)
                submit_held(later, scheduler)
                say(f"{later.run_id} waits as job {job_ids(later)[-1]}")
    began = bool(run.attempts())
    if state.final and began and (run.path / SURVIVE).is_file():
        job, start = resume_run(run, scheduler, attempts, report=say)
        say(f"{run.run_id} continues from iteration {start} as job {job}")
    elif state.final or state.dropped or not job_ids(run):
        allow_more(run)
        _start(run, scheduler, len(job_ids(run)))
        say(f"{run.run_id} starts{' again' if began else ''} as job {job_ids(run)[-1]}")
    elif state.status == "pending" and at > 0 and scheduler.release(run):
        say(f"{run.run_id} is released as job {job_ids(run)[-1]}")
    else:
        message = f"{run.run_id} is {state}"
        fix = "it continues automatically; `fp8launch cancel` ends it"
        raise error("still-running", message, None, fix, ANSWER_IS_NO)
    return run


def _start(run: RunFolder, scheduler: Scheduler, jobs: int) -> None:
    """Submit the script of a run with this number of jobs, unless the end of the stage before it does so just now."""
    key = next_key(run)
    with held(run.path, HELD_SECONDS):
        if len(job_ids(run)) == jobs:
            submit_under(key, [run], lambda: [scheduler.resume(run, key)])

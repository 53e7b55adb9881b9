"""A further attempt at a run that has stopped: the same folder, the same script, from the newest whole checkpoint."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from fp8launch.backends import slurm
from fp8launch.backends.base import JobState
from fp8launch.problems import ANSWER_IS_NO, error
from fp8launch.runs.attempts import SURVIVE, allow_more, attempts_of, read_record, write_record
from fp8launch.runs.disk import read_json, uninterrupted
from fp8launch.runs.folder import RunFolder, write_atomically
from fp8launch.runs.submit import record_job
from fp8launch.train import saved


def resume(run: RunFolder, state: JobState, attempts: int = 1) -> tuple[str, int]:
    """Submit another attempt, which may become `attempts` of them; the job id and the iteration that it starts from.

    `state` is the run's state now. Raises UserError for a run that is not over, is done, or leaves no checkpoints.
    """
    _refuse(run, state)
    plan = _plan(run)
    folder = Path(plan["checkpoint"])
    for words in saved.repair(folder):
        run.update(repaired=words)
    start = saved.latest(folder)
    if plan["iterations"] is not None and start >= plan["iterations"]:
        raise error(
            "run-done", f"{run.run_id} has done its {plan['iterations']} iterations", exit_code=ANSWER_IS_NO,
            fix="for more of them submit a new recipe with checkpoint.load",
        )  # fmt: skip
    record = read_record(run)
    for one in record.setdefault("attempts", []):
        if "ended" not in one:
            # Ended without a word, and nobody has begun since who could have said so: the user has seen it.
            one.update(
                ended=time.time(), after=start, cause="interrupted", counts=True, then=f"{state.status}: resumed"
            )
    # The count begins anew: what was used up was another promise.
    record.update(stopped=None, owner=None, waiting=None)
    record["from"] = len(record["attempts"])
    record.setdefault("excluded", [])
    record.setdefault("finished", False)
    write_record(run, record)
    write_atomically(run.path / SURVIVE, json.dumps({**plan, "attempts": attempts}, indent=1) + "\n")
    allow_more(run)
    # A key of its own, so that an answer that is lost finds this job and not the run's first.
    key = f"{run.run_id}.r{len(record['attempts'])}"
    excluded = record["excluded"]
    options = [f"--exclude={','.join(excluded)}"] if excluded else []
    with uninterrupted():
        job = slurm.find_jobs([key]).get(key) or slurm.sbatch(run.script, key, *options)
        record_job(run, job)
    return job, start


def _plan(run: RunFolder) -> dict[str, Any]:
    """What `survive.json` says. Raises UserError for what no submission writes."""
    file = run.path / SURVIVE
    try:
        plan = read_json(file)
    except (OSError, ValueError) as exc:
        raise error("bad-survive", f"cannot be read: {exc}", str(file)) from None
    told = plan if isinstance(plan, dict) else {}
    iterations = told.get("iterations")
    if not isinstance(told.get("checkpoint"), str) or not (iterations is None or isinstance(iterations, int)):
        raise error("bad-survive", "does not say how the run goes on", str(file))
    return told


def _refuse(run: RunFolder, state: JobState) -> None:
    known = attempts_of(run)
    if not (run.path / SURVIVE).is_file():
        raise error(
            "no-checkpoints", f"{run.run_id} leaves no checkpoints that another attempt could go on from",
            "checkpoint", "submit it with checkpoint.dir and checkpoint.interval", ANSWER_IS_NO,
        )  # fmt: skip
    if run.manifest().get("backend") == "local":
        raise error("local-resume", "a run on this machine is one attempt", fix="submit it to Slurm", exit_code=2)
    if state.status == "unknown":
        raise error(
            "state-unknown", f"nobody can say whether {run.run_id} still runs: {state.detail}",
            fix="try again when Slurm answers", exit_code=3,
        )  # fmt: skip
    if not state.final or known.waiting:
        raise error(
            "still-running", f"{run.run_id} is {state.status}", fix="it goes on by itself; `fp8launch cancel` ends it",
            exit_code=ANSWER_IS_NO,
        )  # fmt: skip
    if known.finished:
        raise error("run-done", f"{run.run_id} has finished its training", exit_code=ANSWER_IS_NO)

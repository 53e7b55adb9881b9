"""`fp8launch data build --cluster`: build with Slurm jobs."""

from __future__ import annotations

import time
from pathlib import Path

from fp8launch import schedulers
from fp8launch.cli.output import echo, eprint, show_json
from fp8launch.cluster.profile import load_cluster
from fp8launch.datasets.manifest import read_manifest
from fp8launch.diagnostics import ANSWER_IS_NO, UserError, error
from fp8launch.job.reserved_env import refuse_reserved_in_profile
from fp8launch.plugins.data.build import Outcome, already_built, missing, prepare
from fp8launch.plugins.data.cli.report import described, report
from fp8launch.plugins.data.files import busy
from fp8launch.plugins.data.plan import BuildPlan, make_folder
from fp8launch.plugins.data.slurm_build import DataJobs, known_jobs, submit_build
from fp8launch.plugins.data.slurm_program import waiting_or_running
from fp8launch.rundir.atomic_io import Busy, held
from fp8launch.submit.submission import HELD_SECONDS

POLL_SECONDS = 3.0


def build_on_cluster(
    plan: BuildPlan,
    engine: str,
    on_error: str,
    restart: bool,
    overwrite: bool,
    cluster: str,
    limit: str,
    jobs: int,
    cpus: int | None,
    wait: bool,
    as_json: bool,
) -> int:
    """Submit an array over the missing shards and a merge job; with `wait`, follow them."""
    profile = load_cluster(cluster)
    refuse_reserved_in_profile(profile)
    schedulers.cluster().require()
    make_folder(plan.folder)
    arguments = ["--on-error", on_error, "--engine", engine]
    try:
        # An sbatch that outlives this command keeps the lock until its job can be found.
        with held(plan.folder, HELD_SECONDS):
            known = known_jobs(plan)
            if restart and known:
                message = f"jobs of this build have not ended: {', '.join(known.ids)}"
                raise error("data-busy", message, "--restart", f"scancel {' '.join(known.ids)}, or wait", ANSWER_IS_NO)
            # Jobs of an earlier command may have built it since this command looked.
            if known is None and (there := already_built(plan, overwrite)) is not None:
                report(Outcome(there, [], built=False), None, as_json)
                return 0
            plan = prepare(plan, restart)
            submitted = submit_build(plan, known, profile, limit, jobs, cpus, arguments)
    except Busy:
        raise busy(plan.folder) from None
    if not submitted.submitted:
        eprint("these jobs were submitted earlier and have not ended")
    if not wait:
        _show(plan, submitted, as_json)
        return 0
    while _not_ended(submitted):
        time.sleep(POLL_SECONDS)
    return _end(plan, submitted, as_json)


def _not_ended(jobs: DataJobs) -> bool:
    """Return whether a job has not ended. If Slurm does not answer, assume that it has not."""
    try:
        return bool(waiting_or_running(jobs.ids))
    except UserError as silent:
        eprint(silent.problems[0].message)
        return True


def _show(plan: BuildPlan, jobs: DataJobs, as_json: bool) -> None:
    if as_json:
        show_json({"array": jobs.array, "merge": jobs.merge, "folder": str(plan.folder), "shards": len(plan.shards)})
        return
    eprint(f"{plan.prefix}: {len(plan.shards)} shards, logs in {plan.folder}/slurm-*.out")
    eprint("if shards are missing when the jobs have ended, repeat the command to build them")
    for job in jobs.ids:
        echo(job)


def _end(plan: BuildPlan, jobs: DataJobs, as_json: bool) -> int:
    manifest = read_manifest(Path(plan.prefix))
    if manifest is None or manifest.raw.get("fingerprint") != plan.fingerprint():
        left = len(missing(plan)) if plan.folder.exists() else len(plan.shards)
        message = f"the jobs {', '.join(jobs.ids)} have ended, and {left} of {len(plan.shards)} shards are not finished"
        fix = f"read {plan.folder}/slurm-*.out; then repeat the command"
        raise error("data-shards", message, str(plan.folder), fix, ANSWER_IS_NO)
    if as_json:
        show_json({**manifest.raw, "array": jobs.array, "merge": jobs.merge})
    else:
        echo(described(manifest.raw))
    return 0

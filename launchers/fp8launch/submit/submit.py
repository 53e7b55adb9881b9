"""From a recipe's name to a submitted run."""

from __future__ import annotations

import json
import os
import secrets
import sys
from contextlib import nullcontext
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from fp8launch.cluster.profile import Cluster
from fp8launch.cluster.runtimes import Runtime
from fp8launch.diagnostics import UserError, error
from fp8launch.job.build_job import UNPLACED, placed, plan, probe_runtime
from fp8launch.job.job import Job
from fp8launch.job.prepared import Prepared
from fp8launch.job.reserved_env import missing_secrets
from fp8launch.job.resolved import engine_record, phase_entry, recipe_digest, resolved_recipe, resolved_yaml
from fp8launch.rundir.atomic_io import Busy, held
from fp8launch.rundir.attempts import SURVIVE
from fp8launch.rundir.registry import job_ids, remember_root
from fp8launch.rundir.run_dir import MANIFEST, RunFolder, create_run_folder
from fp8launch.rundir.trust import need_safe_root
from fp8launch.schedulers.base import Scheduler
from fp8launch.schedulers.environment import clean_environment
from fp8launch.secrets import redacted, refuse_secrets
from fp8launch.submit.provenance import Origin, image_record, origin_of
from fp8launch.submit.stored_checkpoints import checkpoint_links
from fp8launch.submit.submission import (
    HELD_SECONDS,
    content_key,
    find_cut_off,
    new_submission,
    now,
    recover_jobs,
    submit_job,
)
from fp8launch.submit.supervisor_plan import survival_text


def new_run_id(name: str) -> str:
    return f"{name}-{datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def plan_run(prepared: Prepared, cluster: Cluster, folder: Path, scheduler: Scheduler, job: Job | None = None) -> Job:
    """Return the job of a run that will really be submitted, in its run folder.

    `job` is the one that was checked. None plans it: runtime probed, image and mounts checked.
    """
    recipe = prepared.loaded.recipe
    if missing := list(missing_secrets(prepared.loaded, os.environ)):
        raise UserError(missing)
    if recipe.survive.attempts > 1 and not scheduler.capabilities.resumes:
        raise error(
            f"{scheduler.name}-attempts",
            f"survive.attempts is {recipe.survive.attempts}, but the {scheduler.name} backend starts each run only "
            "once",
            prepared.loaded.where("survive", "attempts"),
            "remove it, or submit to Slurm",
        )
    job = placed(job or _plan(prepared, cluster, scheduler), folder, cluster)
    scheduler.validate(job)
    return job


def _plan(prepared: Prepared, cluster: Cluster, scheduler: Scheduler) -> Job:
    runtime: Runtime = "none"
    if prepared.loaded.recipe.container.image is not None:
        runtime = probe_runtime(cluster, clean_environment())
        if runtime == "pyxis" and not scheduler.capabilities.pyxis:
            runtime = "none"
    return plan(prepared, cluster, UNPLACED, runtime=runtime)


def submit(
    prepared: Prepared,
    cluster: Cluster,
    root: Path,
    scheduler: Scheduler,
    checked: dict[str, Any] | None = None,
    job: Job | None = None,
) -> RunFolder:
    """Make the run folder and submit its job. The folder is kept when the scheduler refuses, for the error to name.

    A submission of the same that was cut off is completed instead. `checked` is what the check found, for the manifest;
    `job` the job that it planned.
    """
    need_safe_root(root, cluster.trust_run_root)
    name = prepared.loaded.recipe.name
    content = content_key(prepared)
    cut_off = find_cut_off(root, name, content, scheduler)
    folder = cut_off.path if cut_off else root / new_run_id(name)
    try:
        with held(folder, HELD_SECONDS) if cut_off else nullcontext():
            if cut_off and (recover_jobs([cut_off], scheduler) or job_ids(cut_off)):
                return cut_off
            job = plan_run(prepared, cluster, folder, scheduler, job)
            entries = {"check": checked, "content": content, "submission": new_submission(folder.name)}
            came_from = origin(prepared, scheduler)
            run = make_run(prepared, cluster, job, scheduler, came_from, replace=bool(cut_off), **entries)
        remember_root(root)
        with held(folder, HELD_SECONDS):
            submit_job(run, job, scheduler)
    except Busy:
        raise error(
            "run-busy", f"another launcher is submitting {folder.name}", str(folder), "retry in a minute", 3
        ) from None
    return run


def origin(prepared: Prepared, scheduler: Scheduler) -> Origin:
    """Return where a run of this recipe comes from, for its manifest."""
    return origin_of(prepared.loaded.files[-1], scheduler.version())


def make_run(
    prepared: Prepared,
    cluster: Cluster,
    job: Job,
    scheduler: Scheduler,
    origin: Origin,
    replace: bool = False,
    **entries: Any,
) -> RunFolder:
    """Make the run folder of a planned job, without the scheduler's answer; `entries` go into its manifest."""
    folder = Path(job.folder or "")
    name, text = scheduler.script(job)
    files = {name: text, "recipe.yaml": resolved_yaml(prepared)}
    manifest = {**_manifest(prepared, cluster, job, scheduler, origin), **entries}
    owner = {"run": folder.name, "recipe": recipe_digest(prepared), "created": manifest["created"]}
    survival = survival_text(prepared.loaded, prepared.args, cluster, job, scheduler.capabilities, owner)
    if survival is not None:
        files[SURVIVE] = survival
    refuse_secrets({**files, MANIFEST: json.dumps(manifest)}, job.secrets)
    if origin.diff:
        files["git.diff"] = redacted(origin.diff, job.secrets)
    links = checkpoint_links(prepared.loaded.recipe, cluster, folder)
    if links:
        manifest["storage"] = {name: str(target) for name, target in links.items()}
    try:
        return create_run_folder(folder.parent, folder.name, files, manifest, replace, links)
    except BaseException:
        for target in links.values():
            target.rmdir()
        raise


def _manifest(prepared: Prepared, cluster: Cluster, job: Job, scheduler: Scheduler, origin: Origin) -> dict[str, Any]:
    recipe = prepared.loaded.recipe
    host, image, runtime = None, None, None
    if scheduler.capabilities.on_this_machine:
        host = os.uname().nodename
    if job.container:
        image, runtime = job.container.image, job.container.runtime
    return {
        "format": 1,
        "run_id": Path(job.folder or "").name,
        "name": recipe.name,
        "created": now(),
        "backend": scheduler.name,
        "host": host,
        "jobs": [],
        "command": sys.argv[1:],
        "recipe": resolved_recipe(prepared),
        "recipe_files": list(map(str, prepared.loaded.files)),
        "engine": engine_record(prepared, job),
        "megatron": {"version": prepared.args.version, "argv": list(prepared.args.argv)},
        "arguments": prepared.args.recorded,
        "phases": list(map(phase_entry, prepared.phases)),
        "layout": asdict(prepared.layout),
        "gpu": recipe.resources.gpu,
        "environment": dict(job.environment),
        "secrets": list(job.secrets),
        "slurm": dict(job.slurm),
        "cluster": cluster.name or None,
        "python": job.python,
        "image": image_record(image),
        "runtime": runtime,
        "git": origin.git,
        "versions": origin.versions,
    }

"""Create the folder of a new run, with job, script, resolved recipe and manifest, before submission."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import platform
import secrets
import sys
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path, PurePath
from typing import Any

from fp8launch import __version__
from fp8launch.cluster.profile import Cluster
from fp8launch.cluster.runtimes import Runtime
from fp8launch.cluster.storage import CHECKPOINTS, checkpoint_place
from fp8launch.diagnostics import MACHINE_LACKS, UserError, error
from fp8launch.injob.regular_files import read_regular
from fp8launch.injob.supervisor.run_records import now
from fp8launch.job.build_job import UNPLACED, placed, plan
from fp8launch.job.job import Job
from fp8launch.job.prepared import Prepared, engine_record, phase_entry, recipe_digest, resolved_recipe, resolved_yaml
from fp8launch.job.reserved_env import missing_secrets
from fp8launch.job.script import end_lines
from fp8launch.plugin_registry import loaded
from fp8launch.recipe.schema import Recipe
from fp8launch.recipe.yaml_source import is_file
from fp8launch.rundir.atomic_io import make_folders
from fp8launch.rundir.attempts import SURVIVE
from fp8launch.rundir.run_dir import MANIFEST, RunFolder, create_run_folder
from fp8launch.schedulers import probe_runtime
from fp8launch.schedulers.base import Scheduler
from fp8launch.schedulers.environment import clean_environment
from fp8launch.secrets import redacted, refuse_secrets
from fp8launch.submit.checkout import checkout_of
from fp8launch.submit.supervisor_plan import survival_text


@dataclass(frozen=True)
class Origin:
    """The code and software behind a run: git state, uncommitted diff and versions. Points of a grid share it."""

    git: dict[str, Any] | None
    diff: str
    versions: dict[str, str | None]


def new_run_id(name: str) -> str:
    return f"{name}-{datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def plan_run(prepared: Prepared, cluster: Cluster, folder: Path, scheduler: Scheduler, job: Job | None = None) -> Job:
    """Return the job of a run, placed in its run folder.

    `job` is the job that was checked. Without it, the job is planned here, which detects the container runtime and
    checks image and mounts. Raises UserError for missing secrets and for requests that the scheduler cannot satisfy.
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
    if job is None:
        runtime: Runtime = "none"
        if recipe.container.image is not None:
            runtime = probe_runtime(cluster, clean_environment())
            if runtime == "pyxis" and not scheduler.capabilities.pyxis:
                runtime = "none"
        job = plan(prepared, cluster, UNPLACED, runtime=runtime)
    job = placed(job, folder)
    scheduler.validate(job)
    lines = [line for _, lines_of in loaded("setup_lines") for line in lines_of(job, recipe, cluster)]
    job = replace(job, setup=(*lines, *job.setup))
    commands = [command for _, command_of in loaded("end_commands") if (command := command_of(job, scheduler))]
    return replace(job, setup=(*end_lines(commands), *job.setup))


def origin(prepared: Prepared, scheduler: Scheduler) -> Origin:
    """Return the versions of the code and software behind a run of this recipe."""
    git, diff = checkout_of(prepared.loaded.files[-1])
    # The key is called "slurm" for all schedulers, because manifests are older than the others.
    versions = {"fp8launch": __version__, "python": platform.python_version(), "slurm": scheduler.version()}
    return Origin(git, diff, versions)


def make_run(
    prepared: Prepared,
    cluster: Cluster,
    job: Job,
    scheduler: Scheduler,
    origin: Origin,
    replace: bool = False,
    **entries: Any,
) -> RunFolder:
    """Create the run folder of a planned job. `entries` are added to its manifest."""
    folder = Path(job.folder or "")
    name, text = scheduler.script(job)
    files = {name: text, "recipe.yaml": resolved_yaml(prepared)}
    manifest = {**_manifest(prepared, cluster, job, scheduler, origin), **entries}
    owner = {"run": folder.name, "recipe": recipe_digest(prepared), "created": manifest["created"]}
    survival = survival_text(prepared, cluster, job, scheduler, owner)
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
    host = os.uname().nodename if scheduler.capabilities.on_this_machine else None
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
        "recipe_files": [str(file.absolute()) for file in prepared.loaded.files],
        "engine": engine_record(prepared, job),
        "megatron": {"version": prepared.args.version, "argv": list(prepared.args.argv)},
        "arguments": prepared.args.recorded,
        "phases": list(map(phase_entry, prepared.phases)),
        "layout": asdict(prepared.layout),
        "gpu": recipe.resources.gpu,
        "environment": dict(job.environment),
        "secrets": list(job.secrets),
        "slurm": scheduler.request(job),
        "cluster": cluster.name or None,
        "python": job.python,
        "image": image_record(job.container.image) if job.container else None,
        "runtime": job.container.runtime if job.container else None,
        "git": origin.git,
        "versions": origin.versions,
    }


def image_record(image: str) -> dict[str, Any]:
    """Return what identifies an image: the digest from its URI or next to its file, else the file's size and time."""
    record: dict[str, Any] = {"image": image}
    digest = image.rpartition("@")[2]
    if digest.startswith("sha256:"):
        return {**record, "digest": digest}
    path = Path(image)
    if is_file(path):
        stat = path.stat()
        modified = datetime.fromtimestamp(stat.st_mtime, timezone.utc).isoformat(timespec="seconds")
        record |= {"bytes": stat.st_size, "modified": modified}
        with contextlib.suppress(OSError, ValueError):
            words = read_regular(path.with_name(path.name + ".sha256"), 4096).decode(errors="replace").split()
            if words:
                record["digest"] = f"sha256:{words[0]}"
    return record


def checkpoint_links(recipe: Recipe, cluster: Cluster, run: Path) -> dict[str, Path]:
    """Create the folder for a run's checkpoints where the cluster profile stores them.

    Returns the links to it that the run folder needs. `run` is the future run folder. If it replaces a run, that run's
    checkpoint folder is removed if empty. Raises UserError (exit code 3) if the folder cannot be created.
    """
    place, name = checkpoint_place(cluster), _link_name(recipe)
    if place is None:
        return {}
    try:
        make_folders(place)
        if name is None:
            return {}
        if name in ("code", "logs"):
            message = f"checkpoint.dir starts with '{name}', which is a folder in every run folder"
            raise error("checkpoint-dir", message, "checkpoint.dir", "choose another name, such as checkpoints")
        old = run / name
        if old.is_symlink() and old.readlink().parent == place:
            with contextlib.suppress(OSError):
                old.readlink().rmdir()
        return {name: _new_folder(place, run.name)}
    except OSError as exc:
        message = f"the folder for checkpoints below {place} cannot be created: {exc.strerror or exc}"
        raise error("storage", message, CHECKPOINTS, "choose a folder that you can write to", MACHINE_LACKS) from None


def _link_name(recipe: Recipe) -> str | None:
    """Return the first part of a relative `checkpoint.dir`, which becomes a link in the run folder; else None."""
    stated = PurePath(os.path.normpath(recipe.checkpoint.dir or "/"))
    if stated.is_absolute() or stated.parts[:1] in ((), ("..",)):
        return None
    return stated.parts[0]


def _new_folder(place: Path, name: str) -> Path:
    """Create a new folder. Runs of different studies may share a name, but must not find each other's checkpoints."""
    for count in itertools.count(1):
        folder = place / (name if count == 1 else f"{name}-{count}")
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o755)
            return folder
    raise AssertionError("unreachable")


def dry_script(
    prepared: Prepared, cluster: Cluster, root: Path, scheduler: Scheduler, planned: Job | None = None
) -> str:
    """Return the script that `submit` would pass to the scheduler for this run."""
    job = plan_run(prepared, cluster, root / new_run_id(prepared.loaded.recipe.name), scheduler, planned)
    return scheduler.script(job)[1]

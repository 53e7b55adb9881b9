"""Build the frozen `Job` from a recipe, its arguments and a cluster profile."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from fp8launch.cluster.profile import FOR_SCHEDULER, Cluster
from fp8launch.cluster.runtimes import Runtime
from fp8launch.diagnostics import error
from fp8launch.engines.base import Engine
from fp8launch.hardware.quantization import is_stateful
from fp8launch.injob.supervisor.checkpoint_owner import UNPICKLE
from fp8launch.job.container import path_on_host, plan_container
from fp8launch.job.job import Job, JobPhase, Resources, Survival
from fp8launch.job.prepared import Phase, Prepared, recipe_digest
from fp8launch.job.reserved_env import refuse_reserved
from fp8launch.megatron.arguments import Argument
from fp8launch.recipe.field_types import BY_SCHEDULER, LaunchMode
from fp8launch.recipe.schema import Recipe

T = TypeVar("T")
Pairs = tuple[tuple[str, str], ...]
# A phase, its complete environment and the arguments of all its attempts.
PhaseParts = tuple[Phase, Pairs, tuple[Argument, ...]]

# The run folder of a job that has none yet; `placed` gives it one.
UNPLACED = Path("/run-folder")

# Schedulers expand % in log file names, and their options in a script cannot contain quotes or newlines.
_SAFE_FOLDER = re.compile(r"/[\w./@+=:, -]*")


def plan(
    prepared: Prepared,
    cluster: Cluster,
    folder: Path | None,
    *,
    runtime: Runtime | None = None,
    check_paths: bool = True,
) -> Job:
    """Return the job of a recipe on a cluster.

    `folder` is the future run folder, or None for a portable script. `runtime` runs the recipe's image; None or "none"
    ignores the image. Without `check_paths`, images and mounts need not exist on this machine, which is enough to show
    a job. Raises UserError.
    """
    loaded, args, phases = prepared.loaded, prepared.args, prepared.phases
    recipe, engine = loaded.recipe, prepared.engine
    if folder is not None:
        _refuse_unsafe(folder)
    for part in [loaded, *(phase.loaded for phase in phases)]:
        refuse_reserved(part, cluster)
    if phases and folder is None:
        raise error(
            "portable-phases", "a portable script has no run folder and cannot determine the current phase", "phases",
            "submit the recipe, or render one of its phases with --phase", 1,
        )  # fmt: skip
    mode: LaunchMode = recipe.launch.mode or cluster.launch or BY_SCHEDULER
    container = plan_container(loaded, cluster, runtime, check_paths)
    # A portable script creates its run folder when it runs, so it has no record of earlier attempts.
    attempts = engine.attempts(args) if folder is not None and recipe.goes_on else None
    survival = None
    arguments = args.all
    if attempts is not None and folder is not None:
        each = [args, *(phase.args for phase in phases)]
        pickled_state = any(is_stateful(one.attributes) for one in each)
        checkpoint = path_on_host(attempts.save, container, folder)
        skip_flag = attempts.skip_flag if recipe.health.rewinds else None
        survival = Survival(attempts.save, checkpoint, attempts.resume, attempts.first_start, pickled_state, skip_flag)
        arguments = attempts.always
    environment = _environment(engine, recipe, cluster)
    job_phases: tuple[JobPhase, ...] = ()
    if phases:
        environment, arguments, job_phases = _share_phases([_of_phase(engine, one, cluster) for one in phases])
    return Job(
        name=recipe.name,
        description=recipe.description,
        folder=str(folder) if folder is not None else None,
        resources=_resources(recipe, cluster, mode, survives=survival is not None),
        processes_per_node=recipe.resources.gpus_per_node,
        mode=mode,
        python=_python(recipe, cluster, runtime, portable=folder is None),
        arguments=arguments,
        environment=environment,
        secrets=tuple(recipe.secrets),
        setup=tuple(cluster.setup),
        container=container,
        entry=engine.entry(loaded, runtime not in (None, "none"), check_paths),
        health_gpus=_health_gpus(recipe, cluster),
        survival=survival,
        phases=job_phases,
        gpu=recipe.resources.gpu,
        megatron=args.version,
        recipe_digest=recipe_digest(prepared) if folder is None else "",
    )


def placed(job: Job, folder: Path) -> Job:
    """Return the same job in another run folder. `job` must have been planned with a folder, such as UNPLACED."""
    _refuse_unsafe(folder)
    survival = job.survival
    if survival is not None:
        survival = replace(survival, checkpoint=path_on_host(survival.save, job.container, folder))
    return replace(job, folder=str(folder), survival=survival)


def _refuse_unsafe(folder: Path) -> None:
    if not _SAFE_FOLDER.fullmatch(str(folder)):
        raise error(
            "run-folder-name",
            f"the run folder {str(folder)!r} contains characters with a special meaning in batch scripts",
            fix="choose a run root with only letters, digits, spaces and ./@+=:,_-",
        )


def _python(recipe: Recipe, cluster: Cluster, runtime: str | None, portable: bool) -> str:
    if recipe.launch.python:
        return recipe.launch.python
    if runtime not in (None, "none") or portable:
        return "python3"
    return cluster.python or sys.executable


def _environment(engine: Engine, recipe: Recipe, cluster: Cluster, begin: int = 0) -> Pairs:
    """Return the environment of a run, or of its phase that begins after iteration `begin`."""
    ours = {"PYTHONUNBUFFERED": "1", **engine.environment(recipe, begin)}
    if recipe.checkpoint.allow_pickle:
        ours[UNPICKLE] = "1"
    return tuple({**ours, **cluster.environment, **recipe.environment}.items())


def _health_gpus(recipe: Recipe, cluster: Cluster) -> int | None:
    wanted = recipe.launch.health_check
    if wanted is None:
        wanted = cluster.health_check
    if not wanted:
        return None
    if recipe.resources.gpu == "cpu":
        return 0
    return recipe.resources.gpus_per_node


def site_resources(cluster: Cluster, need: Resources) -> Resources:
    """Add the profile's settings for all jobs to `need`: where jobs may run, and scheduler options."""
    options = {name: getattr(cluster, name) for name in FOR_SCHEDULER if name in cluster.model_fields_set}
    return replace(
        need,
        memory=cluster.memory,
        account=cluster.account,
        queue=cluster.partition,
        nodelist=cluster.nodelist,
        exclude=cluster.exclude,
        exclusive=cluster.exclusive,
        options=options,
    )


def _resources(recipe: Recipe, cluster: Cluster, mode: LaunchMode, survives: bool) -> Resources:
    stated = recipe.resources
    tasks, cpus = stated.gpus_per_node, stated.cpus_per_task
    if mode == "torchrun":
        tasks = 1
        if cpus:
            cpus *= stated.gpus_per_node
    restart = cluster.requeue
    if restart is None and survives and (recipe.survive.attempts > 1 or recipe.phases):
        # With `dependency`, a restarted job would compete with the successor that waits for it to end.
        restart = continue_by(cluster) == "requeue"
    need = Resources(
        nodes=stated.nodes,
        tasks_per_node=tasks,
        gpus_per_node=0 if stated.gpu == "cpu" else stated.gpus_per_node,
        cpus_per_task=cpus,
        time_limit=stated.time,
        restart=restart,
        # Only a fallback: at `stop_before`, which is earlier, the training saves and exits on its own.
        warn_seconds=max(1, stop_before(recipe) // 2) if survives else None,
    )
    return site_resources(cluster, need)


def _of_phase(engine: Engine, phase: Phase, cluster: Cluster) -> PhaseParts:
    """Return a phase with its complete environment and the arguments of all its attempts."""
    attempts = engine.attempts(phase.args)
    assert attempts is not None, "the recipe format asks phases for checkpoints"
    return phase, _environment(engine, phase.loaded.recipe, cluster, phase.begin), attempts.always


def _share_phases(each: Sequence[PhaseParts]) -> tuple[Pairs, tuple[Argument, ...], tuple[JobPhase, ...]]:
    """Return the environment and the arguments that all phases share, and each phase with its own."""
    _, environment, arguments = each[0]
    for _, others, other_arguments in each[1:]:
        environment = _both(environment, others)
        arguments = _both(arguments, other_arguments)
    phases = []
    for phase, variables, words in each:
        phases.append(JobPhase(phase.name, phase.end, _without(words, arguments), _without(variables, environment)))
    return environment, arguments, tuple(phases)


def _both(items: Sequence[T], others: Sequence[T]) -> tuple[T, ...]:
    return tuple(item for item in items if item in others)


def _without(items: Sequence[T], others: Sequence[T]) -> tuple[T, ...]:
    return tuple(item for item in items if item not in others)


def continue_by(cluster: Cluster) -> str:
    """Return how the next attempt starts. By default, the same job is requeued (`requeue`)."""
    if cluster.continue_by:
        return cluster.continue_by
    if cluster.requeue is False:
        return "dependency"
    return "requeue"


def stop_before(recipe: Recipe) -> int:
    """Return how many seconds before the time limit the training saves and exits, at most a quarter of the limit."""
    return max(1, min(recipe.survive.stop_before, int(recipe.resources.hours * 3600) // 4))

"""Recipe, arguments and cluster to the frozen `Job`."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from fp8launch.cluster.images import image_for, local_path
from fp8launch.cluster.profile import Cluster
from fp8launch.cluster.runtimes import Runtime
from fp8launch.cluster.storage import CHECKPOINTS, storage_mounts
from fp8launch.diagnostics import BAD_INPUT, MACHINE_LACKS, Problem, UserError, error
from fp8launch.engines.base import AttemptArguments, Engine
from fp8launch.hardware.quantization import is_stateful
from fp8launch.injob.supervisor.checkpoint_owner import UNPICKLE
from fp8launch.job.job import Container, Job, JobPhase, Mode, Mount, Survival
from fp8launch.job.job_comment import job_comment
from fp8launch.job.mounts import on_host
from fp8launch.job.phases import Phase
from fp8launch.job.prepared import Prepared
from fp8launch.job.reserved_env import refuse_reserved
from fp8launch.job.resolved import recipe_digest
from fp8launch.megatron.arguments import Argument
from fp8launch.recipe.load import LoadedRecipe
from fp8launch.recipe.schema import Recipe
from fp8launch.recipe.yaml_source import is_there

# One submission is one job, whose id sbatch prints at once.
_OUR_OPTIONS = {"array", "export-file", "parsable", "test-only", "wait", "wrap"}

# The run folder of a job that has none yet; `placed` gives it one.
UNPLACED = Path("/run-folder")

T = TypeVar("T")
Pairs = tuple[tuple[str, str], ...]
PhaseParts = tuple[Phase, Pairs, tuple[Argument, ...]]

# Slurm expands % in the names of log files, and a #SBATCH line cannot contain quotes or line ends.
_SAFE_FOLDER = re.compile(r"/[\w./@+=:, -]*")


def plan(
    prepared: Prepared,
    cluster: Cluster,
    folder: Path | None,
    *,
    runtime: Runtime | None = None,
    check_paths: bool = True,
) -> Job:
    """The job for a recipe on a cluster.

    `folder` is the run folder to be; None plans a portable script. `runtime` runs the recipe's image; None or "none"
    ignores the image. `check_paths` is off for what is only shown. Raises UserError for images and mounts that do not
    exist.
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
    mode: Mode = recipe.launch.mode or cluster.launch or "srun"
    container = _container(loaded, cluster, runtime, check_paths)
    # A portable script makes its run folder when it runs: nothing there could know of an attempt before it.
    attempts = engine.attempts(args) if folder is not None and recipe.goes_on else None
    survival = None
    arguments = args.all
    if attempts is not None and folder is not None:
        each = [args, *(phase.args for phase in phases)]
        pickled_state = any(is_stateful(one.attributes) for one in each)
        survival = _survival(recipe, attempts, container, folder, pickled_state)
        arguments = attempts.always
    environment = _environment(engine, recipe, cluster)
    job_phases: tuple[JobPhase, ...] = ()
    if phases:
        environment, arguments, job_phases = _shared([_of_phase(engine, one, cluster) for one in phases])
    return Job(
        name=recipe.name,
        description=recipe.description,
        folder=str(folder) if folder is not None else None,
        nodes=recipe.resources.nodes,
        processes_per_node=recipe.resources.gpus_per_node,
        mode=mode,
        python=_python(recipe, cluster, runtime, portable=folder is None),
        arguments=arguments,
        environment=environment,
        secrets=tuple(recipe.secrets),
        slurm=_slurm_options(recipe, cluster, folder, mode) + _ending(recipe, cluster, survival),
        setup=tuple(cluster.setup),
        container=container,
        entry=engine.entry(loaded, runtime not in (None, "none"), check_paths),
        mpi=cluster.mpi,
        cpus_per_task=_cpus_per_task(recipe, mode),
        health_gpus=_health_gpus(recipe, cluster),
        survival=survival,
        phases=job_phases,
        gpu=recipe.resources.gpu,
        megatron=args.version,
        recipe_digest=recipe_digest(prepared) if folder is None else "",
    )


def placed(job: Job, folder: Path, cluster: Cluster) -> Job:
    """Return the same job in another run folder; `job` was planned with one, such as UNPLACED."""
    _refuse_unsafe(folder)
    survival = job.survival
    if survival is not None:
        survival = replace(survival, checkpoint=_on_the_host(survival.save, job.container, folder))
    options = {**dict(job.slurm), **_folder_options(folder, cluster)}
    return replace(job, folder=str(folder), survival=survival, slurm=tuple(options.items()))


def _refuse_unsafe(folder: Path) -> None:
    if not _SAFE_FOLDER.fullmatch(str(folder)):
        raise error(
            "run-folder-name",
            f"the run folder {str(folder)!r} contains characters with a special meaning in Slurm or a shell",
            fix="choose a run root with only letters, digits, spaces and ./@+=:,_-",
        )


def _folder_options(folder: Path, cluster: Cluster) -> dict[str, str]:
    """sbatch's options that name the run folder or its run, unless the profile states its own."""
    stated = {name: value for name, value in cluster.options.items() if value is not False}
    options = {"comment": job_comment(folder.name, str(stated.get("comment", "")))}
    if "output" not in stated:
        options["output"] = str(folder / "logs" / "slurm-%j.out")
    return options


def probe_runtime(cluster: Cluster, environment: dict[str, str]) -> Runtime:
    """The container runtime that the profile names, else the first that this machine shows. Exit code 3 when none."""
    if cluster.runtime is not None:
        return cluster.runtime
    srun = shutil.which("srun")
    if srun is not None and "--container-image" in _help(srun, tuple(environment.items())):
        return "pyxis"
    if shutil.which("apptainer") or shutil.which("singularity"):
        return "apptainer"
    if shutil.which("ch-run"):
        return "charliecloud"
    raise error(
        "no-container-runtime",
        "the recipe uses a container image, but this machine has neither pyxis nor Apptainer nor Charliecloud",
        "container.image",
        "set `runtime:` in the cluster profile, or run without an image: --set container.image=null",
        exit_code=3,
    )


@functools.cache  # once for all points of a grid
def _help(srun: str, environment: tuple[tuple[str, str], ...]) -> str:
    """srun's own help, to which pyxis adds its options."""
    shown = subprocess.run([srun, "--help"], capture_output=True, text=True, env=dict(environment), check=False)
    return shown.stdout


def _python(recipe: Recipe, cluster: Cluster, runtime: str | None, portable: bool) -> str:
    if recipe.launch.python:
        return recipe.launch.python
    if runtime not in (None, "none") or portable:
        return "python3"
    return cluster.python or sys.executable


def _environment(engine: Engine, recipe: Recipe, cluster: Cluster, begin: int = 0) -> Pairs:
    """Variables of a run, or of its phase that begins after iteration `begin`."""
    ours = {"PYTHONUNBUFFERED": "1", **engine.environment(recipe, begin)}
    if recipe.checkpoint.allow_pickle:
        ours[UNPICKLE] = "1"
    site = {name: str(value) for name, value in cluster.env.items()}
    return tuple({**ours, **site, **recipe.environment}.items())


def _health_gpus(recipe: Recipe, cluster: Cluster) -> int | None:
    wanted = recipe.launch.health_check
    if wanted is None:
        wanted = cluster.health_check
    if not wanted:
        return None
    if recipe.resources.gpu == "cpu":
        return 0
    return recipe.resources.gpus_per_node


def _cpus_per_task(recipe: Recipe, mode: Mode) -> int | None:
    cpus = recipe.resources.cpus_per_task
    if cpus and mode == "torchrun":
        return cpus * recipe.resources.gpus_per_node
    return cpus


def site_options(cluster: Cluster) -> dict[str, str | None]:
    """Return sbatch's options that say where a job of this cluster profile runs, None for one without a value."""
    stated = {
        "account": cluster.account,
        "partition": cluster.partition,
        "qos": cluster.qos,
        "reservation": cluster.reservation,
        "constraint": cluster.constraint,
        "nodelist": cluster.nodelist,
        "exclude": cluster.exclude,
        "segment": str(cluster.segment) if cluster.segment else None,
        "mem": cluster.memory,
    }
    options: dict[str, str | None] = {name: value for name, value in stated.items() if value is not None}
    if cluster.exclusive:
        options["exclusive"] = None
    return options


def own_options(cluster: Cluster) -> dict[str, str | None]:
    """Return the sbatch options that the profile adds by name. Raises UserError for one that fp8launch sets itself."""
    options: dict[str, str | None] = {}
    for name, value in cluster.options.items():
        if name in _OUR_OPTIONS:
            raise error(
                "reserved-option",
                f"the option --{name} would prevent fp8launch from finding its jobs",
                f"cluster profile: options.{name}",
                "remove it",
            )
        if value is True:
            options[name] = None
        elif value is not False:
            options[name] = str(value)
    return options


def _slurm_options(
    recipe: Recipe, cluster: Cluster, folder: Path | None, mode: Mode
) -> tuple[tuple[str, str | None], ...]:
    need = recipe.resources
    options: dict[str, str | None] = {
        "job-name": recipe.name,
        "nodes": str(need.nodes),
        "ntasks-per-node": "1" if mode == "torchrun" else str(need.gpus_per_node),
        "time": need.time,
    }
    gpus = str(need.gpus_per_node)
    if cluster.gres_type:
        gpus = f"{cluster.gres_type}:{gpus}"
    if need.gpu != "cpu" and cluster.gpus == "gpus-per-node":
        options["gpus-per-node"] = gpus
    elif need.gpu != "cpu" and cluster.gpus == "gres":
        options["gres"] = f"gpu:{gpus}"
    cpus = _cpus_per_task(recipe, mode)
    if cpus:
        options["cpus-per-task"] = str(cpus)
    options |= site_options(cluster)
    if cluster.requeue is not None:
        options[_requeue_option(cluster.requeue)] = None
    options |= {"output": "%x-%j.out", "open-mode": "append"}
    if folder is not None:
        options["comment"] = None  # its place; `_folder_options` has its value
    options |= own_options(cluster)
    if folder is not None:
        options |= _folder_options(folder, cluster)
    return tuple(options.items())


def _survival(
    recipe: Recipe, attempts: AttemptArguments, container: Container | None, folder: Path, pickled_state: bool
) -> Survival:
    """How the run continues after an attempt that has left a checkpoint."""
    checkpoint = _on_the_host(attempts.save, container, folder)
    skip_flag = attempts.skip_flag if recipe.health.rewinds else None
    return Survival(attempts.save, checkpoint, attempts.resume, attempts.first_start, pickled_state, skip_flag)


def _of_phase(engine: Engine, phase: Phase, cluster: Cluster) -> PhaseParts:
    """A phase with its whole environment and the arguments of all its attempts."""
    attempts = engine.attempts(phase.args)
    assert attempts is not None, "the recipe format asks phases for checkpoints"
    return phase, _environment(engine, phase.loaded.recipe, cluster, phase.begin), attempts.always


def _shared(each: Sequence[PhaseParts]) -> tuple[Pairs, tuple[Argument, ...], tuple[JobPhase, ...]]:
    """Environment and arguments that all phases have, and each phase with what it has beside them."""
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


def _on_the_host(path: str, container: Container | None, folder: Path) -> str:
    """The path on the batch host of the file that the processes call `path`."""
    if container is None or not path.startswith("/"):
        return str(folder / path)
    own = Mount(str(folder), str(folder))
    # What no mount shows is the runtime's own, such as /tmp: checks refuse what would be lost.
    return on_host((*container.mounts, own), path) or path


def continue_by(cluster: Cluster) -> str:
    """How a further attempt comes on a cluster: `requeue` of the same job unless the profile says otherwise."""
    if cluster.continue_by:
        return cluster.continue_by
    if cluster.requeue is False:
        return "dependency"
    return "requeue"


def stop_before(recipe: Recipe) -> int:
    """Seconds before the time limit when the training saves and leaves; never more than a quarter of it."""
    return max(1, min(recipe.survive.stop_before, int(recipe.resources.hours * 3600) // 4))


def _ending(recipe: Recipe, cluster: Cluster, survival: Survival | None) -> tuple[tuple[str, str | None], ...]:
    """The Slurm settings for continuing a run: the signal before the time limit, and whether to requeue."""
    if survival is None:
        return ()
    options: dict[str, str | None] = {}
    if "signal" not in cluster.options:
        # Without B: it reaches the processes. They should be gone by then: they keep to the time themselves.
        options["signal"] = f"TERM@{max(1, stop_before(recipe) // 2)}"
    if (recipe.survive.attempts > 1 or recipe.phases) and cluster.requeue is None:
        # With a job that waits, Slurm starting this one again by itself would make two.
        options[_requeue_option(continue_by(cluster) == "requeue")] = None
    return tuple(options.items())


def _requeue_option(wanted: bool) -> str:
    if wanted:
        return "requeue"
    return "no-requeue"


def _container(loaded: LoadedRecipe, cluster: Cluster, runtime: Runtime | None, check: bool) -> Container | None:
    recipe = loaded.recipe
    if recipe.container.image is None or runtime is None or runtime == "none":
        return None
    image = image_for(recipe.container.image, runtime, cluster, loaded.where("container", "image"), check)
    mounts, problems = [], []
    stated = site_mounts(cluster)
    for index, text in enumerate(recipe.container.mounts):
        stated.append((text, loaded.where("container", "mounts", index)))
    for text, where in stated:
        # Submission makes the folder for checkpoints.
        found = _mount(text, where, runtime, check and where != CHECKPOINTS)
        if isinstance(found, Problem):
            problems.append(found)
        else:
            mounts.append(found)
    if problems:
        missing = all(problem.code == "mount-missing" for problem in problems)
        raise UserError(problems, exit_code=MACHINE_LACKS if missing else BAD_INPUT)
    return Container(runtime, image, tuple(mounts), gpus=recipe.resources.gpu != "cpu")


def site_mounts(cluster: Cluster) -> list[tuple[str, str]]:
    """Return the mounts of a cluster's container jobs, as text, each with where it is stated."""
    return [*((text, "cluster profile: mounts") for text in cluster.mounts), *storage_mounts(cluster)]


def _mount(text: str, where: str, runtime: Runtime, check: bool) -> Mount | Problem:
    source, _, rest = text.partition(":")
    target, _, mode = rest.partition(":")
    if source.startswith("~"):
        source = str(local_path(source, where))
    target = target or source
    if not source.startswith("/") or not target.startswith("/") or mode not in ("", "ro", "rw") or "," in text:
        return Problem(
            "error", "bad-mount", f"mount '{text}' must look like /source[:/target[:ro]], without commas", where
        )
    if mode == "ro" and runtime == "charliecloud":
        message = f"mount '{text}' is read-only, but Charliecloud does not support read-only mounts"
        fix = "remove ':ro', and protect the files by their permissions if needed"
        return Problem("error", "mount-read-only", message, where, fix)
    if check and not is_there(Path(source)):
        message = f"mount source {source} does not exist on this machine"
        return Problem("error", "mount-missing", message, where, "create it, or remove the mount")
    return Mount(source, target, mode == "ro")

"""Recipe, arguments and cluster to the frozen `Job`."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from fp8launch.job.cluster import Cluster, Runtime
from fp8launch.job.images import image_for, local_path
from fp8launch.job.job import Container, Job, JobPhase, Mode, Mount, Survival
from fp8launch.job.variables import refuse_reserved
from fp8launch.job.words import flags_of
from fp8launch.megatron.phases import Phase
from fp8launch.megatron.translate import MegatronArgs
from fp8launch.problems import Problem, UserError, error
from fp8launch.recipe.load import LoadedRecipe
from fp8launch.recipe.schema import Recipe
from fp8launch.recipe.source import is_file, is_there

# What prepares a first start. On going on it would reset the iteration, or drop the optimizer's state.
_FIRST_START = {
    "--load", "--pretrained-checkpoint", "--finetune", "--no-load-optim", "--no-load-rng", "--ckpt-step",
}  # fmt: skip

# One submission is one job, whose id sbatch prints at once.
_OUR_OPTIONS = {"array", "export-file", "parsable", "test-only", "wait", "wrap"}

# How the comment of every job of ours begins.
_SUBMITTED = "fp8launch:"

# Slurm expands % in the names of log files, and a #SBATCH line is no place for quotes or line ends.
_SAFE_FOLDER = re.compile(r"/[\w./@+=:, -]*")


def plan(
    loaded: LoadedRecipe,
    args: MegatronArgs,
    cluster: Cluster,
    folder: Path | None,
    *,
    phases: Sequence[Phase] = (),
    runtime: Runtime | None = None,
    check_paths: bool = True,
) -> Job:
    """The job for a recipe on a cluster; `phases` are those of the recipe, and `args` then the first one's.

    `folder` is the run folder to be; None plans a portable script. `runtime` runs the recipe's image; None or "none"
    ignores the image. `check_paths` is off for what is only shown. Raises UserError for images and mounts that do not
    exist.
    """
    recipe = loaded.recipe
    if folder is not None and not _SAFE_FOLDER.fullmatch(str(folder)):
        raise error(
            "run-folder-name",
            f"the run folder {str(folder)!r} has characters that Slurm or a shell reads otherwise",
            fix="choose a run root of letters, digits, spaces and ./@+=:,_-",
        )
    for part in [loaded, *(phase.loaded for phase in phases)]:
        refuse_reserved(part, cluster)
    if phases and folder is None:
        raise error(
            "portable-phases", "a portable script knows of no run before it, so it cannot know the phase", "phases",
            "submit the recipe, or render one of its phases with --phase", 1,
        )  # fmt: skip
    mode: Mode = recipe.launch.mode or cluster.launch or "srun"
    container = _container(loaded, cluster, runtime, check_paths)
    # A portable script makes its run folder when it runs: nothing there could know of an attempt before it.
    survival, argv = _survival(recipe, args, container, folder) if folder is not None else (None, args.argv)
    environment = _environment(recipe, cluster)
    if phases:
        each = [(one, _environment(one.loaded.recipe, cluster, one.begin), _always(one.args.argv)) for one in phases]
        environment, argv, job_phases = _shared(each)
    return Job(
        name=recipe.name,
        description=recipe.description,
        folder=str(folder) if folder is not None else None,
        nodes=recipe.resources.nodes,
        processes_per_node=recipe.resources.gpus_per_node,
        mode=mode,
        python=_python(recipe, cluster, runtime, portable=folder is None),
        megatron_args=argv,
        environment=environment,
        secrets=tuple(recipe.secrets),
        slurm=_slurm_options(recipe, cluster, folder, mode) + _ending(recipe, cluster, survival),
        setup=tuple(cluster.setup),
        container=container,
        training_script=_training_script(loaded, runtime, check_paths),
        mpi=cluster.mpi,
        cpus_per_task=_cpus_per_task(recipe, mode),
        health_gpus=_health_gpus(recipe, cluster),
        survival=survival,
        phases=job_phases if phases else (),
    )


def submission_comment(key: str) -> str:
    """What a job carries in Slurm, so that it can be found again when the answer to sbatch was lost."""
    return f"{_SUBMITTED}{key}"


def submission_key(comment: object) -> str | None:
    """The key in a job's comment; None for a comment that is not ours."""
    text = str(comment)
    return text.removeprefix(_SUBMITTED) if text.startswith(_SUBMITTED) else None


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
        "the recipe names a container image, and this machine has neither pyxis nor Apptainer nor Charliecloud",
        "container.image",
        "state `runtime:` in the cluster profile, or run without an image: --set container.image=null",
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


def _environment(recipe: Recipe, cluster: Cluster, begin: int = 0) -> tuple[tuple[str, str], ...]:
    """Variables of a run, or of its phase that begins after iteration `begin`."""
    ours = {"PYTHONUNBUFFERED": "1", "FP8LAUNCH_DEVICE": "cpu" if recipe.resources.gpu == "cpu" else "cuda"}
    if not recipe.launch.probe:
        ours["FP8LAUNCH_PROBE"] = "0"
    if recipe.launch.profile_iteration:
        ours["FP8LAUNCH_PROFILE_ITERATION"] = str(begin + recipe.launch.profile_iteration)
    if recipe.launch.tensor_stats:
        ours["FP8LAUNCH_TENSOR_STATS"] = str(recipe.launch.tensor_stats)
    site = {name: str(value) for name, value in cluster.env.items()}
    return tuple({**ours, **recipe.launch.environment, **site, **recipe.environment}.items())


def _health_gpus(recipe: Recipe, cluster: Cluster) -> int | None:
    wanted = recipe.launch.health_check
    if not (cluster.health_check if wanted is None else wanted):
        return None
    return 0 if recipe.resources.gpu == "cpu" else recipe.resources.gpus_per_node


def _cpus_per_task(recipe: Recipe, mode: Mode) -> int | None:
    cpus = recipe.resources.cpus_per_task
    return cpus * recipe.resources.gpus_per_node if cpus and mode == "torchrun" else cpus


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
    if need.gpu != "cpu" and cluster.gpus == "gpus-per-node":
        kind = f"{cluster.gres_type}:" if cluster.gres_type else ""
        options["gpus-per-node"] = f"{kind}{need.gpus_per_node}"
    elif need.gpu != "cpu" and cluster.gpus == "gres":
        options["gres"] = f"gpu:{cluster.gres_type + ':' if cluster.gres_type else ''}{need.gpus_per_node}"
    cpus = _cpus_per_task(recipe, mode)
    named = {
        "cpus-per-task": str(cpus) if cpus else None,
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
    options |= {name: value for name, value in named.items() if value is not None}
    if cluster.exclusive:
        options["exclusive"] = None
    if cluster.requeue is not None:
        options["requeue" if cluster.requeue else "no-requeue"] = None
    options["output"] = str(folder / "logs" / "slurm-%j.out") if folder else "%x-%j.out"
    options["open-mode"] = "append"
    if folder is not None:
        options["comment"] = submission_comment(folder.name)
    for name, value in cluster.options.items():
        if name in _OUR_OPTIONS:
            raise error(
                "reserved-option",
                f"the option --{name} would keep fp8launch from knowing its jobs",
                f"cluster profile: options.{name}",
                "drop it",
            )
        if value is not False:
            options[name] = None if value is True else str(value)
    return tuple(options.items())


def _survival(
    recipe: Recipe, args: MegatronArgs, container: Container | None, folder: Path
) -> tuple[Survival | None, tuple[str, ...]]:
    """How the run goes on, and the arguments that every one of its attempts has."""
    save = args.values.get("save")
    if not recipe.goes_on or not isinstance(save, str):
        return None, args.argv
    first = [word for flag in flags_of(args.argv) if flag[0] in _FIRST_START for word in flag]
    return Survival(save, _on_the_host(save, container, folder), tuple(first)), _always(args.argv)


def _always(argv: Sequence[str]) -> tuple[str, ...]:
    """What every attempt of a run that goes on is started with, whatever it starts from."""
    # Slurm says SIGTERM before it ends or preempts a job: then save and leave.
    leave = [] if "--exit-signal-handler" in argv else ["--exit-signal-handler"]
    return (*(word for flag in flags_of(argv) if flag[0] not in _FIRST_START for word in flag), *leave)


Pairs = tuple[tuple[str, str], ...]


def _shared(each: Sequence[tuple[Phase, Pairs, Sequence[str]]]) -> tuple[Pairs, tuple[str, ...], tuple[JobPhase, ...]]:
    """Environment and arguments that all phases have, and each phase with what it has beside them."""
    environments = [dict(environment) for _, environment, _ in each]
    common = {k: v for k, v in environments[0].items() if all(env.get(k) == v for env in environments)}
    lists = [flags_of(argv) for _, _, argv in each]
    shared = [flag for flag in lists[0] if all(flag in flags for flags in lists)]
    phases = tuple(
        JobPhase(
            phase.name,
            phase.end,
            tuple(word for flag in flags if flag not in shared for word in flag),
            tuple((k, v) for k, v in environment.items() if k not in common),
        )
        for (phase, _, _), environment, flags in zip(each, environments, lists, strict=True)
    )
    return tuple(common.items()), tuple(word for flag in shared for word in flag), phases


def _on_the_host(path: str, container: Container | None, folder: Path) -> str:
    """Where the batch host has what the processes call `path`."""
    for mount in sorted(container.mounts if container else (), key=lambda m: -len(m.target)):
        if path == mount.target or path.startswith(mount.target.rstrip("/") + "/"):
            return mount.source.rstrip("/") + path[len(mount.target.rstrip("/")) :]
    return str(folder / path)


def continue_by(cluster: Cluster) -> str:
    """How a further attempt comes on a cluster: `requeue` of the same job unless the profile says otherwise."""
    return cluster.continue_by or ("dependency" if cluster.requeue is False else "requeue")


def stop_before(recipe: Recipe) -> int:
    """Seconds before the time limit when the training saves and leaves; never more than a quarter of it."""
    return max(1, min(recipe.survive.stop_before, int(recipe.resources.hours * 3600) // 4))


def _ending(recipe: Recipe, cluster: Cluster, survival: Survival | None) -> tuple[tuple[str, str | None], ...]:
    """What Slurm must know so that a run can go on: a last word to the processes, and whether to start it again."""
    if survival is None:
        return ()
    options: dict[str, str | None] = {}
    if "signal" not in cluster.options:
        # Without B: it reaches the processes. They should be gone by then: they keep to the time themselves.
        options["signal"] = f"TERM@{max(1, stop_before(recipe) // 2)}"
    if (recipe.survive.attempts > 1 or recipe.phases) and cluster.requeue is None:
        # With a job that waits, Slurm starting this one again by itself would make two.
        options["requeue" if continue_by(cluster) == "requeue" else "no-requeue"] = None
    return tuple(options.items())


def _container(loaded: LoadedRecipe, cluster: Cluster, runtime: Runtime | None, check: bool) -> Container | None:
    recipe = loaded.recipe
    if recipe.container.image is None or runtime is None or runtime == "none":
        return None
    image = image_for(recipe.container.image, runtime, cluster, loaded.where("container", "image"), check)
    mounts, problems = [], []
    stated = [(text, loaded.where("container", "mounts", i)) for i, text in enumerate(recipe.container.mounts)]
    for text, where in [*((m, "cluster profile: mounts") for m in cluster.mounts), *stated]:
        found = _mount(text, where, check)
        if isinstance(found, Problem):
            problems.append(found)
        else:
            mounts.append(found)
    if problems:
        raise UserError(problems, exit_code=3 if all(p.code == "mount-missing" for p in problems) else 2)
    return Container(runtime, image, tuple(mounts), gpus=recipe.resources.gpu != "cpu")


def _mount(text: str, where: str, check: bool) -> Mount | Problem:
    source, _, rest = text.partition(":")
    target, _, mode = rest.partition(":")
    source = str(local_path(source, where)) if source.startswith("~") else source
    target = target or source
    if not source.startswith("/") or not target.startswith("/") or mode not in ("", "ro", "rw") or "," in text:
        return Problem(
            "error", "bad-mount", f"mount '{text}' must look like /source[:/target[:ro]], without commas", where
        )
    if check and not is_there(Path(source)):
        message = f"mount source {source} does not exist on this machine"
        return Problem("error", "mount-missing", message, where, "create it or drop it")
    return Mount(source, target, mode == "ro")


def _training_script(loaded: LoadedRecipe, runtime: str | None, check: bool) -> str | None:
    script = loaded.recipe.launch.script
    if script is None or runtime not in (None, "none"):
        return script
    path = local_path(script, loaded.where("launch", "script"))
    if check and not is_file(path):
        raise error("script-missing", f"training script {path} does not exist", loaded.where("launch", "script"))
    return str(path)

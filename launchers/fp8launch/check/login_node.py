"""Check what this machine can see of a run: run root, image, mounts, files, and the cluster via its scheduler."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fp8launch import schedulers
from fp8launch.check import checkpoint_space, checkpoints, files, pickled_state, run_root
from fp8launch.check.job_paths import job_paths, kind_of
from fp8launch.check.resolved_run import resolve_run
from fp8launch.cluster.images import image_for, local_path, software_in
from fp8launch.cluster.profile import Cluster
from fp8launch.cluster.runtimes import Runtime
from fp8launch.cluster.storage import CHECKPOINTS
from fp8launch.diagnostics import Problem, Severity, UserError
from fp8launch.injob.ownership import foreign_owner
from fp8launch.injob.rank.optional_packages import needs
from fp8launch.injob.regular_files import open_regular
from fp8launch.job.build_job import UNPLACED, plan
from fp8launch.job.container import stated_mounts
from fp8launch.job.job import Job
from fp8launch.job.prepared import Prepared
from fp8launch.job.reserved_env import missing_secrets
from fp8launch.recipe.load import LoadedRecipe
from fp8launch.schedulers import probe_runtime
from fp8launch.schedulers.base import Scheduler
from fp8launch.schedulers.environment import clean_environment

# The codes of this layer. Errors from planning a job keep their own codes.
CODES: Mapping[str, Severity] = {
    **dict.fromkeys(("secret-missing", "python-missing", "python-packages"), "error"),
    **dict.fromkeys(("image-missing", "image-not-local", "image-unreadable", "unknown-image"), "error"),
    **dict.fromkeys(
        ("mount-missing", "bad-mount", "mount-read-only", "no-container-runtime", "script-missing"), "error"
    ),
    "image-software": "warning",
    **run_root.CODES,
    **files.CODES,
    **checkpoint_space.CODES,
    **checkpoints.CODES,
    **pickled_state.CODES,
}


# If a Python on a slow file system does not answer in this time, its packages are not checked.
ANSWER_SECONDS = 20.0


@dataclass(frozen=True)
class Inspection:
    """The problems of a run on this machine.

    `runtime` is the container runtime, or None if it cannot be determined here. `job` is the run's job, still without a
    run folder. It is None if no job can be planned or if the runtime is only an assumption.
    """

    problems: tuple[Problem, ...] = ()
    runtime: Runtime | None = None
    job: Job | None = None


def inspect_run(
    prepared: Prepared, cluster: Cluster, environment: Mapping[str, str], scheduler: Scheduler | None = None
) -> Inspection:
    """Plan a run's job, and find problems with this machine and its scheduler, except for files and checkpoints.

    `environment` is that of the submitting shell. `scheduler` will receive the job; None means the cluster's.
    """
    loaded = prepared.loaded
    found = list(run_root.problems(cluster, environment, scheduler))
    found += [*missing_secrets(loaded, environment), *_image_content(prepared)]
    assumed = _only_assumed(loaded, cluster, environment)
    # pyxis accepts nearly every image name, so assuming it causes no false alarms.
    runtime = "pyxis" if assumed else _runtime(loaded, cluster, environment)
    if isinstance(runtime, Problem):
        job, _ = _plan(prepared, cluster, "pyxis")
        found += [runtime, *_asked(scheduler, job, loaded, cluster, environment)]
        return Inspection(tuple(found))
    here = [
        *_image(loaded, cluster, runtime),
        *_mounts(loaded, cluster, runtime),
        *_interpreter(loaded, cluster, runtime),
    ]
    starts_containers = scheduler is None or scheduler.capabilities.pyxis or runtime != "pyxis"
    job, refused = _plan(prepared, cluster, runtime if starts_containers else "none")
    # Planning stops at its first problem, which the functions above may have reported better.
    found += here or refused
    if job is not None and not here:
        found += _entry(prepared, runtime)
        if runtime == "none" and scheduler is not None and scheduler.capabilities.on_this_machine:
            found += _packages(prepared, cluster, job, environment)
    found += _asked(scheduler, job, loaded, cluster, environment)
    return Inspection(tuple(found), runtime, None if assumed else job)


def file_problems(
    part: Prepared, cluster: Cluster, environment: Mapping[str, str], runtime: Runtime | None
) -> Iterator[Problem]:
    """Find problems with the files and checkpoints of a run without phases, or of one phase."""
    yield from files.problems(part, cluster, environment, runtime)
    yield from checkpoint_space.problems(part, cluster, runtime)
    yield from checkpoints.survival_problems(part)
    yield from checkpoints.health_problems(part.loaded)


def _plan(prepared: Prepared, cluster: Cluster, runtime: Runtime) -> tuple[Job | None, Sequence[Problem]]:
    """Return the job, or the problems that prevent it. Other functions report missing files."""
    try:
        return plan(prepared, cluster, UNPLACED, runtime=runtime, check_paths=False), ()
    except UserError as exc:
        return None, exc.problems


def _entry(prepared: Prepared, runtime: Runtime) -> Sequence[Problem]:
    try:
        prepared.engine.entry(prepared.loaded, runtime != "none", True)
    except UserError as exc:
        return exc.problems
    return ()


def _asked(
    scheduler: Scheduler | None,
    job: Job | None,
    loaded: LoadedRecipe,
    cluster: Cluster,
    environment: Mapping[str, str],
) -> Iterable[Problem]:
    if job is None:
        return ()
    return map(cluster.blamed, (scheduler or schedulers.cluster()).problems(job, loaded, environment))


def _runtime(loaded: LoadedRecipe, cluster: Cluster, environment: Mapping[str, str]) -> Runtime | Problem:
    if loaded.recipe.container.image is None:
        return "none"
    try:
        return probe_runtime(cluster, clean_environment(environment))
    except UserError as exc:
        return exc.problems[0]


def _only_assumed(loaded: LoadedRecipe, cluster: Cluster, environment: Mapping[str, str]) -> bool:
    """Return whether the runtime is unknown because the run is for a cluster that this machine cannot query."""
    if loaded.recipe.container.image is None or cluster.runtime is not None:
        return False
    return not schedulers.cluster().answers(environment)


def _image(loaded: LoadedRecipe, cluster: Cluster, runtime: Runtime) -> Iterator[Problem]:
    name = loaded.recipe.container.image
    if name is None or runtime == "none":
        return
    try:
        image = image_for(name, runtime, cluster, loaded.where("container", "image"))
    except UserError as exc:
        yield from exc.problems
        return
    if image.startswith("/") and not os.access(image, os.R_OK):
        message = f"container image {image} is not readable by you"
        yield Problem("error", "image-unreadable", message, loaded.where("container", "image"), f"chmod a+r {image}")


def _mounts(loaded: LoadedRecipe, cluster: Cluster, runtime: Runtime) -> Iterator[Problem]:
    if loaded.recipe.container.image is None or runtime == "none":
        return
    for text, where in stated_mounts(loaded, cluster):
        if where == CHECKPOINTS:
            continue  # `submit` creates it
        source = text.partition(":")[0]
        try:
            path = local_path(source, where)
        except UserError as exc:
            yield from exc.problems
            continue
        if source.startswith(("/", "~")) and kind_of(path) == "missing":
            if job_paths(loaded, cluster).promise(path) is not None:
                continue
            message = f"mount source {path} does not exist on this machine"
            yield Problem("error", "mount-missing", message, where, "create it, or remove the mount")


def _interpreter(loaded: LoadedRecipe, cluster: Cluster, runtime: Runtime) -> Iterator[Problem]:
    """Check that the Python of a job without a container exists."""
    python, where = _stated_python(loaded, cluster)
    if runtime == "none" and python is not None and python.startswith("/") and not os.access(python, os.X_OK):
        message = f"the job's Python {python} does not exist on this machine, or is not executable"
        yield Problem("error", "python-missing", message, where, "correct the path")


def _stated_python(loaded: LoadedRecipe, cluster: Cluster) -> tuple[str | None, str]:
    """Return the Python set by the recipe or the profile, and the place where it is set."""
    python = loaded.recipe.launch.python
    if python is None and cluster.python is not None:
        return cluster.python, "cluster profile: python"
    return python, loaded.where("launch", "python")


# Prints those of its arguments that are not installed modules. It imports only their parent packages.
_NOT_INSTALLED = """
import importlib.util, sys
def there(name):
    try:
        return importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
print(*[name for name in sys.argv[1:] if not there(name)])
"""


def _packages(prepared: Prepared, cluster: Cluster, job: Job, environment: Mapping[str, str]) -> Iterator[Problem]:
    """Find packages that the engine's processes import but that the job's Python on this machine lacks."""
    packages = prepared.engine.packages
    run = resolve_run(prepared)
    optional = {need.module: need for need in needs(run.value)}
    variables = {**clean_environment(environment), **dict(job.environment)}
    _, where = _stated_python(prepared.loaded, cluster)
    python = shutil.which(job.python, path=variables.get("PATH"))
    # Commands of the profile, such as `module load`, may add packages or another Python.
    if job.setup or python is None or not _may_be_asked(python):
        return
    command = [python, "-c", _NOT_INSTALLED, *packages, *optional]
    try:
        done = subprocess.run(
            command, env=variables, cwd="/", capture_output=True, errors="replace", timeout=ANSWER_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return
    absent = done.stdout.split()
    for name, need in optional.items():
        if name in absent:
            message = f"{need.reason} imports {name}, which is missing in the job's Python {job.python}"
            yield Problem("error", "python-packages", message, run.where(need.setting), f"install it: {need.install}")
    missing = [packages[name] for name in absent if name in packages]
    if missing:
        message = f"the job's Python {job.python} has no {' and no '.join(missing)}, which the run imports"
        by_pip = f"install them with `{job.python} -m pip install {_requirements(missing)}`"
        fix = f"{prepared.engine.installation or by_pip}, or name a Python that has them: "
        yield Problem("error", "python-packages", message, where, fix + "launch.python, or `python:` in the profile")


def _requirements(distributions: Sequence[str]) -> str:
    """Return pip's arguments for distributions, limited to versions that fp8launch was tested with.

    Without limits, pip would install the newest torch and, on Python before 3.12, a megatron-core without training
    code.
    """
    from importlib.metadata import PackageNotFoundError, requires

    from packaging.requirements import Requirement

    ranges = {}
    texts = None
    with suppress(PackageNotFoundError):  # run from its source
        texts = requires("fp8launch")
    for text in texts or []:
        requirement = Requirement(text)
        ranges[requirement.name] = str(requirement.specifier)
    words = " ".join(f"'{name}{ranges[name]}'" if ranges.get(name) else name for name in distributions)
    if "megatron-core" in distributions:
        words += ", with Python 3.12 or newer"
    return words


def _may_be_asked(python: str) -> bool:
    """Return whether a Python belongs to this user or the system. Anyone else's could run arbitrary code."""
    if not python.startswith("/") or foreign_owner(Path(python)):
        return False
    with open_regular(Path(python)) as file:
        return file.read(4) == b"\x7fELF"


def _image_content(prepared: Prepared) -> Iterator[Problem]:
    """Compare the software in the recipe with the published versions of the image."""
    recipe, loaded = prepared.loaded.recipe, prepared.loaded
    image = recipe.container.image
    there = software_in(image)
    said = recipe.software.megatron
    # Versions that the recipe does not set come from the image.
    if said is not None and "megatron" in there and _minor(said) != _minor(there["megatron"]):
        message = f"the recipe is written for Megatron-Core {said}, but image {image} contains {there['megatron']}"
        fix = "remove software.megatron to use the image's version, or choose another image"
        yield Problem("warning", "image-software", message, loaded.where("software", "megatron"), fix)
    for package, label in (("transformer_engine", "Transformer Engine"), ("cuda", "CUDA")):
        said, has = getattr(recipe.software, package), there.get(package)
        # A lower version is only a minimum: the pack's hardware parts set it no matter which image is used.
        if said is not None and has is not None and _minor(said) > _minor(has):
            message = f"the recipe expects {label} {said}, but image {image} contains {has}"
            where = loaded.where("software", package)
            fix = f'set software.{package} to "{has}", or choose a newer image'
            yield Problem("warning", "image-software", message, where, fix)


def _minor(version: str) -> tuple[int, ...]:
    """Return the major and minor version."""
    return tuple(int(part) for part in version.split(".")[:2] if re.fullmatch("[0-9]{1,9}", part))

"""What the machine has against a run: run root, image and mounts here, files in `data`, the cluster in `slurm`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from fp8launch.backends.slurm import clean_environment
from fp8launch.check import data, slurm, space
from fp8launch.check.job_paths import kind_of, why_not_writable
from fp8launch.check.site import Site, read_site
from fp8launch.job.cluster import Cluster, Runtime
from fp8launch.job.images import image_for, local_path, software_in
from fp8launch.job.plan import plan, probe_runtime
from fp8launch.problems import Problem, Severity, UserError
from fp8launch.recipe.load import LoadedRecipe

if TYPE_CHECKING:
    from fp8launch.runs.submit import Prepared

MIB = 1024**2
# A run folder is the in-job code, the manifest and the logs: about a megabyte, and logs grow. Checkpoints come on top.
LEAST_SPACE, LITTLE_SPACE = 16 * MIB, 1024 * MIB
# Files of a run folder, without checkpoints.
LEAST_FILES = 100


# Every code of this layer. An error of `plan` keeps the code that it has there.
CODES: Mapping[str, Severity] = {
    **dict.fromkeys(("run-root", "run-root-full", "secret-missing", "python-missing"), "error"),
    **dict.fromkeys(("image-missing", "image-not-local", "image-unreadable", "unknown-image"), "error"),
    **dict.fromkeys(("mount-missing", "bad-mount", "no-container-runtime", "script-missing"), "error"),
    **dict.fromkeys(("run-root-low", "image-software"), "warning"),
    **data.CODES,
    **slurm.CODES,
    **space.CODES,
}


def problems(prepared: Prepared, cluster: Cluster, environment: Mapping[str, str]) -> Iterator[Problem]:
    """What this machine, its files and its Slurm have against a run. `environment` is the submitting shell's."""
    yield from local_problems(prepared, cluster, environment)
    yield from data.problems(prepared, cluster, environment)
    yield from space.problems(prepared, cluster)
    yield from slurm.problems(prepared, cluster, environment)


def local_problems(prepared: Prepared, cluster: Cluster, environment: Mapping[str, str]) -> Iterator[Problem]:
    """What is missing on this machine: a place for run folders, secrets, a container runtime, image, mounts."""
    loaded = prepared.loaded
    yield from _run_root(cluster)
    yield from _secrets(loaded, environment)
    yield from _image_content(prepared)
    runtime = _runtime(loaded, cluster, environment)
    if isinstance(runtime, Problem):
        yield runtime
        return
    found = [
        *_image(loaded, cluster, runtime),
        *_mounts(loaded, cluster, runtime),
        *_interpreter(loaded, cluster, runtime),
    ]
    yield from found
    if found:
        return
    # Whatever else planning refuses, it refuses one at a time.
    try:
        plan(loaded, prepared.args, cluster, Path("/run-folder"), runtime=runtime)
    except UserError as exc:
        yield from exc.problems


def _run_root(cluster: Cluster) -> Iterator[Problem]:
    from fp8launch.runs.submit import run_root

    where = "cluster profile: run_root" if cluster.run_root else "run root"
    fix = "choose another with --run-root, `run_root:` in the cluster profile, or FP8LAUNCH_RUNS"
    try:
        root = run_root(cluster, None)
    except UserError as exc:
        yield from exc.problems
        return
    if why := why_not_writable(root):
        yield Problem("error", "run-root", f"run folders would go to {root}: {why}", where, fix)
        return
    while kind_of(root) == "missing":
        root = root.parent
    disk = os.statvfs(root)
    free = disk.f_bavail * disk.f_frsize
    if free < LITTLE_SPACE:
        message = f"the file system of run root {root} has {free // MIB:,} MiB left"
        if free < LEAST_SPACE:
            yield Problem("error", "run-root-full", message, where, fix)
        else:
            yield Problem("warning", "run-root-low", message, where, fix)
    # File systems that make inodes as they go say that they have none at all.
    if disk.f_files and disk.f_favail < LEAST_FILES:
        message = f"the file system of run root {root} has room for {disk.f_favail} more files"
        yield Problem("error", "run-root-full", message, where, fix)


def _secrets(loaded: LoadedRecipe, environment: Mapping[str, str]) -> Iterator[Problem]:
    for i, name in enumerate(loaded.recipe.secrets):
        if not environment.get(name):
            message = f"the secret {name} is not set in this shell"
            fix = f"export {name}=... before submitting; it is passed on by name and written nowhere"
            yield Problem("error", "secret-missing", message, loaded.where("secrets", i), fix)


def _runtime(loaded: LoadedRecipe, cluster: Cluster, environment: Mapping[str, str]) -> Runtime | Problem:
    if loaded.recipe.container.image is None:
        return "none"
    if cluster.runtime is None and not isinstance(read_site(environment.get("SLURM_CONF")), Site):
        # Not the machine that the run is for; of the runtimes, pyxis leaves most to the image's name.
        return "pyxis"
    try:
        return probe_runtime(cluster, clean_environment(environment))
    except UserError as exc:
        return exc.problems[0]


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
        message = f"container image {image} cannot be read by you"
        yield Problem("error", "image-unreadable", message, loaded.where("container", "image"), f"chmod a+r {image}")


def _mounts(loaded: LoadedRecipe, cluster: Cluster, runtime: Runtime) -> Iterator[Problem]:
    if loaded.recipe.container.image is None or runtime == "none":
        return
    stated = [(text, "cluster profile: mounts") for text in cluster.mounts]
    stated += [(m, loaded.where("container", "mounts", i)) for i, m in enumerate(loaded.recipe.container.mounts)]
    for text, where in stated:
        source = text.partition(":")[0]
        try:
            path = local_path(source, where)
        except UserError as exc:
            yield from exc.problems
            continue
        if source.startswith(("/", "~")) and kind_of(path) == "missing":
            message = f"mount source {path} does not exist on this machine"
            yield Problem("error", "mount-missing", message, where, "create it or drop it")


def _interpreter(loaded: LoadedRecipe, cluster: Cluster, runtime: Runtime) -> Iterator[Problem]:
    """Without a container the job's Python is one of this machine's file systems."""
    python, where = loaded.recipe.launch.python, loaded.where("launch", "python")
    if python is None:
        python, where = cluster.python, "cluster profile: python"
    if runtime == "none" and python is not None and python.startswith("/") and not os.access(python, os.X_OK):
        message = f"the job's Python {python} does not exist here or cannot be run"
        yield Problem("error", "python-missing", message, where, "correct the path")


def _image_content(prepared: Prepared) -> Iterator[Problem]:
    """What the recipe says of its software against what is published of the image."""
    recipe, loaded = prepared.loaded.recipe, prepared.loaded
    image = recipe.container.image
    there = software_in(image)
    said = recipe.software.megatron
    # What is not said, translation takes from the image.
    if said is not None and "megatron" in there and _minor(said) != _minor(there["megatron"]):
        message = f"the arguments are written for Megatron-Core {said}, and image {image} has {there['megatron']}"
        fix = "leave software.megatron out, which takes the image's, or choose another image"
        yield Problem("warning", "image-software", message, loaded.where("software", "megatron"), fix)
    for package, label in (("transformer_engine", "Transformer Engine"), ("cuda", "CUDA")):
        said, has = getattr(recipe.software, package), there.get(package)
        # A lower version is read as the least that is needed: parts for a GPU say it for every image.
        if said is not None and has is not None and _minor(said) > _minor(has):
            message = f"the recipe counts on {label} {said}, and image {image} has {has}"
            where = loaded.where("software", package)
            fix = f'set software.{package} to "{has}", or choose a newer image'
            yield Problem("warning", "image-software", message, where, fix)


def _minor(version: str) -> tuple[int, ...]:
    """The first two numbers of a version."""
    return tuple(int(part) for part in version.split(".")[:2] if re.fullmatch("[0-9]{1,9}", part))

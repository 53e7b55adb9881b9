"""Plan the container of a job: its image and mounts. Also maps paths inside the container to paths on the host."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Sequence
from pathlib import Path

from fp8launch.cluster.images import image_for, local_path
from fp8launch.cluster.profile import Cluster
from fp8launch.cluster.runtimes import Runtime
from fp8launch.cluster.storage import CHECKPOINTS, storage_mounts
from fp8launch.diagnostics import BAD_INPUT, MACHINE_LACKS, Problem, UserError
from fp8launch.job.job import Container, Mount
from fp8launch.recipe.load import LoadedRecipe
from fp8launch.recipe.yaml_source import is_there


def plan_container(loaded: LoadedRecipe, cluster: Cluster, runtime: Runtime | None, check: bool) -> Container | None:
    """Return the container of a recipe's job, or None if there is no image or no runtime.

    With `check`, the image and all mount sources must exist on this machine. Raises UserError with all problems.
    """
    recipe = loaded.recipe
    if recipe.container.image is None or runtime is None or runtime == "none":
        return None
    image = image_for(recipe.container.image, runtime, cluster, loaded.where("container", "image"), check)
    mounts, problems = [], []
    for text, where in stated_mounts(loaded, cluster):
        # `submit` creates the folder for checkpoints, so it may be missing now.
        found = _mount(text, where, runtime, check and where != CHECKPOINTS)
        if isinstance(found, Problem):
            problems.append(found)
        else:
            mounts.append(found)
    if problems:
        missing = all(problem.code == "mount-missing" for problem in problems)
        raise UserError(problems, exit_code=MACHINE_LACKS if missing else BAD_INPUT)
    return Container(runtime, image, tuple(mounts), gpus=recipe.resources.gpu != "cpu")


def stated_mounts(loaded: LoadedRecipe, cluster: Cluster) -> Iterator[tuple[str, str]]:
    """Yield the mounts of a job's container as text, the cluster's before the recipe's, and the place of each."""
    for text in cluster.mounts:
        yield text, "cluster profile: mounts"
    yield from storage_mounts(cluster)
    for index, text in enumerate(loaded.recipe.container.mounts):
        yield text, loaded.where("container", "mounts", index)


def _mount(text: str, where: str, runtime: Runtime, check: bool) -> Mount | Problem:
    """Return the mount that a recipe or profile states, or its problem."""
    mount, mode = parse_mount(text, where), "".join(text.split(":", 2)[2:])
    if mount is None or mode not in ("", "ro", "rw") or "," in text:
        return Problem(
            "error", "bad-mount", f"mount '{text}' must look like /source[:/target[:ro]], without commas", where
        )
    if mount.read_only and runtime == "charliecloud":
        message = f"mount '{text}' is read-only, but Charliecloud does not support read-only mounts"
        fix = "remove ':ro', and protect the files with permissions if needed"
        return Problem("error", "mount-read-only", message, where, fix)
    if check and not is_there(Path(mount.source)):
        message = f"mount source {mount.source} does not exist on this machine"
        return Problem("error", "mount-missing", message, where, "create it, or remove the mount")
    return mount


def parse_mount(text: str, where: str | None = None) -> Mount | None:
    """Parse `/source[:/target[:mode]]` and expand `~`; None if the text is not a mount.

    Raises UserError for a home folder that does not exist.
    """
    source, _, rest = text.partition(":")
    target, _, mode = rest.partition(":")
    if source.startswith("~"):
        source = str(local_path(source, where))
    target = target or source
    if not source.startswith("/") or not target.startswith("/"):
        return None
    return Mount(source, target, mode == "ro")


def covering(mounts: Sequence[Mount], path: str) -> Mount | None:
    """Return the mount that covers an absolute path in the container. A later mount hides earlier ones."""
    path = clean(path)
    for mount in reversed(mounts):
        if is_below(path, clean(mount.target)):
            return mount
    return None


def on_host(mounts: Sequence[Mount], path: str) -> str | None:
    """Map an absolute path in the container to the host; None if no mount covers it."""
    mount = covering(mounts, path)
    if mount is None:
        return None
    rest = posixpath.relpath(clean(path), clean(mount.target))
    return clean(posixpath.join(mount.source, rest))


def clean(path: str) -> str:
    """Return an absolute path without `.`, `..` and doubled slashes."""
    return "/" + posixpath.normpath(path).lstrip("/")


def is_below(path: str, folder: str) -> bool:
    """Return whether `path` is `folder` or inside it. Both must be normalized."""
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def path_on_host(path: str, container: Container | None, folder: Path) -> str:
    """Map a path as the processes see it to the batch host. `folder` is the run folder."""
    if container is None or not path.startswith("/"):
        return str(folder / path)
    own = Mount(str(folder), str(folder))
    # Paths that no mount covers, such as /tmp, belong to the container. Checks refuse output that would be lost there.
    return on_host((*container.mounts, own), path) or path

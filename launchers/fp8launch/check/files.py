"""Check the files that a run reads and the folders that it writes, as far as this machine can access them.

Megatron's validators do not look at files. Without this check, such mistakes stop or silently spoil a run after it has
waited in the queue.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from fp8launch.check import training_script
from fp8launch.check.checkpoints import load_problems, owner_problems
from fp8launch.check.data import blend_problems
from fp8launch.check.job_paths import (
    RECIPE_NAMES,
    JobPaths,
    Kind,
    is_remote,
    job_paths,
    local_path_in,
    missing_path,
    not_mounted,
    unexpanded,
    why_not_writable,
)
from fp8launch.check.pickled_state import pickled_state_problems
from fp8launch.check.tokenizers import tokenizer_problems
from fp8launch.cluster.profile import Cluster
from fp8launch.cluster.runtimes import Runtime
from fp8launch.cluster.storage import CHECKPOINTS, DATA, checkpoint_place, data_place
from fp8launch.diagnostics import Problem, Severity
from fp8launch.engines.base import EngineArguments
from fp8launch.job.prepared import Prepared
from fp8launch.megatron.path_flags import PATH_FLAGS, READ_FILES, READ_FOLDERS, WRITTEN_FILES, WRITTEN_FOLDERS

_ERRORS = (
    "path-not-expanded", "path-relative", "path-not-mounted", "file-missing", "not-writable", "data-blend",
    "data-split", "data-missing", "data-unreadable", "data-broken", "data-cache", "data-too-short", "data-manifest",
    "data-vocabulary", "data-other-tokenizer", "tokenizer-missing", "checkpoint-missing",
)  # fmt: skip
_WARNINGS = ("data-manifest-unread", "data-blend-unread", "data-epochs", "tokenizer-from-network")
CODES: Mapping[str, Severity] = {
    **training_script.CODES,
    **dict.fromkeys(_ERRORS, "error"),
    **dict.fromkeys(_WARNINGS, "warning"),
}


def problems(
    prepared: Prepared, cluster: Cluster, environment: Mapping[str, str], runtime: Runtime | None = None
) -> Iterator[Problem]:
    """Yield the problems of a run's files: data, tokenizer, checkpoints, caches, and other paths in flags.

    `environment` is that of the submitting shell and locates the Hugging Face cache. `runtime` runs the recipe's image.
    """
    args, paths = prepared.args, job_paths(prepared.loaded, cluster, runtime)
    yield from _programs(prepared, paths)
    yield from training_script.problems(prepared.loaded, paths, cluster.trust_run_root)
    yield from owner_problems(prepared.loaded, paths)
    yield from pickled_state_problems(prepared, paths, cluster.trust_run_root)
    if not prepared.engine.description.covers("megatron_lm"):
        if prepared.engine.description.covers("megatron_core"):
            named = replace(args, values=args.attributes, places=args.attribute_places)
            yield from _unexpanded(named, *WRITTEN_FOLDERS)
            yield from _written(named, paths)
        return
    yield from _unexpanded(args, *PATH_FLAGS)
    yield from _named_files(args, paths)
    yield from blend_problems(prepared, paths)
    yield from tokenizer_problems(prepared, cluster, paths, environment)
    yield from load_problems(args, paths, prepared.engine.defaults(args))
    yield from _written(args, paths)
    yield from _stored(args, cluster, paths)


def _paths_in(args: EngineArguments, *flags: str) -> Iterator[tuple[str, str]]:
    """Yield each of `flags` whose value is a path that can be looked up, with the path."""
    for flag in flags:
        if text := local_path_in(args.values.get(flag)):
            yield flag, text


def _unexpanded(args: EngineArguments, *flags: str) -> Iterator[Problem]:
    for flag in flags:
        value = args.values.get(flag)
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and unexpanded(text):
                yield _not_expanded(flag, text, args.places.get(flag))


def _not_expanded(name: str, text: str, where: str | None) -> Problem:
    message = f"{name} is '{text}', but no shell expands '~' or '$' in the arguments of a run"
    return Problem("error", "path-not-expanded", message, where, "write an absolute path")


def _named_files(args: EngineArguments, paths: JobPaths) -> Iterator[Problem]:
    """Check files and folders. Other modules check datasets, tokenizers and the checkpoints that a run starts from."""
    for flag, text in _paths_in(args, *READ_FILES, *READ_FOLDERS):
        wanted: Kind = "folder" if flag in READ_FOLDERS else "file"
        name = RECIPE_NAMES.get(flag, flag)
        if problem := missing_path(name, text, args.places.get(flag), paths, wanted):
            yield problem


def _written(args: EngineArguments, paths: JobPaths) -> Iterator[Problem]:
    for flag, text in _paths_in(args, *WRITTEN_FOLDERS, *WRITTEN_FILES):
        where, name = args.places.get(flag), RECIPE_NAMES.get(flag, flag)
        if not text.startswith("/"):
            # The path is inside the run folder, which belongs to the user.
            if paths.leaves_the_run_folder(text):
                message = f"{name} '{text}' is outside the run folder, and the container has only the run folder"
                fix = "write an absolute path, and mount its folder"
                yield Problem("error", "path-not-mounted", message, where, fix)
        elif not paths.mounted(text):
            yield not_mounted(name, text, where, paths, "write")
        elif why := _why_not_written(flag, text, paths):
            fix = "choose a folder on the shared file system that the job can write to"
            yield Problem("error", "not-writable", f"{name} {text}: {why}", where, fix)


def _stored(args: EngineArguments, cluster: Cluster, paths: JobPaths) -> Iterator[Problem]:
    """Check the cluster profile's folders for data and checkpoints, if the run uses them."""
    save = args.values.get("save")
    for place, where, used in (
        (data_place(cluster), DATA, bool(args.values.get("data_path"))),
        (checkpoint_place(cluster), CHECKPOINTS, isinstance(save, str) and not save.startswith("/")),
    ):
        if place is None or not used:
            continue
        if paths.mounts is not None and paths.here(str(place)) != place:
            message = f"{place} is hidden in the container by one of the recipe's mounts, whose target is a parent"
            yield Problem("error", "path-not-mounted", message, where, "change or remove that mount")
        elif where == CHECKPOINTS and (why := why_not_writable(place)):
            yield Problem("error", "not-writable", f"checkpoints would go to {place}: {why}", where, "choose another")


def _why_not_written(flag: str, text: str, paths: JobPaths) -> str | None:
    if mount := paths.read_only(text):
        return f"the mount {mount} is read-only"
    here = paths.here(text)
    if here is None:
        return None
    if flag in WRITTEN_FILES:
        here = here.parent
    return why_not_writable(here)


def _programs(prepared: Prepared, paths: JobPaths) -> Iterator[Problem]:
    """Check the files that the engine needs. Without a container, planning the job checks the script and Python."""
    loaded = prepared.loaded
    for file in prepared.engine.files(loaded.recipe):
        if is_remote(file.path) or (file.planned and paths.mounts is None):
            continue
        where, name = loaded.where(*file.key), ".".join(file.key)
        if unexpanded(file.path):
            yield _not_expanded(name, file.path, where)
        elif problem := missing_path(name, file.path, where, paths, file.kind, file.code):
            yield problem
    if paths.mounts is None:
        return
    python = loaded.recipe.launch.python
    brought = ("/usr/", "/bin/", "/opt/")  # where images have their own Python
    if python is not None and python.startswith("/") and not python.startswith(brought) and not paths.visible(python):
        yield not_mounted("launch.python", python, loaded.where("launch", "python"), paths, "read")

"""Refuse training scripts that other users could change, so that their code cannot run under this account.

The job puts the script's folder first in `sys.path`, so anyone who can create files there controls what is imported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from fp8launch.check.job_paths import JobPaths
from fp8launch.cluster.images import local_path
from fp8launch.diagnostics import Problem, Severity, UserError
from fp8launch.injob.ownership import foreign_owner, other_writers
from fp8launch.recipe.load import LoadedRecipe
from fp8launch.recipe.yaml_source import is_file

CODES: Mapping[str, Severity] = {"script-not-safe": "error"}


def problems(loaded: LoadedRecipe, paths: JobPaths, trusts_group: bool) -> Iterator[Problem]:
    """Yield a problem if the script is on this machine and other users own it or can change it.

    `trusts_group` is the cluster profile's `trust_run_root`. Scripts inside the container image are not checked,
    because file permissions protect nothing there.
    """
    here = _on_this_machine(loaded, paths)
    if here is None or not is_file(here):
        return
    where = loaded.where("launch", "script")
    reason = _why_others_can_change(here, trusts_group)
    if reason is not None:
        message = f"other users could change what the training script runs: {reason}"
        fix = (
            "chmod go-w, or move the script to a folder that only you can write to; if everyone in a group may run "
            "code as you, set `trust_run_root: true` in the cluster profile"
        )
        yield Problem("error", "script-not-safe", message, where, fix)
    elif not trusts_group and (owner := _stranger(here, loaded)):
        message = f"the training script {here} belongs to {owner}, unlike the recipe next to it"
        yield Problem("error", "script-not-safe", message, where, "copy the script to a folder of your own")


def _on_this_machine(loaded: LoadedRecipe, paths: JobPaths) -> Path | None:
    text = loaded.recipe.launch.script
    if text is None:
        return None
    if paths.mounts is None:
        try:
            return local_path(text)
        except UserError:  # planning the job reports the error
            return None
    if not paths.mounted(text):
        return None
    return paths.here(text)


def _why_others_can_change(script: Path, trusts_group: bool) -> str | None:
    real = script.resolve()
    for place in dict.fromkeys((real, script.parent, real.parent)):
        writers = other_writers(place.stat())
        if writers is not None and not (trusts_group and writers != "everybody"):
            return f"{place} is writable by {writers}"
    return None


def _stranger(script: Path, loaded: LoadedRecipe) -> str | None:
    """Return the owner of a script next to its recipe if it is neither the recipe's owner nor root.

    A path into any other folder, such as a colleague's checkout, is an explicit choice of the recipe or the user.
    """
    for file in loaded.files:
        if file.resolve().parent == script.resolve().parent:
            return foreign_owner(script, file)
    return None

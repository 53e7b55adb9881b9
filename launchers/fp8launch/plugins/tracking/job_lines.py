"""Lines of a job's script that log the run to trackers, next to the training and without any effect on it."""

from __future__ import annotations

import functools
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from fp8launch.cli.output import eprint
from fp8launch.cluster.profile import Cluster
from fp8launch.job.job import Job
from fp8launch.job.script import host_python
from fp8launch.job.shell_quoting import quote
from fp8launch.plugins.tracking.section import tracking_in, tracking_of
from fp8launch.recipe.schema import Recipe
from fp8launch.rundir.study import is_trial
from fp8launch.schedulers.base import Scheduler

_PROGRAM = '"$code/../plugins/tracking/injob/follow.py"'
_NONE_YET = "trackers=()"


def start_trackers(job: Job, recipe: Recipe, cluster: Cluster) -> list[str]:
    """Start a process on the first node for each tracker of the recipe or the cluster profile.

    Each has its own process, so that a tracker which does not answer cannot hold up another one. Raises UserError for
    an invalid profile.
    """
    tracking = tracking_in(recipe, cluster)
    if not tracking.trackers or is_trial(job.folder):
        return []
    lines = ["# Live tracking: each tracker follows the log.", _NONE_YET]
    candidates = [tracking.python] if tracking.python else [*_own_python(job), sys.executable]
    for name, settings in tracking.trackers.items():
        python = host_python(job)
        if name != "tensorboard":
            python = quote(next((one for one in candidates if has_library(one, name)), candidates[-1]))
        words = f'{name} "$run_folder" "$attempt" {quote(json.dumps(settings))}'
        lines += [f"{python} {_PROGRAM} {words} < /dev/null &", "trackers+=($!)"]
        if getattr(tracking_of(recipe), name) is None:
            # `check` knows only what the recipe states.
            for problem in lacking(name, candidates):
                _warn(problem)
    return lines


def end_trackers(job: Job, scheduler: Scheduler) -> str | None:
    """Let the trackers log the rest. They limit the time that they take."""
    if _NONE_YET not in job.setup:
        return None
    return '[ -z "${trackers[*]:-}" ] || { kill "${trackers[@]}"; wait "${trackers[@]}"; } 2> /dev/null'


def lacking(tracker: str, candidates: list[str]) -> Iterator[str]:
    """Yield a sentence if none of these Pythons is known to have the library of a tracker."""
    if tracker != "tensorboard" and not any(has_library(one, tracker) for one in candidates):
        yield f"tracking.{tracker} needs the library {tracker}, which is not found in {' or '.join(candidates)}"


def has_library(python: str, library: str) -> bool:
    """Return whether a Python on this machine has a library, as far as its folders show. Nothing is executed."""
    if python == sys.executable:
        return importlib.util.find_spec(library) is not None
    prefix = Path(python).parent.parent
    return any(True for _ in prefix.glob(f"lib*/python3*/*-packages/{library}/__init__.py"))


def _own_python(job: Job) -> list[str]:
    return [job.python] if job.container is None and job.python.startswith("/") else []


@functools.cache
def _warn(problem: str) -> None:
    eprint(f"warning: {problem}")

"""The scheduler of a job as its supervisor sees it, and how the supervisor finds it.

A scheduler has two halves: one submits jobs (`fp8launch.schedulers.base.Scheduler`), this one runs inside them. A
run's survive.json names the second half as `scheduler: "module:class"`. Its module is copied into the run folder with
the package that holds it (`Plugin.in_job`).
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

PAUSES = (0, 5, 10, 20, 40, 60, 120)  # seconds before each try to reach a scheduler


class Submitted(NamedTuple):
    """The answer to a submission: the new job, or why there is none.

    `impossible`: no nodes of the cluster, whether free or not, can run the job. `passing`: the scheduler may accept the
    same request a little later.
    """

    job: str | None
    impossible: bool = False
    passing: bool = False


class State(NamedTuple):
    """What the scheduler is doing to a job that still runs its script.

    `ending`: it ends the job now. `preempted`: the job makes room for another one.
    """

    ending: bool = False
    preempted: bool = False


class Training:
    """The processes of a training, on all nodes."""

    def ask_for_stacks(self) -> None:
        """Have every process print its stack to the log (`rank/signals.py`)."""
        raise NotImplementedError

    def ask_to_save(self) -> bool:
        """Have the ranks save and exit, in their own time. False if the request failed."""
        raise NotImplementedError

    def end(self, at_once: bool = False) -> bool:
        """End the processes, without time to save if `at_once`. False if the request failed."""
        raise NotImplementedError


class JobScheduler:
    """One job of a run, queried and changed from inside it.

    Every method has a default for a scheduler that cannot do it, so a new scheduler implements only what it supports. A
    run with several attempts needs `restart` or `submit_next`. Node names are the scheduler's own.
    """

    def __init__(self, job: str, folder: Path, env: Mapping[str, str], plan: Mapping[str, Any]) -> None:
        """`folder` is the run folder, `env` the environment of the job's script, `plan` the content of survive.json."""
        self.job, self.folder, self.env, self.plan = job, folder, env, plan

    # This job

    def state(self) -> State:
        """Return what the scheduler is doing to this job."""
        return State()

    def end_time(self) -> float | None:
        """Return when the scheduler will end this job, in seconds since 1970 by this node's clock. None: unknown."""
        return None

    def node_list(self) -> str:
        """Return the nodes of this job in the scheduler's notation, for the record of the attempt."""
        return ",".join(self.hosts())

    def hosts(self) -> list[str]:
        """Return the nodes of this job, in the order of its tasks."""
        return []

    def tasks(self) -> int:
        """Return how many tasks of the training write to the log, 0 if unknown: they are numbered from 0."""
        return 0

    def nodes_of(self, tasks: Sequence[int]) -> list[str]:
        """Return the nodes of some tasks; none if unknown."""
        return []

    def training(self) -> Training | None:
        """Return the training's processes while they run."""
        return None

    def read_on(self, node: str, file: str) -> str:
        """Return the content of a file on another node of this job; empty if it cannot be read."""
        return ""

    # Reports of the scheduler

    def how_ended(self, job: str) -> str | None:
        """Return why another job of this run ended, as a cause in `retry_policy.RULES`; None if unknown."""
        return None

    def node_in_message(self, line: str) -> str | None:
        """Return the node that a line of the scheduler's own programs comes from; None for other lines."""
        return None

    def node_that_failed(self, output: str) -> str | None:
        """Return the node where a process failed first, according to the scheduler."""
        return None

    # The next attempt

    def restart(self) -> bool:
        """Have the scheduler start this job again. False if it refuses."""
        return False

    def submit_next(self, key: str, exclude: Sequence[str]) -> Submitted:
        """Submit a job of the same script that starts when this one has ended, without the nodes in `exclude`.

        A job that was submitted under this key before is returned instead: an answer may have been lost.
        """
        return Submitted(None)

    def exclude(self, job: str, nodes: Sequence[str]) -> None:
        """Keep a waiting job from starting on these nodes."""

    def can_run_without(self, nodes: Sequence[str]) -> bool:
        """Return whether the cluster has nodes for this job without these."""
        return True

    def has_free_node(self, excluded: Sequence[str]) -> bool:
        """Return whether a node outside this job is idle and not excluded."""
        return False

    def cancel(self, job: str) -> None:
        """Cancel a waiting job."""

    # Another run, which waits for this one

    def release(self, folder: Path, job: str | None) -> bool:
        """Let the run in `folder`, whose held job is `job`, start. False if the request failed."""
        return False


def load(job: str, folder: Path, env: Mapping[str, str], plan: Mapping[str, Any]) -> JobScheduler:
    """Return the scheduler that a plan names. Raises ValueError if it cannot be loaded."""
    target = str(plan.get("scheduler", f"{__name__}:JobScheduler"))
    module, _, name = target.partition(":")
    try:
        found: JobScheduler = getattr(importlib.import_module(module), name)(job, folder, env, plan)
    except (ImportError, AttributeError, ValueError) as problem:
        raise ValueError(f"its scheduler {target!r} cannot be loaded: {problem}") from None
    return found

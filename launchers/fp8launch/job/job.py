"""The frozen job: everything that a scheduler needs, and nothing that only one scheduler understands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from fp8launch.engines.base import Entry
from fp8launch.megatron.arguments import Argument, words_of
from fp8launch.recipe.field_types import LaunchMode


@dataclass(frozen=True)
class Resources:
    """What a job requests from its scheduler.

    `tasks_per_node` counts the processes that the scheduler starts on each node: one if torchrun starts the ranks.
    `time_limit` is written as in recipes (`resources.time`); None leaves it to the scheduler. `memory` is per node.
    `queue` is called partition by some schedulers. `restart` says whether the scheduler may start the job again after a
    failure or a preemption; None leaves it to the scheduler. `warn_seconds` before the time limit, processes get
    SIGTERM. `options` are settings of the cluster profile that only the scheduler reads.
    """

    nodes: int = 1
    tasks_per_node: int = 1
    gpus_per_node: int = 0
    cpus_per_task: int | None = None
    memory: str | None = None
    time_limit: str | None = None
    account: str | None = None
    queue: str | None = None
    nodelist: str | None = None
    exclude: str | None = None
    exclusive: bool = False
    restart: bool | None = None
    warn_seconds: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Mount:
    """A folder or file of the host at a place in the container; `read_only` if the runtime supports it."""

    source: str
    target: str
    read_only: bool = False

    def __str__(self) -> str:
        text = f"{self.source}:{self.target}"
        if self.read_only:
            text += ":ro"
        return text


@dataclass(frozen=True)
class Container:
    """How the processes get their file system. `image` is in the notation of `runtime`."""

    runtime: Literal["pyxis", "apptainer", "charliecloud"]
    image: str
    mounts: tuple[Mount, ...] = ()
    gpus: bool = True


@dataclass(frozen=True)
class Survival:
    """How a run continues after an attempt.

    `save` is the engine's own name of its checkpoints, `checkpoint` where the batch host has them. `resume` are the
    arguments of a start from such a checkpoint, `first_start` the arguments of a start without one. `pickled_state`
    says that the checkpoints hold state that Transformer Engine only loads from a trusted source. `skip_flag` is set
    for a run that may go back to a checkpoint: iterations whose batches are left out follow it.
    """

    save: str
    checkpoint: str
    resume: tuple[Argument, ...]
    first_start: tuple[Argument, ...] = ()
    pickled_state: bool = False
    skip_flag: str | None = None


@dataclass(frozen=True)
class JobPhase:
    """A part of the training that ends with iteration `end`: the settings that not all phases share.

    `environment` is not set in the other phases.
    """

    name: str
    end: int
    arguments: tuple[Argument, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Job:
    """One training run, for any scheduler.

    `folder` is the run folder; None makes a portable script that finds its places when it runs. `processes_per_node`
    counts the ranks on each node, whoever starts them (`mode`). `health_gpus` is the number of GPUs that a node must
    show before training starts; None skips the test. `environment` and `arguments` reach the processes byte for byte;
    in a run with phases they hold what all phases share. `entry` is what each process starts. `gpu`, `megatron` (a
    release) and `recipe_digest` change nothing: a portable script records them in its run folder.
    """

    name: str
    description: str
    folder: str | None
    resources: Resources
    processes_per_node: int
    mode: LaunchMode
    python: str
    arguments: tuple[Argument, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    secrets: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    container: Container | None = None
    entry: Entry = field(default_factory=Entry)
    health_gpus: int | None = None
    survival: Survival | None = None
    phases: tuple[JobPhase, ...] = ()
    gpu: str = "cpu"
    megatron: str = ""
    recipe_digest: str = ""

    @property
    def nodes(self) -> int:
        return self.resources.nodes

    @property
    def world_size(self) -> int:
        return self.nodes * self.processes_per_node

    def as_json(self) -> dict[str, Any]:
        """Return the job for `render --as json`, with its arguments word by word."""
        found = {**asdict(self), "nodes": self.nodes, "training_script": self.entry.script}
        found["cpus_per_task"] = self.resources.cpus_per_task
        found["megatron_args"] = words_of(found.pop("arguments"))
        if self.survival is not None:
            first = words_of(self.survival.first_start)
            found["survival"] = {"save": self.survival.save, "checkpoint": self.survival.checkpoint, "first": first}
        for phase in found["phases"]:
            phase["megatron_args"] = words_of(phase.pop("arguments"))
        return found

"""The frozen job: everything that a scheduler needs, and nothing specific to one scheduler."""

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

    `tasks_per_node` is the number of processes that the scheduler starts on each node, 1 if torchrun starts the ranks.
    `time_limit` has the format of `resources.time`; None leaves it to the scheduler. `memory` is per node. `queue` is
    what some schedulers call a partition. `restart` says whether the scheduler may restart the job after a failure or
    preemption; None leaves it to the scheduler. Processes get SIGTERM `warn_seconds` before the time limit. `options`
    are settings of the cluster profile that only the scheduler reads.
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
    """A host file or folder mounted into the container, `read_only` if the runtime supports that."""

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
    """The container image in the notation of its runtime, with mounts."""

    runtime: Literal["pyxis", "apptainer", "charliecloud"]
    image: str
    mounts: tuple[Mount, ...] = ()
    gpus: bool = True


@dataclass(frozen=True)
class Survival:
    """How a run continues after an attempt.

    `save` is the checkpoint folder as the engine sees it, and `checkpoint` is its path on the batch host. `resume` has
    the arguments for a start from the run's own checkpoint, `first_start` for a start without one. `pickled_state` says
    that checkpoints contain state that Transformer Engine loads only from a trusted source. `skip_flag` is set for a
    run that may be rewound; the flag takes the iterations whose batches are skipped.
    """

    save: str
    checkpoint: str
    resume: tuple[Argument, ...]
    first_start: tuple[Argument, ...] = ()
    pickled_state: bool = False
    skip_flag: str | None = None


@dataclass(frozen=True)
class JobPhase:
    """A part of the training that ends after iteration `end`, with the settings that are not common to all phases.

    `environment` is set in this phase only.
    """

    name: str
    end: int
    arguments: tuple[Argument, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Job:
    """One training run, for any scheduler.

    `folder` is the run folder; None makes a portable script that determines its paths when it runs.
    `processes_per_node` is the number of ranks per node, no matter what starts them (`mode`). `health_gpus` is the
    number of GPUs that a node must have before training starts; None skips the test. `environment` and `arguments`
    reach the processes byte for byte; in a run with phases, they have what all phases share. `entry` is the program of
    each process. `gpu`, `megatron` (a release) and `recipe_digest` have no effect on the job; a portable script records
    them in its run folder.
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
        """Return the job for `render --as json`, with its arguments as a list of words."""
        found = {**asdict(self), "nodes": self.nodes, "training_script": self.entry.script}
        found["cpus_per_task"] = self.resources.cpus_per_task
        found["megatron_args"] = words_of(found.pop("arguments"))
        if self.survival is not None:
            first = words_of(self.survival.first_start)
            found["survival"] = {"save": self.survival.save, "checkpoint": self.survival.checkpoint, "first": first}
        for phase in found["phases"]:
            phase["megatron_args"] = words_of(phase.pop("arguments"))
        return found

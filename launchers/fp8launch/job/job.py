"""The frozen job: all that a backend needs, nothing that only one backend understands."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from fp8launch.engines.base import Entry
from fp8launch.megatron.arguments import Argument, words_of

Mode = Literal["srun", "torchrun"]


@dataclass(frozen=True)
class Mount:
    """A folder or file of the host at a place in the container; `read_only` where the runtime can."""

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
    """How the processes get their file system. `image` is in the words of `runtime`."""

    runtime: Literal["pyxis", "apptainer", "charliecloud"]
    image: str
    mounts: tuple[Mount, ...] = ()
    gpus: bool = True


@dataclass(frozen=True)
class Survival:
    """How a run continues after an attempt.

    `save` is the engine's own name of its checkpoints, `checkpoint` where the batch host has them. `resume` are the
    arguments of a start from such a checkpoint, `first_start` those of a start without one. `pickled_state` says that
    the checkpoints hold state that Transformer Engine only loads from a trusted source. `skip_flag` is set for a run
    that may go back to a checkpoint: iterations whose batches are left out follow it.
    """

    save: str
    checkpoint: str
    resume: tuple[Argument, ...]
    first_start: tuple[Argument, ...] = ()
    pickled_state: bool = False
    skip_flag: str | None = None


@dataclass(frozen=True)
class JobPhase:
    """A stretch of the training that ends with iteration `end`: what holds for it alone, beside what all phases have.

    `environment` is not set in the other phases.
    """

    name: str
    end: int
    arguments: tuple[Argument, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Job:
    """One training run as a Slurm job or a local process group.

    `folder` is the run folder; None makes a portable script that finds its places when it runs. `slurm` holds sbatch's
    long options in order, None for a bare one. `health_gpus` is how many GPUs a node must show before training starts;
    None looks at no node. `environment` and `arguments` reach the processes byte for byte; where there are phases, they
    are what all of them have in common. `entry` is what each process starts. `gpu`, `megatron` (a
    release) and `recipe_digest` change nothing: a portable script records them in its run folder.
    """

    name: str
    description: str
    folder: str | None
    nodes: int
    processes_per_node: int
    mode: Mode
    python: str
    arguments: tuple[Argument, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    secrets: tuple[str, ...] = ()
    slurm: tuple[tuple[str, str | None], ...] = ()
    setup: tuple[str, ...] = ()
    container: Container | None = None
    entry: Entry = field(default_factory=Entry)
    mpi: str | None = None
    cpus_per_task: int | None = None
    health_gpus: int | None = None
    survival: Survival | None = None
    phases: tuple[JobPhase, ...] = ()
    gpu: str = "cpu"
    megatron: str = ""
    recipe_digest: str = ""

    @property
    def world_size(self) -> int:
        return self.nodes * self.processes_per_node

    def as_json(self) -> dict[str, Any]:
        """The job for `render --as json`, with its arguments word by word."""
        found = {**asdict(self), "training_script": self.entry.script}
        found["megatron_args"] = words_of(found.pop("arguments"))
        if self.survival is not None:
            first = words_of(self.survival.first_start)
            found["survival"] = {"save": self.survival.save, "checkpoint": self.survival.checkpoint, "first": first}
        for phase in found["phases"]:
            phase["megatron_args"] = words_of(phase.pop("arguments"))
        return found

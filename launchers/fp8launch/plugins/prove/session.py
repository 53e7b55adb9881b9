"""The trainings of one proof: a process that has imported Megatron, what it is asked, and a folder for all results."""

from __future__ import annotations

import importlib.util
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fp8launch.megatron.flag_problems import emit_argv
from fp8launch.megatron.schema import load_schema
from fp8launch.plugins.prove.settings import CPU, CUDA, FSDP
from fp8launch.plugins.prove.small import SmallRun
from fp8launch.plugins.rehearse.server import Server
from fp8launch.plugins.rehearse.workers import POLL_SECONDS, Limits, Request, Result, Worker
from fp8launch.wording import shortened

# Longer messages of exceptions are cut.
LONGEST = 300
WORKER = "fp8launch.plugins.prove.worker"
# A training has as many processes as ranks, so it needs more than a rehearsal of one rank.
LIMITS = {CPU: Limits(processor_seconds=300, memory_gib=16), CUDA: Limits(processor_seconds=1200, memory_gib=64)}


class NoVerdict(Exception):
    """A training of the proof did not run to its end. `content` is what `failure.described` says, {} if unknown."""

    def __init__(self, name: str, message: str, content: Mapping[str, Any]) -> None:
        super().__init__(message)
        self.name, self.content = name, content


@dataclass(frozen=True)
class Training:
    """A training to run: its name in this proof, its arguments, and the settings of `recording.install`.

    It starts from the weights of the training `weights`, or resumes `resumes` from iteration `at`.
    """

    name: str
    run: SmallRun
    record: Mapping[str, Any]
    weights: str | None = None
    resumes: str | None = None
    at: int | None = None
    save_interval: int = 1


@dataclass(frozen=True)
class Reference:
    """What one rank computed from the weights of the training `start`, and what rounding changes of that."""

    start: str
    name: str
    losses: Mapping[str, float]
    rounded_losses: Mapping[str, float]
    rounding: Mapping[str, Any]


class Servers(AbstractContextManager["Servers"]):
    """Processes that have imported Megatron, one for each folder and device.

    Leaving the context ends them and removes all files, also if Ctrl-C, a batch system or `timeout` ends the command.
    """

    def __init__(self) -> None:
        self._started: dict[tuple[Path, str], Server] = {}
        self._handler: Any = None

    def __enter__(self) -> Servers:
        # Python allows handlers in the main thread only.
        if threading.current_thread() is threading.main_thread():
            self._handler = signal.signal(signal.SIGTERM, signal.default_int_handler)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._handler is not None:
            signal.signal(signal.SIGTERM, self._handler)
        for server in self._started.values():
            server.close()
        self._started.clear()

    def of(self, megatron: Path, device: str) -> Server:
        """Return the process for a folder and a device; it starts at the first call."""
        if (megatron, device) not in self._started:
            # A recipe's environment is for containers: nothing of it reaches the trainings.
            setup = {"worker": WORKER, "device": device}
            folders = [str(megatron), *_sites_of_kernels(device)]
            self._started[megatron, device] = Server(setup, folders, LIMITS[device].memory_gib)
        return self._started[megatron, device]


class Session:
    """Runs the trainings and comparisons of one proof. Leaving the context removes its files."""

    def __init__(self, version: str, megatron: Path, device: str, servers: Servers) -> None:
        self.version, self.megatron, self.device, self.servers = version, megatron, device, servers
        # By the run and the seed of its weights.
        self.references: dict[tuple[str, int], Reference] = {}
        self._names = 0

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exception: object) -> None:
        if "place" in self.__dict__:
            shutil.rmtree(self.place, ignore_errors=True)

    @cached_property
    def server(self) -> Server:
        """The process that runs the trainings, started when the first one is needed."""
        return self.servers.of(self.megatron, self.device)

    @cached_property
    def place(self) -> Path:
        """The folder of all trainings."""
        return Path(tempfile.mkdtemp(dir=self.server.place))

    def new_name(self, title: str) -> str:
        """Return a name for a training that no other has."""
        self._names += 1
        return f"{title} {self._names}"

    def train(self, *trainings: Training) -> list[list[dict[str, Any]]]:
        """Run trainings at the same time; return what each rank of each recorded. Raises NoVerdict."""
        tasks = [self._task(training) for training in trainings]
        found = []
        for training, result in zip(trainings, self._run(tasks), strict=True):
            if result.content is None or not result.content["ok"]:
                raise _no_verdict(training.name, result)
            found.append(result.content["ranks"])
        return found

    def compare(self, pairs: Sequence[tuple[str, str]], what: str, at: int = 1) -> list[dict[str, Any]]:
        """Compare checkpoints of iteration `at` of pairs of trainings: the first of each is the reference."""
        tasks = []
        for first, second in pairs:
            folders = {"reference": self._iteration(first, at), "candidate": self._iteration(second, at)}
            tasks.append({"do": "compare", "what": what, **folders})
        found = []
        for (_, second), result in zip(pairs, self._run(tasks), strict=True):
            if result.content is None or not result.content["ok"]:
                raise _no_verdict(f"comparison of {second}", result)
            found.append(result.content)
        return found

    def settings_read(self, kinds: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
        """Return the settings that the classes of each tensor read, see `recording`. Empty if that fails."""
        wanted = sorted({kind for several in kinds.values() for kind in several})
        (result,) = self._run([{"do": "settings", "kinds": wanted}])
        if result.content is None or not result.content["ok"]:
            return {}
        by_kind = result.content["settings"]
        found = {}
        for tensor, several in kinds.items():
            found[tensor] = [setting for kind in several for setting in by_kind[kind]]
        return found

    def _task(self, training: Training) -> dict[str, Any]:
        values = dict(training.run.values)
        values |= {"save": self._saved(training.name), "save_interval": training.save_interval}
        record = dict(training.record)
        if training.weights and values.get(FSDP):
            record["start"] = self._iteration(training.weights, 1)
        elif training.weights:
            values["pretrained_checkpoint"] = self._saved(training.weights)
        if training.resumes:
            values |= {"load": self._saved(training.resumes), "ckpt_step": training.at}
        return {
            "do": "train",
            "device": self.device,
            # Context parallelism only has kernels whose results differ in the last bits from run to run.
            "repeatable": training.run.layout.cp == 1,
            "folder": str(self.place / training.name),
            "world": training.run.layout.world,
            "argv": list(emit_argv(values, load_schema(self.version))),
            "record": record,
        }

    def _saved(self, name: str) -> str:
        return str(self.place / name / "checkpoints")

    def _iteration(self, name: str, at: int) -> str:
        return f"{self._saved(name)}/iter_{at:07d}"

    def _run(self, tasks: Sequence[Mapping[str, Any]]) -> list[Result]:
        workers = [Worker(Request({"task": task}, []), LIMITS[self.device], self.server) for task in tasks]
        while True:
            self.server.listen()
            # A list, because each call also looks at the limits of its worker.
            ended = [worker.has_ended() for worker in workers]
            if all(ended):
                return [worker.result() for worker in workers]
            time.sleep(POLL_SECONDS)


def _sites_of_kernels(device: str) -> list[str]:
    """Return the folders of the installed packages that only a GPU needs."""
    if device != CUDA:
        return []
    found = map(importlib.util.find_spec, ("transformer_engine", "deep_ep"))
    return [str(Path(spec.origin).parents[1]) for spec in found if spec and spec.origin]


def _no_verdict(name: str, result: Result) -> NoVerdict:
    content = result.content or {}
    if result.failure:
        return NoVerdict(name, result.failure, content)
    message = f"{content['exception']}: {shortened(content['message'], LONGEST)}"
    if content.get("at"):
        message += f" ({content['at']})"
    return NoVerdict(name, message.removeprefix(": "), content)

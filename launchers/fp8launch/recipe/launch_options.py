"""Slurm's and torchrun's options in a launch script to a recipe's `resources` and `container`."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import get_args

from fp8launch.problems import Problem
from fp8launch.recipe.schema import Gpu

_SHORT = {"-N": "--nodes", "-t": "--time", "-c": "--cpus-per-task", "-G": "--gpus", "-n": "--ntasks"}
_COUNT = re.compile(r"[1-9]\d{0,5}")
_GPUS = re.compile(r"(?:gpu:)?(?:([A-Za-z]\w*):)?([1-9]\d{0,2})")
# Account, partition and the like belong to the cluster profile; logs and names have their own place.
_CLUSTER_OPTIONS = (
    "--account",
    "--partition",
    "--qos",
    "--reservation",
    "--constraint",
    "--exclusive",
    "--mem",
    "-A",
    "-p",
)


@dataclass(frozen=True)
class SlurmWords:
    """`resources` and `container` as sections of a recipe; `tasks` is --ntasks-per-node, 0 if not given."""

    resources: dict[str, int | str] = field(default_factory=dict)
    container: dict[str, object] = field(default_factory=dict)
    tasks: int = 0

    def job_variables(self) -> dict[str, str]:
        """The variables that Slurm surely sets in such a job."""
        found: dict[str, str] = {}
        nodes, gpus = self.resources.get("nodes"), self.resources.get("gpus_per_node")
        if nodes:
            found |= {"SLURM_NNODES": str(nodes), "SLURM_JOB_NUM_NODES": str(nodes)}
        if gpus:
            found["SLURM_GPUS_ON_NODE"] = str(gpus)
        if self.tasks:
            found["SLURM_NTASKS_PER_NODE"] = str(self.tasks)
            if nodes:
                found["SLURM_NTASKS"] = str(int(nodes) * self.tasks)
        return found


def sbatch_lines(text: str) -> list[str]:
    """The words of all #SBATCH lines."""
    words: list[str] = []
    for row in re.findall(r"^#SBATCH[ \t]+(.*)$", text, re.MULTILINE):
        try:
            words += shlex.split(row, comments=True)
        except ValueError:
            words += row.split()
    return words


def read_options(words: Sequence[str], where: str) -> tuple[SlurmWords, list[Problem]]:
    """What the options of sbatch or srun among `words` say; unknown words are passed over."""
    resources: dict[str, int | str] = {}
    container: dict[str, object] = {}
    problems: list[Problem] = []
    counts: dict[str, int] = {}
    cluster: list[str] = []
    for option, value in _options(words):
        if option in ("--nodes", "--ntasks-per-node", "--cpus-per-task", "--ntasks") and _COUNT.fullmatch(value):
            counts[option] = int(value)
        elif option in ("--gpus-per-node", "--gres", "--gpus-per-task") and (match := _GPUS.fullmatch(value)):
            counts[option] = int(match[2])
            if (match[1] or "").lower() in get_args(Gpu):
                resources["gpu"] = match[1].lower()
        elif option == "--time":
            resources["time"] = value
        elif option == "--container-image":
            container["image"] = value
        elif option == "--container-mounts":
            container["mounts"] = value.split(",")
        elif option in _CLUSTER_OPTIONS:
            cluster.append(option)
        elif option in _SHORT.values() or option in ("--gpus-per-node", "--gres"):
            problems.append(Problem("warning", "import-resources", f"{option} {value} was not read", where))
    tasks = counts.get("--ntasks-per-node", 0)
    nodes = counts.get("--nodes")
    gpus = counts.get("--gpus-per-node") or counts.get("--gres") or counts.get("--gpus-per-task", 0) * tasks
    # One process per GPU is the rule, so without a count of GPUs the tasks tell it.
    gpus = gpus or (tasks if tasks > 1 else 0)
    for key, count in (("nodes", nodes), ("gpus_per_node", gpus), ("cpus_per_task", counts.get("--cpus-per-task"))):
        if count:
            resources[key] = count
    if cluster:
        message = f"{', '.join(dict.fromkeys(cluster))} belong to a cluster profile, not to a recipe"
        problems.append(Problem("warning", "import-cluster", message, where, "put them into a cluster profile"))
    return SlurmWords(resources, container, tasks), problems


def torchrun_words(words: Sequence[str], where: str) -> tuple[dict[str, int], list[Problem]]:
    """Nodes and processes per node as torchrun's options state them."""
    names = {"--nnodes": "nodes", "--nproc-per-node": "gpus_per_node"}
    found: dict[str, int] = {}
    problems: list[Problem] = []
    for option, value in _options(words):
        key = names.get(option.replace("_", "-"))
        if key and _COUNT.fullmatch(value):
            found[key] = int(value)
        elif key and value:
            message = f"{option} {value} is no fixed count"
            problems.append(Problem("warning", "import-resources", message, where, f"set resources.{key}"))
    return found, problems


def _options(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Options with their values, however the two are joined: `--nodes=2`, `--nodes 2`, `-N 2`, `-N2`."""
    for at, word in enumerate(words):
        following = words[at + 1] if at + 1 < len(words) else ""
        following = "" if following.startswith("-") else following
        if word.startswith("--"):
            option, equals, value = word.partition("=")
            yield option, value if equals else following
        elif word[:2] in _SHORT:
            yield _SHORT[word[:2]], word[2:].removeprefix("=") or following
        elif word.startswith("-"):
            yield word[:2], following

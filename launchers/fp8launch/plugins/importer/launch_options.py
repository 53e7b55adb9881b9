"""Turn the options of Slurm and of launchers into a recipe's `resources` and `container`."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from fp8launch.diagnostics import Problem
from fp8launch.hardware.gpus import GPUS
from fp8launch.recipe.slurm_time import slurm_seconds

# Options that become fields of `resources`; any other option is reported.
_READ = ("--nodes", "--ntasks", "--ntasks-per-node", "--cpus-per-task", "--gpus", "--gpus-per-node", "--gres", "--time")
_SHORT = {"-N": "--nodes", "-t": "--time", "-c": "--cpus-per-task", "-G": "--gpus", "-n": "--ntasks"}
# The rest of a short option is its value (`-N2`), unless it is a name (mpirun's `-tag-output`).
_LONG_NAME = re.compile(r"[A-Za-z-]{2}")
_COUNT = re.compile(r"[1-9]\d{0,5}")
_GPUS = re.compile(r"(?:gpu:)?(?:([A-Za-z]\w*):)?([1-9]\d{0,2})")
# What a launcher's option counts; accelerate has an option for the processes of all nodes together.
_LAUNCHER_COUNTS = {
    "--nnodes": "nodes",
    "--nproc-per-node": "gpus_per_node",
    "--num-machines": "nodes",
    "--num-processes": "processes",
    "--num-nodes": "nodes",
    "--num-gpus": "gpus_per_node",
    "-np": "processes",
    "--np": "processes",
    "-npernode": "gpus_per_node",
    "--npernode": "gpus_per_node",
    "-ppn": "gpus_per_node",
    "--ppn": "gpus_per_node",
}
# Account, partition and similar options belong to the cluster profile; logs and names have their own fields.
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
        """Return the variables that Slurm always sets in such a job."""
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
    """Return the words of all #SBATCH lines."""
    words: list[str] = []
    for row in re.findall(r"^#SBATCH[ \t]+(.*)$", text, re.MULTILINE):
        try:
            words += shlex.split(row, comments=True)
        except ValueError:
            words += row.split()
    return words


def read_options(words: Sequence[str], where: str) -> tuple[SlurmWords, list[Problem]]:
    """Read the options of sbatch or srun among `words`, and skip unknown words."""
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
            if (match[1] or "").lower() in GPUS:
                resources["gpu"] = match[1].lower()
        elif option == "--time" and slurm_seconds(value) is not None:
            resources["time"] = value
        elif option == "--container-image":
            container["image"] = value
        elif option == "--container-mounts":
            container["mounts"] = value.split(",")
        elif option in _CLUSTER_OPTIONS:
            cluster.append(option)
        elif value and option in _READ:
            problems.append(Problem("warning", "import-resources", f"{option} {value} was not read", where))
    resources |= _counted(counts)
    problems += _of_clusters(cluster, where)
    return SlurmWords(resources, container, counts.get("--ntasks-per-node", 0)), problems


def _of_clusters(options: Sequence[str], where: str) -> list[Problem]:
    """Return a warning about options that belong to a cluster profile and not to a recipe."""
    if not options:
        return []
    named = dict.fromkeys(options)
    message = f"{', '.join(named)} {'belongs' if len(named) == 1 else 'belong'} in a cluster profile, not in a recipe"
    return [Problem("warning", "import-cluster", message, where, "add them to a cluster profile")]


def _counted(counts: Mapping[str, int]) -> dict[str, int]:
    """Return the fields of `resources` for sbatch's counts, without unknown ones."""
    tasks = counts.get("--ntasks-per-node", 0)
    gpus = counts.get("--gpus-per-node") or counts.get("--gres") or counts.get("--gpus-per-task", 0) * tasks
    if not gpus and tasks > 1:
        # One process per GPU is usual, so the number of tasks stands in for an unknown number of GPUs.
        gpus = tasks
    found = {
        "nodes": counts.get("--nodes", 0),
        "gpus_per_node": gpus,
        "cpus_per_task": counts.get("--cpus-per-task", 0),
    }
    return {key: count for key, count in found.items() if count}


def launcher_counts(words: Sequence[str], where: str) -> tuple[dict[str, int], list[Problem]]:
    """Return the nodes and processes per node from the options of torchrun, accelerate or deepspeed."""
    found: dict[str, int] = {}
    problems: list[Problem] = []
    for option, value in _options(words):
        key = _LAUNCHER_COUNTS.get(option.replace("_", "-"))
        if key and _COUNT.fullmatch(value):
            found[key] = int(value)
        elif key and value:
            message = f"{option} {value} is not a fixed count"
            problems.append(Problem("warning", "import-resources", message, where, f"set resources.{key}"))
    everywhere = found.pop("processes", None)
    if everywhere is None:
        return found, problems
    # accelerate counts machines, mpirun the processes of each.
    if "gpus_per_node" in found:
        wanted, parts = "nodes", found["gpus_per_node"]
        each = f"nodes of {parts}"
    else:
        wanted, parts = "gpus_per_node", found.get("nodes", 1)
        each = f"{parts} nodes"
    if everywhere % parts == 0:
        found[wanted] = everywhere // parts
    else:
        message = f"{everywhere} processes cannot be divided over {each}"
        problems.append(Problem("warning", "import-resources", message, where, f"set resources.{wanted}"))
    return found, problems


def _options(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield options with their values, in any notation: `--nodes=2`, `--nodes 2`, `-N 2`, `-N2`."""
    for at, word in enumerate(words):
        following = next(iter(words[at + 1 : at + 2]), "")
        if following.startswith("-"):
            following = ""
        if word.startswith("--"):
            option, equals, value = word.partition("=")
            if not equals:
                value = following
            yield option, value
        elif word in _LAUNCHER_COUNTS:
            yield word, following
        elif word[:2] in _SHORT and not _LONG_NAME.match(word[2:]):
            yield _SHORT[word[:2]], word[2:].removeprefix("=") or following
        elif word.startswith("-"):
            yield word[:2], following

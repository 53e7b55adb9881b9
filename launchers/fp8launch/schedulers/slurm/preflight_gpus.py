"""Whether the nodes of a partition have the GPUs that a job asks for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from fp8launch.diagnostics import Problem, nearest
from fp8launch.job.job import Job
from fp8launch.recipe.load import LoadedRecipe
from fp8launch.schedulers.slurm.inventory import Node, Partition, gpu_model, number

PROFILE = "cluster profile"


def gpu_problem(partition: Partition, job: Job, loaded: LoadedRecipe) -> tuple[Problem | None, Sequence[Node]]:
    """Return what is wrong with the GPUs that the job asks for, and the nodes that have enough of them."""
    kind, count = _asked_gpus(dict(job.slurm))
    if not count:
        return None, partition.nodes
    fitting = [node for node in partition.nodes if node.gpus_of(kind) >= count]
    if len(fitting) >= job.nodes:
        return _other_gpus(fitting, kind, loaded, partition), fitting
    name = partition.name
    kinds = sorted(_gpu_types(partition.nodes))
    if not kinds:
        message = f"the job needs {count} GPUs per node, but Slurm knows no GPUs in partition {name}"
        fix = (
            "choose a partition with GPUs; if its nodes have GPUs that Slurm does not manage, set `gpus: none` in the "
            "cluster profile"
        )
        return Problem("error", "slurm-gpus", message, f"{PROFILE}: gpus", fix), fitting
    if kind is not None and kind not in kinds:
        return _no_such_gpus(kind, kinds, name), fitting
    most = max(node.gpus_of(kind) for node in partition.nodes)
    have, fix = f"its nodes have {most}", f"set resources.gpus_per_node to {most} or less"
    if fitting:
        have, fix = f"{len(fitting)} of its nodes have as many", f"use --nodes {len(fitting)} or less"
    gpus = f"{kind} GPUs" if kind else "GPUs"
    message = f"the job needs {job.nodes} x {count} {gpus}, but in partition {name} {have}"
    return Problem("error", "slurm-gpus", message, loaded.where("resources", "gpus_per_node"), fix), fitting


def _gpu_types(nodes: Iterable[Node]) -> set[str]:
    """The GPU types of these nodes, '' for GPUs without a type."""
    types: set[str] = set()
    for node in nodes:
        types.update(node.gpus)
    return types


def _no_such_gpus(kind: str, kinds: Sequence[str], partition: str) -> Problem:
    have = listed(k or "some without a type" for k in kinds)
    message = f"the job needs GPUs of type '{kind}', but partition {partition} has {have}"
    near = nearest(kind, kinds)
    if len(kinds) == 1:
        near = kinds[0]
    fix = "remove `gres_type:`"
    if near:
        fix = f"set `gres_type: {near}`"
    elif any(kinds):
        fix = "correct `gres_type:`"
    return Problem("error", "slurm-gpus", message, f"{PROFILE}: gres_type", f"{fix} in the cluster profile")


def _other_gpus(nodes: Sequence[Node], kind: str | None, loaded: LoadedRecipe, partition: Partition) -> Problem | None:
    """The recipe is for one GPU, and by the names of their types the nodes have another."""
    wanted = loaded.recipe.resources.gpu
    types = _gpu_types(nodes) - {""}
    if kind is not None:
        types &= {kind}
    models = set(filter(None, map(gpu_model, types)))
    if not models or wanted in models or len(models) < len(types):
        return None
    message = f"the recipe is for {wanted}, but the GPUs of partition {partition.name} are {listed(types)}"
    where = loaded.where("resources", "gpu")
    return Problem("warning", "slurm-gpu-model", message, where, f"set resources.gpu to {sorted(models)[0]}")


def _asked_gpus(options: Mapping[str, str | None]) -> tuple[str | None, int]:
    """The GPU type and count for each node that a job's options ask for."""
    text = options.get("gpus-per-node") or ""
    if not text:
        for resource in (options.get("gres") or "").split(","):
            if resource.startswith("gpu:"):
                text = resource.removeprefix("gpu:")
                break
    kind, _, count = text.rpartition(":")
    return kind or None, number(count) or 0


def listed(names: Iterable[str]) -> str:
    """Return names as a sentence has them, sorted."""
    return first_of(sorted(names), 12) or "none"


def first_of(words: Sequence[str], most: int) -> str:
    """Return the first `most` words, with dots for the others."""
    if len(words) > most:
        words = [*words[:most], "..."]
    return ", ".join(words)

"""Check the free space for checkpoints, if this machine can access the file system of `checkpoint.dir`.

A save that fills the disk ends the training and affects all other users of the file system. Quotas are visible only if
the file system reports them as free space (Lustre and GPFS with project quotas do, NFS usually does not).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from fp8launch.check.job_paths import job_paths, kind_of, local_path_in, nearest_existing
from fp8launch.check.resolved_run import ResolvedRun, resolve_run
from fp8launch.cluster.profile import Cluster
from fp8launch.cluster.runtimes import Runtime
from fp8launch.cluster.storage import checkpoint_place
from fp8launch.diagnostics import Problem, Severity, UserError
from fp8launch.job.prepared import Prepared
from fp8launch.megatron.model_arithmetic import steps_of_run, whole
from fp8launch.megatron.parameters import parameters
from fp8launch.rundir.registry import run_root

CODES: Mapping[str, Severity] = {"checkpoint-space": "error", "checkpoint-space-low": "warning"}
GIB = 1024**3
# A checkpoint has the weights in their training type, and the optimizer's fp32 copy and two moments. Moments in bf16 or
# FP8 are saved as fp32 (TE's `FusedAdam.get_unscaled_state`), and FP8 weights as bf16.
FP32, HALF = 4, 2


def checkpoint_bytes(run: ResolvedRun) -> int | None:
    """Return the size of one checkpoint in bytes, or None if the model's parameters cannot be counted.

    Measured with Megatron 0.19, with and without the distributed optimizer: actual checkpoints are at most 3 % larger
    if the model has at least a million parameters.
    """
    values = run.arguments
    model = parameters(values, run.layout.world)
    if model is None:
        return None
    weights, optimizer = FP32, 2 * FP32
    if values.get("bf16") or values.get("fp16"):
        weights, optimizer = HALF, 3 * FP32
    if values.get("no_save_optim"):
        optimizer = 0
    return model.total * (weights + optimizer)


@dataclass(frozen=True)
class Space:
    """The space for a run's checkpoints: their file system, the size of one in bytes, and how many there may be."""

    folder: Path
    free: int
    size: int
    count: int


def space_for(prepared: Prepared, cluster: Cluster, runtime: Runtime | None = None) -> Space | None:
    """Return the space that a run's checkpoints need; None without any, or if it is unknown here."""
    save = local_path_in(prepared.args.attributes.get("save"))
    if save is None:
        return None
    folder = _here(save, prepared, cluster, runtime)
    size = checkpoint_bytes(resolve_run(prepared))
    if folder is None or not size:
        return None
    disk = os.statvfs(folder)
    count, keep = _planned(prepared), prepared.loaded.recipe.checkpoint.keep
    if keep:
        count = min(count, keep + 1)  # a new checkpoint is written before the oldest is deleted
    return Space(folder, disk.f_bavail * disk.f_frsize, size, count)


def problems(prepared: Prepared, cluster: Cluster, runtime: Runtime | None = None) -> Iterator[Problem]:
    """Yield at most one problem: not even one checkpoint fits, or fewer fit than are kept."""
    space = space_for(prepared, cluster, runtime)
    if space is None:
        return
    free, size = space.free, space.size
    where = prepared.loaded.where("checkpoint", "dir")
    one = f"a checkpoint needs {gib(size)} (weights and optimizer), and {space.folder} has {gib(free)} free"
    if free < size:
        fix = "free disk space, or choose another checkpoint.dir"
        yield Problem("error", "checkpoint-space", one, where, fix)
        return
    why, fix = f"the run writes {space.count}", "free disk space, set checkpoint.keep, or save less often"
    if keep := prepared.loaded.recipe.checkpoint.keep:
        why = f"the run needs room for {space.count} (checkpoint.keep: {keep}, and one being written)"
        fix = "free disk space, or lower checkpoint.keep"
    if free < space.count * size:
        message = f"{one}: enough for {free // size}, but {why}"
        yield Problem("warning", "checkpoint-space-low", message, where, fix)


def _planned(prepared: Prepared) -> int:
    """Return the number of checkpoints that the run writes, including the last one."""
    stated = prepared.args.attributes
    steps, interval = steps_of_run(stated, prepared.layout.global_batch), whole(stated, "save_interval")
    return -(-steps // interval) if steps and interval else 1


def _here(save: str, prepared: Prepared, cluster: Cluster, runtime: Runtime | None) -> Path | None:
    """Return the nearest existing parent of `checkpoint.dir`, or None if this machine cannot access it.

    If not even the first folder of the path exists, the file system is not mounted on this machine.
    """
    try:
        paths = job_paths(prepared.loaded, cluster, runtime)
        if not save.startswith("/"):
            folder: Path | None = checkpoint_place(cluster) or run_root(cluster, None)
        elif paths.mounted(save):
            folder = paths.here(save)
        else:
            return None
    except UserError:
        return None  # run_root.py reports this
    if folder is None:
        return None
    folder = nearest_existing(folder)
    if folder == folder.parent or kind_of(folder) != "folder":
        return None
    return folder


def gib(size: int) -> str:
    if size < GIB / 10:
        return f"{size / 1024**2:,.1f} MiB"
    return f"{size / GIB:,.1f} GiB"

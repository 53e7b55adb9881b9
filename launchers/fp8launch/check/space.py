"""Is there room for the checkpoints? Only where this machine sees the file system of `checkpoint.dir`.

A save that fills the disk ends the training, and whoever else writes there feels it too. Quotas show only where the
file system tells them as free space (Lustre and GPFS with project quotas do, NFS mostly not).
"""

from __future__ import annotations

import os
from collections import ChainMap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from fp8launch.check.facts import Facts, facts
from fp8launch.check.job_paths import is_remote, job_paths, kind_of, unexpanded
from fp8launch.job.cluster import Cluster
from fp8launch.megatron.parameters import parameters
from fp8launch.problems import Problem, Severity, UserError

if TYPE_CHECKING:
    from fp8launch.runs.submit import Prepared

CODES: Mapping[str, Severity] = {"checkpoint-space": "error", "checkpoint-space-low": "warning"}
GIB = 1024**3
# The model's weights in their training type; the optimizer's own copy and two moments. Moments kept in bf16 or FP8 are
# saved as fp32 too (TE's `FusedAdam.get_unscaled_state`), FP8 weights as bf16.
FP32, HALF = 4, 2


def checkpoint_bytes(run: Facts) -> int | None:
    """Size of one checkpoint; None for a model that is not counted.

    Real ones of 0.19, with and without the distributed optimizer, are at most 3 % larger from a million parameters on.
    """
    values = ChainMap(dict(run.given), dict(run.defaults))
    model = parameters(values, run.layout.world)
    if model is None:
        return None
    half = bool(values.get("bf16") or values.get("fp16"))
    weights = HALF if half else FP32
    optimizer = 0 if values.get("no_save_optim") else (3 if half else 2) * FP32
    return model.total * (weights + optimizer)


def problems(prepared: Prepared, cluster: Cluster) -> Iterator[Problem]:
    """At most one: that not even one checkpoint fits, or not those that are to stay."""
    recipe, save = prepared.loaded.recipe, prepared.args.values.get("save")
    if not isinstance(save, str) or is_remote(save) or unexpanded(save):
        return
    folder = _here(save, prepared, cluster)
    size = checkpoint_bytes(facts(prepared))
    if folder is None or not size:
        return
    disk = os.statvfs(folder)
    free = disk.f_bavail * disk.f_frsize
    where = prepared.loaded.where("checkpoint", "dir")
    one = f"a checkpoint takes {_gib(size)} (weights and optimizer), and {folder} has {_gib(free)} left"
    if free < size:
        fix = "make room, or choose another checkpoint.dir"
        yield Problem("error", "checkpoint-space", one, where, fix)
        return
    planned, keep = _planned(prepared), recipe.checkpoint.keep
    # A new one is written before the oldest goes.
    wanted = min(planned, keep + 1) if keep else planned
    if free < wanted * size:
        why = f"checkpoint.keep: {keep} and a new one make {wanted}" if keep else f"the run writes {wanted}"
        fix = "make room, or lower checkpoint.keep" if keep else "make room, set checkpoint.keep, or save less often"
        message = f"{one}: room for {free // size}, and {why}"
        yield Problem("warning", "checkpoint-space-low", message, where, fix)


def _planned(prepared: Prepared) -> int:
    """How many checkpoints the run writes, the last one too."""
    iterations, interval = prepared.args.values.get("train_iters"), prepared.args.values.get("save_interval")
    if not isinstance(iterations, int) or not isinstance(interval, int) or interval < 1:
        return 1
    return -(-iterations // interval)


def _here(save: str, prepared: Prepared, cluster: Cluster) -> Path | None:
    """The nearest folder above `checkpoint.dir` that is there already; None where this machine does not see it."""
    from fp8launch.runs.submit import run_root

    try:
        folder = job_paths(prepared.loaded, cluster).here(save) if save.startswith("/") else run_root(cluster, None)
    except UserError:
        return None  # told by who looks at the run root
    while folder is not None and kind_of(folder) == "missing" and folder != folder.parent:
        folder = folder.parent
    return folder if folder is not None and kind_of(folder) == "folder" else None


def _gib(size: int) -> str:
    return f"{size / GIB:,.1f} GiB" if size >= GIB / 10 else f"{size / 1024**2:,.1f} MiB"

"""Check whether run folders can be created below the run root, and whether the cluster's nodes will see them.

If a node does not see the run folder, it cannot even open the job's output: Slurm ends the job at once, and no log says
why. What a node sees cannot be queried from here. But the cluster profile may list shared folders, earlier runs below
the same root are evidence, and some file systems can exist on one machine only.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from fp8launch import schedulers
from fp8launch.check.job_paths import nearest_existing, why_not_writable
from fp8launch.cluster.profile import Cluster
from fp8launch.diagnostics import Problem, Severity, UserError
from fp8launch.injob.ownership import why_not_own
from fp8launch.rundir.registry import job_ids, run_root
from fp8launch.rundir.run_dir import MANIFEST, RunFolder, run_folders
from fp8launch.schedulers.base import Scheduler

MIB = 1024**2
# In-job code, manifest and logs of a run take about a megabyte, and logs grow. Checkpoints come on top.
LEAST_SPACE, LITTLE_SPACE = 16 * MIB, 1024 * MIB
# The number of files in a run folder, without checkpoints.
LEAST_FILES = 200
CODES: Mapping[str, Severity] = {
    **dict.fromkeys(("run-root", "run-root-full", "run-root-not-shared"), "error"),
    **dict.fromkeys(("run-root-low", "run-root-local", "run-root-unseen"), "warning"),
}
WHERE = "run root"
_OTHER = "choose another with --run-root, `run_root:` in the cluster profile, or FP8LAUNCH_RUNS"
_SHARED = "choose a folder that every node sees, with --run-root, `run_root:` in the cluster profile, or FP8LAUNCH_RUNS"
# File systems that exist on one machine only.
_IN_MEMORY = {"tmpfs", "ramfs", "devtmpfs", "overlay", "squashfs", "rootfs"}
# File systems on a disk. A machine may export them to others, but by convention not the folders listed below.
_ON_DISK = {"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "zfs", "jfs", "reiserfs"}
_OF_ONE_MACHINE = (Path("/tmp"), Path("/var/tmp"), Path("/run"), Path("/dev/shm"))
# How many of the newest runs to look at. A run that has started proves that nodes see the run root.
_NEWEST = 20


def problems(cluster: Cluster, environment: Mapping[str, str], scheduler: Scheduler | None = None) -> Iterator[Problem]:
    """Find problems with the run root.

    `environment` is that of the submitting shell. `scheduler` will receive the job; None means the default scheduler.
    """
    try:
        root = run_root(cluster, None)
    except UserError as exc:
        yield from exc.problems
        return
    if why := why_not_writable(root):
        yield Problem("error", "run-root", f"run folders would go to {root}: {why}", WHERE, _OTHER)
        return
    yield from _space(root)
    yield from _nodes(root, cluster, environment, scheduler or schedulers.default(cluster))


def _space(root: Path) -> Iterator[Problem]:
    disk = os.statvfs(nearest_existing(root))
    free = disk.f_bavail * disk.f_frsize
    if free < LITTLE_SPACE:
        message = f"the file system of run root {root} has {free // MIB:,} MiB left"
        if free < LEAST_SPACE:
            yield Problem("error", "run-root-full", message, WHERE, _OTHER)
        else:
            yield Problem("warning", "run-root-low", message, WHERE, _OTHER)
    # File systems that create inodes dynamically report 0.
    if disk.f_files and disk.f_favail < LEAST_FILES:
        message = f"the file system of run root {root} has room for {disk.f_favail} more files"
        yield Problem("error", "run-root-full", message, WHERE, _OTHER)


def _nodes(root: Path, cluster: Cluster, environment: Mapping[str, str], scheduler: Scheduler) -> Iterator[Problem]:
    """Report that nodes may not see the run root, if jobs run on other machines."""
    if scheduler.capabilities.on_this_machine:
        return
    if cluster.shared_folders:
        shared = [Path(os.path.expandvars(folder)).expanduser() for folder in cluster.shared_folders]
        if not any(_is_below(root, folder) for folder in shared):
            named = ", ".join(cluster.shared_folders)
            message = f"run root {root} is outside the folders that all nodes see: {named}"
            yield Problem("error", "run-root-not-shared", message, WHERE, _SHARED)
        return
    begun, unseen = _earlier_runs(root)
    if begun:
        return
    if unseen is not None:
        message = f"a node could not write below run root {root} when {unseen.run_id} started, and no run started there"
        yield Problem("warning", "run-root-unseen", message, WHERE, _SHARED)
    elif (kind := _kind_on_one_machine(root)) and scheduler.uses_other_hosts(environment):
        message = f"run root {root} is on a local file system ({kind}), but jobs run on other machines"
        fix = f"{_SHARED}; if every node does see it, list it under `shared_folders:` in the profile"
        yield Problem("warning", "run-root-local", message, WHERE, fix)


def _earlier_runs(root: Path) -> tuple[bool, RunFolder | None]:
    """Return whether any run below this root started on a node, and the newest run that did not find its folder."""
    newest = None
    for run in filter(_is_of_a_cluster, _newest_runs(root)):
        if run.attempts():
            return True, None
        newest = newest or run
    if newest is not None and schedulers.of_run(newest).state(newest).folder_unseen:
        return False, newest
    return False, None


def _newest_runs(root: Path) -> list[RunFolder]:
    made = []
    for run in run_folders(root):
        with contextlib.suppress(OSError):
            made.append((run.path.stat().st_mtime, run))
    made.sort(key=lambda entry: entry[0], reverse=True)
    return [run for _, run in made[:_NEWEST]]


def _is_of_a_cluster(run: RunFolder) -> bool:
    """Return whether the run is this user's and was submitted to a cluster. Its manifest may be damaged."""
    try:
        # Checking the owner of everything in the folder would take longer than reading its manifest.
        if why_not_own(run.path / MANIFEST) or schedulers.of_run(run).capabilities.on_this_machine:
            return False
        return run.is_mine and bool(job_ids(run))
    except (OSError, UserError):
        return False


def _kind_on_one_machine(root: Path) -> str | None:
    """Return the type of the root's file system if it exists on this machine only, else None."""
    real = nearest_existing(root).resolve()
    kind = _file_system(real)
    if kind in _IN_MEMORY or (kind in _ON_DISK and any(_is_below(real, folder) for folder in _OF_ONE_MACHINE)):
        return kind
    return None


def _file_system(path: Path) -> str:
    """Return the file system type of a path from the kernel's mount table; empty if it is not listed."""
    try:
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    kind, longest = "", -1
    for line in lines:
        fields, _, after = line.partition(" - ")
        words = fields.split(" ")
        if len(words) < 5 or not after:
            continue
        place = words[4].replace("\\040", " ")
        # If two mounts share a target, the later one wins.
        if _is_below(path, Path(place)) and len(place) >= longest:
            kind, longest = after.split(" ")[0], len(place)
    return kind


def _is_below(path: Path, folder: Path) -> bool:
    return path.is_relative_to(folder) or path.is_relative_to(folder.resolve())

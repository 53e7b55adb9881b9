"""Examine what this machine and its cluster provide. Packages are located, not imported."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from fp8launch import __version__, schedulers
from fp8launch.check.job_paths import why_not_writable
from fp8launch.cluster.profile import Cluster, cluster_files, config_folder, load_cluster
from fp8launch.diagnostics import Problem, UserError
from fp8launch.megatron.schema import supported_versions
from fp8launch.plugins.doctor import slurm
from fp8launch.plugins.doctor.finding import Finding
from fp8launch.rundir.registry import run_root
from fp8launch.schedulers.base import Scheduler

# Import names and distributions that a run on this machine needs.
TRAINING = {"torch": "torch", "megatron": "megatron-core"}


@dataclass(frozen=True)
class Examination:
    """The state of a machine. `ok` means that at least one backend can start runs; `problems` are in the profile."""

    ok: bool
    findings: tuple[Finding, ...]
    problems: tuple[Problem, ...]


def examine(cluster_name: str | None) -> Examination:
    """Examine this machine, its cluster, and the cluster profile of that name."""
    problems: tuple[Problem, ...] = ()
    profile = Cluster()
    try:
        profile = load_cluster(cluster_name)
    except UserError as exc:
        problems = exc.problems
    root = _run_root(profile)
    cluster = schedulers.cluster()
    training = list(_training())
    findings = [*_self(), _profile(profile, bool(problems)), root, *slurm.describe(profile, os.environ)]
    findings += [*_containers(profile, cluster), *_gpus(), *training, *_tools()]
    trains = all(f.state == "ok" for f in training if f.what in TRAINING.values())
    ok = root.state == "ok" and not problems and (cluster.answers(os.environ) or trains)
    return Examination(ok, tuple(findings), problems)


def _self() -> Iterator[Finding]:
    yield Finding("ok", "fp8launch", __version__)
    yield Finding("ok", "Python", f"{platform.python_version()} ({sys.executable})")
    yield Finding("ok", "flag schemas", f"Megatron-Core {', '.join(supported_versions())}")


def _profile(profile: Cluster, broken: bool) -> Finding:
    known = ", ".join(cluster_files())
    if broken:
        return Finding("missing", "cluster profile", "cannot be loaded", "see the errors below")
    if profile.name:
        return Finding("ok", "cluster profile", f"{profile.name}; your profiles: {known or 'none'}")
    advice = f"put one into {config_folder()}; `fp8launch clusters` lists examples"
    return Finding("note", "cluster profile", "none; the cluster's defaults apply", advice)


def _run_root(profile: Cluster) -> Finding:
    try:
        root = run_root(profile, None)
    except UserError as exc:
        return Finding("missing", "run root", str(exc), "correct `run_root:` in the cluster profile")
    if why := why_not_writable(root):
        return Finding("missing", "run root", f"{root}: {why}", "set FP8LAUNCH_RUNS or `run_root:`")
    here = root
    while not here.exists():
        here = here.parent
    free = shutil.disk_usage(here).free
    return Finding("ok", "run root", f"{root}, {free / 1024**3:,.0f} GiB free")


def _containers(profile: Cluster, cluster: Scheduler) -> Iterator[Finding]:
    found: list[tuple[str, str]] = list(_runtimes())
    if cluster.answers(os.environ):
        found = [*cluster.container_runtimes(os.environ), *found]
    wanted = profile.runtime
    if wanted not in (None, "none") and wanted not in dict(found):
        advice = "log in to a machine that has it, or correct `runtime:` in the cluster profile"
        yield Finding(
            "missing", f"container runtime {wanted}", "set in the cluster profile, but not found here", advice
        )
    for runtime, program in found:
        yield Finding("ok", f"container runtime {runtime}", program)
    if not found and wanted in (None, "none"):
        advice = "needed only for recipes with an image: pyxis, Apptainer or Charliecloud"
        yield Finding("note", "container runtime", "none", advice)


def _runtimes() -> Iterator[tuple[str, str]]:
    for runtime, names in (("apptainer", ("apptainer", "singularity")), ("charliecloud", ("ch-run",))):
        for name in names:
            if path := shutil.which(name):
                yield runtime, path
                break
    if path := shutil.which("enroot"):
        yield "enroot", f"{path}: imports images for pyxis"


def _gpus() -> Iterator[Finding]:
    program = shutil.which("nvidia-smi")
    if program is None:
        yield Finding("note", "GPUs here", "none (no nvidia-smi), as on most login nodes")
        return
    try:
        query = [program, "--query-gpu=name,driver_version", "--format=csv,noheader"]
        done = subprocess.run(query, capture_output=True, text=True, errors="replace", timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as exc:
        yield Finding("note", "GPUs here", f"nvidia-smi does not answer: {exc}")
        return
    lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    if done.returncode == 0 and lines:
        kinds = ", ".join(f"{count} x {line}" for line, count in Counter(lines).items())
        yield Finding("ok", "GPUs here", f"{kinds} (name, driver)")
        return
    answer = f"{done.stderr}\n{done.stdout}".strip() or "nothing"
    yield Finding("note", "GPUs here", f"nvidia-smi reports: {answer.splitlines()[0]}")


def _training() -> Iterator[Finding]:
    """Look for the packages that a run without a container needs in this Python."""
    for module, distribution in TRAINING.items():
        if importlib.util.find_spec(module) is None:
            advice = (
                "needed for runs without a container on this machine: `pip install 'fp8launch[megatron]'`, with "
                "Python 3.12 or newer"
            )
            yield Finding("note", distribution, f"not in {sys.executable}", advice)
        else:
            yield Finding("ok", distribution, _version(distribution))
    if importlib.util.find_spec("transformer_engine") is None:
        yield Finding("note", "transformer-engine", f"not in {sys.executable}", "needed for FP8 without a container")
    else:
        yield Finding("ok", "transformer-engine", _version("transformer-engine"))


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "installed, version unknown"


def _tools() -> Iterator[Finding]:
    for name, use in (("git", "records the code of a run"), ("shellcheck", "checks scripts in the test suite")):
        path = shutil.which(name)
        if path:
            yield Finding("ok", name, path)
        else:
            yield Finding("note", name, "not found", f"optional: it {use}")
    if importlib.util.find_spec("submitit") is None:
        yield Finding("note", "submitit", "not installed", "needed for --backend submitit only")
    else:
        yield Finding("ok", "submitit", _version("submitit"))

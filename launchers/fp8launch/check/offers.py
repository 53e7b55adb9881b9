"""What a machine and its cluster offer to fp8launch. Nothing heavy is imported: packages are looked up, not loaded."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Literal

from fp8launch import __version__
from fp8launch.backends import slurm
from fp8launch.check.job_paths import why_not_writable
from fp8launch.check.site import Silent, Site, read_site
from fp8launch.job.cluster import Cluster, cluster_files, config_folder, load_cluster
from fp8launch.megatron.schema import supported_versions
from fp8launch.problems import Problem, UserError

State = Literal["ok", "missing", "note"]
# Import name and distribution of what a run on this machine needs.
TRAINING = {"torch": "torch", "megatron": "megatron-core"}


@dataclass(frozen=True)
class Finding:
    """`state` is "ok", "missing" for what some run needs, or "note" for what is as it is."""

    state: State
    what: str
    found: str
    advice: str | None = None

    def as_json(self) -> dict[str, str | None]:
        return asdict(self)


@dataclass(frozen=True)
class Examination:
    """`ok`: some backend can run something. `problems` are those of the cluster profile."""

    ok: bool
    findings: tuple[Finding, ...]
    problems: tuple[Problem, ...]


def examine(cluster_name: str | None) -> Examination:
    """Look at this machine, at its Slurm, and at the cluster profile of that name."""
    problems: tuple[Problem, ...] = ()
    profile = Cluster()
    try:
        profile = load_cluster(cluster_name)
    except UserError as exc:
        problems = exc.problems
    root = _run_root(profile)
    site = read_site(os.environ.get("SLURM_CONF"))
    scheduler = list(_slurm(site, profile))
    training = list(_training())
    findings = [*_self(), _profile(profile, bool(problems)), root, *scheduler]
    findings += [*_containers(profile, site), *_gpus(), *training, *_tools()]
    trains = all(f.state == "ok" for f in training if f.what in TRAINING.values())
    ok = root.state == "ok" and not problems and (isinstance(site, Site) or trains)
    return Examination(ok, tuple(findings), problems)


def _self() -> Iterator[Finding]:
    yield Finding("ok", "fp8launch", __version__)
    yield Finding("ok", "Python", f"{platform.python_version()} ({sys.executable})")
    yield Finding("ok", "flag schemas", f"Megatron-Core {', '.join(supported_versions())}")


def _profile(profile: Cluster, broken: bool) -> Finding:
    known = ", ".join(cluster_files())
    if broken:
        return Finding("missing", "cluster profile", "does not load", "see below")
    if profile.name:
        return Finding("ok", "cluster profile", f"{profile.name}; there are: {known or 'none of your own'}")
    advice = f"put one into {config_folder()}: `fp8launch clusters` lists examples"
    return Finding("note", "cluster profile", "none: the cluster's defaults", advice)


def _run_root(profile: Cluster) -> Finding:
    from fp8launch.runs.submit import run_root

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


def _slurm(site: Site | Silent | None, profile: Cluster) -> Iterator[Finding]:
    if site is None:
        here = "its commands are here, and no cluster" if shutil.which("sbatch") else "no sbatch here"
        yield Finding("note", "Slurm", f"{here}: runs go to this machine", "log in where a cluster is")
        return
    if isinstance(site, Silent):
        yield Finding("missing", "Slurm", f"no controller answers: {site.words}", "see `scontrol ping`")
        return
    yield Finding("ok", "Slurm", slurm.version() or "of an unknown version")
    for partition in site.partitions.values():
        mark = " (default)" if partition.default else ""
        gpus = sorted({f"{n} x {kind or 'GPU'}" for node in partition.nodes for kind, n in node.gpus.items()})
        size = f"{len(partition.in_service)} of {partition.total_nodes} nodes in service"
        state: State = "ok" if partition.state == "UP" else "note"
        found = f"{partition.state.lower()}{mark}, {size}, {', '.join(gpus) or 'no GPUs that Slurm counts'}"
        yield Finding(state, f"partition {partition.name}", found)
    default = any(p.default for p in site.partitions.values())
    if profile.partition is None and not default:
        yield Finding("missing", "default partition", "none", "set `partition:` in the cluster profile")
    told = slurm.call("sacct", "-X", "-n", "-P", "-o", "JobID", "-S", "now", timeout=10)
    if told.returncode == 0:
        yield Finding("ok", "accounting", "sacct answers")
    else:
        why = " ".join(told.stderr.split())[:120] or "sacct is not here"
        yield Finding("note", "accounting", why, "not needed: run folders tell how jobs ended")


def _containers(profile: Cluster, site: Site | Silent | None) -> Iterator[Finding]:
    found = list(_runtimes(site))
    wanted = profile.runtime
    if wanted not in (None, "none") and wanted not in dict(found):
        advice = "log in where it is, or correct `runtime:`"
        yield Finding("missing", f"container runtime {wanted}", "the cluster profile names it; it is not here", advice)
    for runtime, program in found:
        yield Finding("ok", f"container runtime {runtime}", program)
    if not found and wanted in (None, "none"):
        advice = "recipes with an image need pyxis, Apptainer or Charliecloud; others run without"
        yield Finding("note", "container runtime", "none", advice)


def _runtimes(site: Site | Silent | None) -> Iterator[tuple[str, str]]:
    srun = shutil.which("srun") if isinstance(site, Site) else None
    if srun is not None and "--container-image" in slurm.call(srun, "--help", timeout=10).stdout:
        yield "pyxis", f"an option of {srun}"
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
        yield Finding("note", "GPUs here", "no nvidia-smi: none, as on most login nodes")
        return
    try:
        query = [program, "--query-gpu=name,driver_version", "--format=csv,noheader"]
        done = subprocess.run(query, capture_output=True, text=True, errors="replace", timeout=20, check=False)
        words = done.stdout if done.returncode == 0 else done.stderr or done.stdout
    except (OSError, subprocess.TimeoutExpired) as exc:
        yield Finding("note", "GPUs here", f"nvidia-smi does not answer: {exc}")
        return
    lines = [line.strip() for line in words.splitlines() if line.strip()]
    if done.returncode == 0 and lines:
        kinds = ", ".join(f"{lines.count(line)} x {line}" for line in dict.fromkeys(lines))
        yield Finding("ok", "GPUs here", f"{kinds} (name, driver)")
    else:
        yield Finding("note", "GPUs here", f"nvidia-smi says: {lines[0] if lines else 'nothing'}")


def _training() -> Iterator[Finding]:
    """What a run without a container finds in this Python."""
    for module, distribution in TRAINING.items():
        if importlib.util.find_spec(module) is None:
            advice = "needed for runs without a container on this machine: `pip install fp8launch[megatron]`"
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
        return "there, of an unknown version"


def _tools() -> Iterator[Finding]:
    for name, use in (("git", "records the code of a run"), ("shellcheck", "checks scripts in the test suite")):
        path = shutil.which(name)
        yield Finding("ok" if path else "note", name, path or "not here", None if path else f"optional: it {use}")
    if importlib.util.find_spec("submitit") is None:
        yield Finding("note", "submitit", "not installed", "needed for --backend submitit only")
    else:
        yield Finding("ok", "submitit", _version("submitit"))

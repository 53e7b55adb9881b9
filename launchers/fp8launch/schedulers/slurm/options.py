"""The sbatch options of a job: its neutral resources and its cluster profile in Slurm's terms."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path

from fp8launch.diagnostics import error
from fp8launch.job.job import Job, Resources
from fp8launch.schedulers.slurm.job_comment import job_comment

# sbatch options by their long names; None marks an option without a value.
Options = dict[str, str | None]

# A submission is one job, whose id sbatch prints at once.
_OURS = {"array", "export-file", "parsable", "test-only", "wait", "wrap"}
# Options that differ between two jobs without any effect on how fast they train.
NEUTRAL = frozenset(
    ("job-name", "time", "account", "qos", "output", "comment", "reservation", "open-mode", "partition")
)


def sbatch_options(job: Job, key: str | None = None) -> Options:
    """Return the options of a training run's job, in the order in which the script has them.

    `key` identifies the submission; without one, the name of the run folder does. Raises UserError if the cluster
    profile sets an option that fp8launch sets itself.
    """
    need = job.resources
    extra = extra_options(need)
    options = size_options(job.name, need) | site_options(need)
    requeue = need.options.get("requeue")
    if requeue is not None:
        options[_requeue(requeue)] = None
    options |= {"output": "%x-%j.out", "open-mode": "append"}
    if job.folder is not None:
        options["comment"] = None  # reserves its place; the value follows
    options |= extra
    if job.folder is not None:
        folder = Path(job.folder)
        options["comment"] = job_comment(key or folder.name, site_comment(need))
        if "output" not in extra:
            options["output"] = str(folder / "logs" / "slurm-%j.out")
    # The profile may also set `signal: false`, which leaves the option out.
    if need.warn_seconds is not None and "signal" not in _stated(need):
        # Without "B:" the signal reaches the processes, which should have exited by then: they watch the time
        # themselves.
        options["signal"] = f"TERM@{need.warn_seconds}"
    if requeue is None and need.restart is not None:
        options[_requeue(need.restart)] = None
    return options


def size_options(name: str, need: Resources) -> Options:
    """Return the options that say how large a job is and how long it may run."""
    options: Options = {
        "job-name": name,
        "nodes": str(need.nodes),
        "ntasks-per-node": str(need.tasks_per_node),
    }
    if need.time_limit is not None:
        options["time"] = need.time_limit
    if need.gpus_per_node:
        gpus = str(need.gpus_per_node)
        if need.options.get("gres_type"):
            gpus = f"{need.options['gres_type']}:{gpus}"
        notation = need.options.get("gpus", "gpus-per-node")
        if notation == "gpus-per-node":
            options["gpus-per-node"] = gpus
        elif notation == "gres":
            options["gres"] = f"gpu:{gpus}"
    if need.cpus_per_task:
        options["cpus-per-task"] = str(need.cpus_per_task)
    return options


def site_options(need: Resources) -> Options:
    """Return the options that say where a job may run and which account it uses."""
    segment = need.options.get("segment")
    stated = {
        "account": need.account,
        "partition": need.queue,
        "qos": need.options.get("qos"),
        "reservation": need.options.get("reservation"),
        "constraint": need.options.get("constraint"),
        "nodelist": need.nodelist,
        "exclude": need.exclude,
        "segment": str(segment) if segment else None,
        "mem": need.memory,
    }
    options: Options = {name: value for name, value in stated.items() if value is not None}
    if need.exclusive:
        options["exclusive"] = None
    return options


def extra_options(need: Resources) -> Options:
    """Return the options that the profile adds by name. Raises UserError for one that fp8launch sets itself."""
    options: Options = {}
    for name, value in _stated(need).items():
        if name in _OURS:
            raise error(
                "reserved-option",
                f"the option --{name} would prevent fp8launch from finding its jobs",
                f"cluster profile: options.{name}",
                "remove it",
            )
        if value is True:
            options[name] = None
        elif value is not False:
            options[name] = str(value)
    return options


def site_comment(need: Resources) -> str:
    """Return the comment that the profile gives to every job; empty if it gives none."""
    comment = _stated(need).get("comment", False)
    return "" if comment is False else str(comment)


def sbatch_lines(options: Iterable[tuple[str, str | None]]) -> list[str]:
    """Return the lines of a batch script that set these options."""
    return [f"#SBATCH --{name}" + ("" if value is None else f"={shlex.quote(value)}") for name, value in options]


def _stated(need: Resources) -> Mapping[str, str | int | bool]:
    stated: Mapping[str, str | int | bool] = need.options.get("options", {})
    return stated


def _requeue(wanted: bool) -> str:
    return "requeue" if wanted else "no-requeue"

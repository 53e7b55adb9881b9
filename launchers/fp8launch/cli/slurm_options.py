"""Options of Slurm for one submission: they override the cluster profile."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from fp8launch.cluster.profile import Cluster
from fp8launch.diagnostics import error
from fp8launch.recipe.yaml_source import Node

# sbatch options that a recipe decides, and where it does.
_NAMED = ("nodes", "time", "partition", "account", "qos", "nodelist", "exclude", "reservation", "nice")
DECIDED_ELSEWHERE = {
    **{name: f"--{name}" for name in _NAMED},
    **dict.fromkeys(("ntasks", "ntasks-per-node", "gpus", "gpus-per-node"), "--set resources.gpus_per_node=N"),
    "cpus-per-task": "--set resources.cpus_per_task=N",
    "job-name": "--set name=NAME",
}
slurm_options = (
    click.option("--partition", metavar="NAME", help="Slurm partition of this submission."),
    click.option("--account", metavar="NAME", help="Slurm account of this submission."),
    click.option("--qos", metavar="NAME", help="Slurm QOS of this submission."),
    click.option("--time", metavar="LIMIT", help="Time limit in one of Slurm's forms (resources.time)."),
    click.option("--nodelist", metavar="NODES", help="Nodes that the job must have."),
    click.option("--exclude", metavar="NODES", help="Nodes that the job must not have, besides the profile's."),
    click.option("--reservation", metavar="NAME", help="Slurm reservation of this submission."),
    click.option("--nice", type=click.IntRange(-2147483645, 2147483645), metavar="N", help="Lower the priority by N."),
    click.option("--slurm", "extra", multiple=True, metavar="KEY=VALUE", help="Any other sbatch option; repeatable."),
)


def time_override(stated: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the recipe override that a stated `--time` means."""
    if not stated.get("time"):
        return ()
    return (f'resources.time="{stated["time"]}"',)


def with_slurm_options(profile: Cluster, stated: Mapping[str, Any]) -> Cluster:
    """Return the profile with the options of one submission in place of its own. Raises UserError for a bad value."""
    names = ("partition", "account", "qos", "nodelist", "reservation")
    tree = {name: Node(stated[name], f"--{name}") for name in names if stated.get(name)}
    if stated.get("exclude"):
        # Nodes that the profile excludes are out of order for every run.
        nodes = ",".join(filter(None, (profile.exclude, stated["exclude"])))
        tree["exclude"] = Node(nodes, "--exclude")
    options = dict(map(_pair, stated.get("extra", ())))
    if stated.get("nice") is not None:
        options["nice"] = Node(stated["nice"], "--nice")
    if options:
        tree["options"] = Node(options, "--slurm")
    if not tree:
        return profile
    found = Cluster.from_node(Node(tree, "command line"))
    update = {name: getattr(found, name) for name in tree if name != "options"}
    update["options"] = {**profile.options, **found.options}
    # An option of the profile by the same name would win over the one that was just stated.
    for name in update:
        update["options"].pop(name, None)
    return profile.model_copy(update=update)


def refuse_without_slurm(stated: Mapping[str, Any], backend: str) -> None:
    """Raises UserError where options of Slurm are stated for a scheduler that has none."""
    given = []
    for name, value in stated.items():
        if value not in (None, ()) and name != "time":
            given.append(f"--{name}".replace("--extra", "--slurm"))
    if given:
        message = f"{', '.join(given)} would have no effect: the {backend} backend starts processes on this machine"
        raise error("no-slurm-options", message, given[0], "remove it, or submit to Slurm")


def _pair(text: str) -> tuple[str, Node]:
    key, sign, value = text.removeprefix("--").partition("=")
    key = key.replace("_", "-")
    if key in DECIDED_ELSEWHERE:
        fix = f"use {DECIDED_ELSEWHERE[key]}"
        raise error("bad-slurm-option", f"'{key}' has an option of its own", f"--slurm {text}", fix)
    if not key or (sign and not value):
        fix = "such as --slurm mail-type=FAIL, or --slurm contiguous for an option without a value"
        raise error("bad-slurm-option", "must look like KEY=VALUE", f"--slurm {text}", fix)
    return key, Node(value if sign else True, f"--slurm {text}")

"""`fp8launch init cluster`: a cluster profile from what `sinfo`, `scontrol` and `sacctmgr` report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from fp8launch.cli.output import echo, eprint, with_options
from fp8launch.cluster.profile import Cluster, config_folder, load_cluster
from fp8launch.diagnostics import ANSWER_IS_NO, MACHINE_LACKS, UserError, error
from fp8launch.plugins.init.questions import Asker
from fp8launch.plugins.init.slurm_offers import PartitionOffer, SiteOffers, refusal, site_offers
from fp8launch.recipe.write_yaml import write_yaml
from fp8launch.rundir.atomic_io import make_folders, write_atomically
from fp8launch.rundir.registry import default_root
from fp8launch.schedulers import probe_runtime
from fp8launch.schedulers.environment import clean_environment
from fp8launch.schedulers.slurm.inventory import Association

RUNTIMES = ("pyxis", "apptainer", "charliecloud", "none")
_options = (
    click.option("--partition", metavar="NAME", help="Partition (proposal: the one with the most GPU nodes)."),
    click.option("--account", metavar="NAME", help="Account (proposal: your default account)."),
    click.option("--qos", metavar="NAME", help="Quality of service (proposal: the account's default)."),
    click.option("--gres-type", metavar="TYPE", help="GPU type in Slurm's terms, if the partition has several."),
    click.option("--runtime", type=click.Choice(RUNTIMES), help="Container runtime (proposal: the one found here)."),
    click.option("--run-root", metavar="DIR", help="Folder for run folders, on a file system shared by all nodes."),
    click.option("--mount", "mounts", multiple=True, metavar="SRC[:DST[:ro]]", help="Container mount; repeatable."),
    click.option("--env", "env", multiple=True, metavar="NAME=VALUE", help="Variable for every job; repeatable."),
    click.option("--out", metavar="FILE|-", help="Write to this file or to stdout instead of your profiles."),
    click.option("--force", is_flag=True, help="Replace an existing profile."),
    click.option("--yes", is_flag=True, help="Accept every proposal without asking."),
)


@click.command(short_help="write a cluster profile from what Slurm reports")
@click.argument("name", default="default")
@with_options(*_options)
def cluster(
    name: str,
    partition: str | None,
    account: str | None,
    qos: str | None,
    gres_type: str | None,
    runtime: str | None,
    run_root: str | None,
    mounts: tuple[str, ...],
    env: tuple[str, ...],
    out: str | None,
    force: bool,
    yes: bool,
) -> int:
    """Write the cluster profile NAME from what Slurm reports (default: `default`, which all commands use).

    On a terminal it asks you to choose; every answer is also an option. The exit code is 1 if Slurm would not accept a
    job of one node with these settings.
    """
    target: Path | None = config_folder() / f"{name}.yaml"
    if out == "-":
        target = None
    elif out:
        target = Path(out)
    if target is not None and target.exists() and not force:
        raise error("profile-exists", "already exists", str(target), "pass another NAME, or --force to replace it")
    if target is not None and "/" in name:
        raise error("bad-name", f"'{name}' is not a name for a profile", "NAME", "use a plain word, or pass --out FILE")
    site = site_offers()
    ask = Asker(yes)
    where = _partition(site, ask, partition)
    owner = _account(ask, site, account)
    service = _qos(ask, site.qos_of(owner), qos)
    kind = None
    if gres_type or len(where.gpus) > 1:
        kind = ask.choose("GPU type", "--gres-type", gres_type, where.typed, None)
    container = _runtime(ask, runtime)
    root = ask.text("Folder for run folders, shared by all nodes", run_root, _shown(default_root()))
    values = _values(where, owner, service, kind, container, root)
    if mounts:
        values["mounts"] = list(mounts)
    if env:
        values["env"] = dict(map(_pair, env))
    text = write_yaml(values, _comments(where, owner, service, container))
    if target is None:
        echo(text, nl=False)
    else:
        make_folders(target.parent)
        write_atomically(target, text)
        load_cluster(str(target))
        eprint(f"wrote {target}")
    if out is not None:
        name = str(target or "-")
    return _tried(values, where, kind, name)


def _partition(site: SiteOffers, ask: Asker, stated: str | None) -> PartitionOffer:
    found = site.partitions
    if not found:
        raise error("no-partition", "no partition of this cluster accepts jobs now", None, "see `sinfo`", MACHINE_LACKS)
    if stated is None:
        for one in found:
            default = " (default)" if one.default else ""
            ask.note(f"  {one.name}: {one.words}{default}")
    names = [one.name for one in found]
    chosen = ask.choose("partition", "--partition", stated, names, names[0])
    return next(one for one in found if one.name == chosen)


def _account(ask: Asker, site: SiteOffers, stated: str | None) -> str | None:
    names = [one.account for one in site.accounts]
    default = site.default_account
    if default not in names:
        default = None
    return ask.choose("account", "--account", stated, names, default)


def _qos(ask: Asker, association: Association | None, stated: str | None) -> str | None:
    """Return the QOS for the profile, None to leave the choice to Slurm."""
    if association is None:
        return stated
    default = association.default_qos
    if not default and "normal" in association.qos:
        default = "normal"
    if not default:
        default = next(iter(association.qos), None)
    return ask.choose("QOS", "--qos", stated, association.qos, default)


def _runtime(ask: Asker, stated: str | None) -> str:
    found = "none"
    try:
        found = probe_runtime(Cluster(), clean_environment())
    except UserError:
        ask.note("  no container runtime was found on this machine: pyxis, Apptainer or Charliecloud")
    return ask.choose("container runtime", "--runtime", stated, RUNTIMES, found) or "none"


def _pair(text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not sign or not name:
        raise error("bad-variable", f"'{text}' must look like NAME=VALUE", "--env")
    return name, value


def _values(
    where: PartitionOffer, account: str | None, qos: str | None, kind: str | None, runtime: str, root: str
) -> dict[str, Any]:
    values: dict[str, Any] = {
        "description": f"{where.name}: {where.words}",
        "account": account,
        "partition": where.name,
        "qos": qos,
        "gpus": "gpus-per-node" if where.gpus else "none",
        "gres_type": kind,
        # "none" would switch containers off. Without this line, every command looks for a runtime.
        "runtime": None if runtime == "none" else runtime,
        "run_root": root,
    }
    return {key: value for key, value in values.items() if value}


def _comments(where: PartitionOffer, account: str | None, qos: str | None, runtime: str) -> dict[str, list[str]]:
    comments = {
        "": ["Written by `fp8launch init cluster` from what Slurm reported. Edit it freely: docs/cluster_reference.md",
             "has every key. `fp8launch doctor` shows what the cluster provides."],
        "gpus": ["How GPUs are requested: gpus-per-node, gres (--gres=gpu:8), or none."],
        "run_root": ["The folder for run folders, at the same path on every node."],
    }  # fmt: skip
    if not where.gpus:
        comments["gpus"] = ["Slurm reports no GPUs in this partition, so none are requested."]
    if runtime == "none":
        comments["run_root"] = [
            "No container runtime was found here. Recipes with an image need pyxis, Apptainer or Charliecloud:",
            "add `runtime:` when the cluster has one.",
            "",
            *comments["run_root"],
        ]
    if account:
        comments["account"] = ["sacctmgr show assoc user=$USER lists your accounts and QOS."]
    return comments


def _tried(values: dict[str, Any], where: PartitionOffer, kind: str | None, name: str) -> int:
    stated = ("account", "partition", "qos")
    options: dict[str, str] = {key: str(values[key]) for key in stated if key in values}
    if where.gpus:
        options["gpus-per-node"] = str(max(where.gpus.values()))
        if kind:
            options["gpus-per-node"] = f"{kind}:{where.gpus[kind]}"
    words = refusal(options)
    if words is not None:
        eprint(f"Slurm would reject a job of one node with these settings: {words}")
        return ANSWER_IS_NO
    eprint("Slurm would accept a job of one node with these settings.")
    doctor, recipe = "fp8launch doctor", "fp8launch init recipe llama3_8b"
    if name not in ("default", "-"):
        doctor += f" --cluster {name}"
    gpu = where.gpu_of(kind)
    if gpu:
        recipe += f" --gpu {gpu}"
    eprint(f"Next: {doctor}; {recipe}")
    return 0


def _shown(path: Path) -> str:
    """Return a path as people write it in a profile, with `~` for the home folder."""
    home = Path.home()
    if path.is_relative_to(home):
        return f"~/{path.relative_to(home)}"
    return str(path)

"""The accounts and QOS that this user may submit under, as `sacctmgr` lists them."""

from __future__ import annotations

import getpass

from fp8launch.schedulers.site_offers import Association
from fp8launch.schedulers.slurm import slurm_cli
from fp8launch.schedulers.slurm.inventory import TIMEOUT


def associations() -> list[Association]:
    """Return this user's accounts by name; none where Slurm keeps no accounts or does not list them."""
    shown = slurm_cli.call(
        "sacctmgr", "-n", "-P", "show", "assoc", f"user={getpass.getuser()}", "format=account,qos,defaultqos",
        timeout=TIMEOUT,
    )  # fmt: skip
    if shown.returncode:
        return []
    return parse_associations(shown.stdout)


def parse_associations(text: str) -> list[Association]:
    """Read lines of `account|qos,qos|default QOS`, of which there is one for each partition of an account."""
    names: dict[str, set[str]] = {}
    defaults: dict[str, str | None] = {}
    for line in text.splitlines():
        fields = line.split("|")
        if len(fields) < 3 or not fields[0]:
            continue
        account, qos, default = fields[0], fields[1], fields[2]
        names.setdefault(account, set()).update(filter(None, qos.split(",")))
        defaults[account] = default or defaults.get(account)
    found = []
    for account in sorted(names):
        found.append(Association(account, tuple(sorted(names[account])), defaults[account]))
    return found


def default_account() -> str | None:
    """Return the account of a job that names none; None where Slurm does not say."""
    shown = slurm_cli.call(
        "sacctmgr", "-n", "-P", "show", "user", getpass.getuser(), "format=defaultaccount", timeout=TIMEOUT
    )
    words = shown.stdout.split()
    if shown.returncode or not words:
        return None
    return words[0]


def account_names() -> list[str]:
    """Return the names of this user's accounts."""
    return [one.account for one in associations()]


def qos_names() -> list[str]:
    """Return every QOS that this user may use with some account."""
    names: set[str] = set()
    for one in associations():
        names.update(one.qos)
    return sorted(names)

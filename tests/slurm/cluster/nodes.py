"""A node: a slurmd with pids, a host name, mounts and an address of its own, as far as this machine allows."""

from __future__ import annotations

import fcntl
import os
import random
import shutil
import socket
import subprocess
from pathlib import Path

from .config import PORTS, SLOTS, Site
from .packages import SEARCH, ClusterError
from .processes import until

# Runs as pid 1 of the node, and stays: it reaps orphaned job steps, which slurmd as pid 1 would leave as zombies.
# The line on stdin says that the network cable is plugged in.
BOOT = """
set -e
name=$1 root=$2 address=$3
hostname "$name"
mount --bind "$root/hosts" /etc/hosts
mount --bind "$root/disk/$name" "$root/local"
mount -t tmpfs -o mode=1777 shm /dev/shm
if [ -n "$address" ]; then
  read -r plugged
  ip link set lo up
  ip addr add "$address/24" dev eth0
  ip link set eth0 up
fi
slurmd -N "$name" -D </dev/null
exit $?
"""
NAMESPACES = ("--pid", "--uts", "--ipc", "--mount", "--fork", "--kill-child=KILL", "--mount-proc")
ETC_HOSTS = Path("/etc/hosts")


def namespaces_allowed() -> bool:
    """Whether a node may have its own pids, host name and mounts: root may, but in most containers it may not."""
    return _works("unshare", *NAMESPACES, "mount", "-t", "tmpfs", "shm", "/dev/shm")


def network_allowed() -> bool:
    """Whether bridges and cables can be made; tried out where nobody sees it."""
    script = "ip link add name b type bridge && ip link add name v type veth peer name w"
    return _works("unshare", "--net", "sh", "-c", script)


def command(site: Site, node: int) -> list[str]:
    """What to start for a node; with a network of its own it waits for a line on stdin once started."""
    name = f"node{node}"
    if not site.namespaces:
        return [program("slurmd"), "-N", name, "-D"]
    flags = (*NAMESPACES, "--net") if site.network else NAMESPACES
    address = site.node_address(node) if site.network else ""
    return [program("unshare"), *flags, "sh", "-c", BOOT, name, name, str(site.root), address]


def plug_in(site: Site, node: int, pid: int) -> None:
    """Connects the node whose outermost process is ``pid`` to the cluster's bridge."""
    own, its = Path("/proc/self/ns/net"), Path(f"/proc/{pid}/ns/net")
    try:
        separate = until(lambda: its.readlink() != own.readlink(), 5, every=0.005)
    except FileNotFoundError:  # it died
        separate = False
    if not separate:
        raise ClusterError(f"node{node} got no network namespace: see {site.root}/log/node{node}.out")
    ip("link", "del", site.veth(node), check=False)  # a killed node's cable may lie there for a moment
    ip("link", "add", "name", site.veth(node), "type", "veth", "peer", "name", "eth0", "netns", str(pid))
    ip("link", "set", site.veth(node), "master", site.bridge, "up")


def claim_slot(network: bool) -> int:
    """A slot whose ports (and addresses) nobody uses; a bridge made under its name keeps others out of it."""
    routes = ip("-4", "-o", "route", "show", "table", "all") if network else ""
    for slot in random.sample(range(SLOTS), SLOTS):
        if not all(_port_is_free(17000 + PORTS * slot + offset) for offset in range(PORTS)):
            continue
        if not network or (f" 10.77.{slot}." not in routes and _make_bridge(f"fp8slurm{slot}")):
            return slot
    raise ClusterError(f"all {SLOTS} ranges of ports and addresses for test clusters are taken")


def _make_bridge(name: str) -> bool:
    """False if there is one already: some other cluster's."""
    return _works("ip", "link", "add", "name", name, "type", "bridge")


def switch_on(site: Site) -> None:
    ip("addr", "add", f"{site.controller_address}/24", "dev", site.bridge)
    ip("link", "set", site.bridge, "up")


def switch_off(site: Site) -> None:
    ip("link", "del", site.bridge, check=False)


def name_nodes_on_host(site: Site, present: bool) -> None:
    """Where nodes share the machine's mounts, their names can only resolve through the machine's own /etc/hosts.

    The lines are marked with the cluster's root and go with it. Without the right to write the file, names stay
    unknown, and only that: Slurm itself uses addresses.
    """
    mark = f"# test cluster {site.root}"
    try:
        with ETC_HOSTS.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            lines = [line for line in file.read().splitlines() if not line.endswith(mark)]
            if present:
                lines += [f"{site.node_address(n)} {name} {mark}" for n, name in enumerate(site.node_names, 1)]
            file.seek(0)
            file.write("\n".join(lines) + "\n")
            file.truncate()
    except PermissionError:
        pass


def program(name: str) -> str:
    found = shutil.which(name, path=SEARCH)
    if found is None:
        raise ClusterError(f"{name} is not installed")
    return found


def ip(*arguments: str, check: bool = True) -> str:
    done = subprocess.run([program("ip"), *arguments], capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise ClusterError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def _works(*argv: str) -> bool:
    environment = {**os.environ, "PATH": SEARCH}
    return subprocess.run(argv, env=environment, capture_output=True, check=False).returncode == 0


def _port_is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True

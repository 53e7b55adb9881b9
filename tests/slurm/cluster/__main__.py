"""The cluster by hand: ``python -m tests.slurm.cluster up``, then ``eval`` the line it prints."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from .cluster import Cluster
from .config import Settings
from .packages import ClusterError, say


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.slurm.cluster", description=__doc__)
    parser.add_argument("--root", type=Path, default=Path(f"/tmp/fp8slurm-{os.getuid()}"), help="folder (%(default)s)")
    verbs = parser.add_subparsers(dest="verb", required=True)
    up = verbs.add_parser("up", help="start a cluster; it stays until `down`")
    up.add_argument("--nodes", type=int, default=Settings.nodes)
    up.add_argument("--gpus", type=int, default=Settings.gpus, help="per node")
    up.add_argument("--shared", action="store_true", help="nodes without names and addresses of their own")
    up.add_argument("--no-accounting", action="store_true", help="no slurmdbd: sacct does not work, starts at once")
    up.add_argument("--plugstack", metavar="FILE", help="a plugstack.conf of SPANK plugins")
    up.add_argument("--pyxis", action="store_true", help="containers by the pyxis and enroot of this machine")
    up.add_argument("--conf", metavar="LINE", action="append", default=[], help="a further line of slurm.conf")
    verbs.add_parser("down", help="stop it and remove its folder")
    verbs.add_parser("status", help="nodes and jobs")
    for verb, text in (("kill", "cut the power of node N"), ("start", "boot node N again")):
        verbs.add_parser(verb, help=text).add_argument("node", type=int, metavar="N")
    # --root is welcome after the verb too
    arguments, rest = parser.parse_known_args()
    late = argparse.ArgumentParser(prog=parser.prog, add_help=False)
    late.add_argument("--root", type=Path, default=arguments.root)
    arguments.root = late.parse_args(rest).root.absolute()
    try:
        return _do(arguments)
    except ClusterError as error:
        print(f"error: {error}", file=sys.stderr)
        return 3


def _do(arguments: argparse.Namespace) -> int:
    if arguments.verb == "up":
        settings = Settings(
            arguments.nodes,
            arguments.gpus,
            accounting=not arguments.no_accounting,
            plugstack=arguments.plugstack,
            pyxis=arguments.pyxis,
            shared=arguments.shared,
            conf=tuple(arguments.conf),
        )
        began = time.monotonic()
        cluster = Cluster.up(settings, arguments.root, stay=True)
        site = cluster.site
        own = "own names and addresses" if site.network else "own names" if site.namespaces else "shared namespaces"
        say(f"{settings.nodes} nodes ({own}) idle after {time.monotonic() - began:.1f} s in {site.root}")
        print(f"export SLURM_CONF={site.slurm_conf}")
        return 0
    cluster = Cluster.at(arguments.root)
    if arguments.verb == "down":
        cluster.down()
    elif arguments.verb == "status":
        for command in (("sinfo", "-N", "-p", "main", "-o", "%N %T %c %G"), ("squeue",)):
            print(cluster.run(*command).stdout, end="")
    elif arguments.node not in range(1, cluster.site.settings.nodes + 1):
        raise ClusterError(f"there is no node{arguments.node}: nodes are {', '.join(cluster.site.node_names)}")
    elif arguments.verb == "kill":
        cluster.kill_node(arguments.node)
    else:
        cluster.start_node(arguments.node)
    return 0


if __name__ == "__main__":
    sys.exit(main())

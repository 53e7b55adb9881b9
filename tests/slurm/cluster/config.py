"""What a cluster is (plain data), and the text of its configuration files (pure functions of that data)."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from .processes import Process

SLOTS = 200  # clusters that fit on one machine
PORTS = 70  # ports per slot; 17000 + 200 * 70 stays below Linux's ephemeral ports, which begin at 32768
MAX_NODES = 64
CLUSTER, ACCOUNT = "fp8test", "research"
QOS, SHORT_QOS, FORBIDDEN_QOS = "normal", "short", "vip"


@dataclass(frozen=True)
class Settings:
    nodes: int = 4
    gpus: int = 8  # per node; links to /dev/null
    cpus: int = 64  # per node, pretended
    gpu_type: str = "h200"
    accounting: bool = True  # slurmdbd and MariaDB, so that sacct, accounts and QOS work
    plugstack: str | None = None  # a plugstack.conf of SPANK plugins
    pyxis: bool = False  # srun --container-image, with the pyxis and enroot that this machine has
    shared: bool = False  # nodes share the machine's namespaces even where each could have its own
    conf: tuple[str, ...] = ()  # further lines of slurm.conf, which win over those above them

    @property
    def problem(self) -> str | None:
        if not 1 <= self.nodes <= MAX_NODES:
            return f"nodes must be 1 to {MAX_NODES}, not {self.nodes}"
        if self.gpus < 0:
            return f"gpus must be 0 or more, not {self.gpus}"
        if self.plugstack and not Path(self.plugstack).is_file():
            return f"there is no plugstack file {self.plugstack}"
        return None


@dataclass(frozen=True)
class Site:
    """One cluster on this machine."""

    root: Path
    settings: Settings
    user: str  # who starts it, runs its daemons and submits to it
    host: str
    namespaces: bool  # a node has its own pids, host name, mounts
    network: bool  # and its own address
    slot: int
    owner: Process | None  # the cluster goes when this process does; None: it stays until `down`

    @property
    def port(self) -> int:
        return 17000 + PORTS * self.slot

    @property
    def controller_port(self) -> int:
        return self.port

    @property
    def dbd_port(self) -> int:
        return self.port + 1

    @property
    def mariadb_port(self) -> int:
        return self.port + 2

    @property
    def bridge(self) -> str:
        return f"fp8slurm{self.slot}"

    def veth(self, node: int) -> str:
        """The host's end of a node's cable (at most 15 characters)."""
        return f"fp8s{self.slot}n{node}"

    @property
    def network_prefix(self) -> str:
        return f"10.77.{self.slot}" if self.network else "127.0.1"

    @property
    def controller_address(self) -> str:
        return f"{self.network_prefix}.254" if self.network else "127.0.0.1"

    def node_address(self, node: int) -> str:
        return f"{self.network_prefix}.{node}"

    @property
    def node_names(self) -> list[str]:
        return [f"node{node}" for node in range(1, self.settings.nodes + 1)]

    @property
    def slurm_conf(self) -> Path:
        return self.root / "slurm.conf"

    @property
    def munge_socket(self) -> Path:
        return self.root / "munge" / "socket"

    @property
    def local(self) -> Path:
        """The node-local disk: the same path on every node, other contents (with ``namespaces`` only)."""
        return self.root / "local"

    def save(self) -> None:
        data = {**asdict(self), "root": str(self.root)}
        (self.root / "cluster.json").write_text(json.dumps(data, indent=1))

    @classmethod
    def load(cls, root: Path) -> Site:
        data = json.loads((root / "cluster.json").read_text())
        owner = Process(*data["owner"]) if data["owner"] else None
        settings = Settings(**{**data["settings"], "conf": tuple(data["settings"]["conf"])})
        return cls(**{**data, "root": Path(data["root"]), "settings": settings, "owner": owner})


def slurm_conf(site: Site) -> str:
    last = site.settings.nodes
    nodes = f"node[1-{last}]"
    names = nodes if site.namespaces else site.host
    first = site.port + 3
    port = str(first) if site.network else f"[{first}-{first + last - 1}]"
    size = f"CPUs={site.settings.cpus} RealMemory=1000000"
    if site.settings.gpus:
        size += f" Gres=gpu:{site.settings.gpu_type}:{site.settings.gpus}"
    return f"""\
ClusterName={CLUSTER}
SlurmctldHost={site.host}({site.controller_address})
SlurmctldPort={site.controller_port}
SlurmUser={site.user}
SlurmdUser={site.user}
AuthType=auth/munge
# A requeued job waits for cred_expire before it may start again: 120 s by default.
AuthInfo=socket={site.munge_socket},cred_expire=5
StateSaveLocation={site.root}/state
SlurmdSpoolDir={site.root}/spool/%n
SlurmctldPidFile={site.root}/pids/slurmctld.pid
SlurmdPidFile={site.root}/spool/%n.pid
SlurmctldLogFile={site.root}/log/slurmctld.log
SlurmdLogFile={site.root}/log/slurmd-%n.log
SlurmctldDebug=info
SlurmdDebug=info
MailProg=/bin/true
# Nodes are what this file says, not what the machine has.
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
SlurmctldTimeout=30
SlurmdTimeout=20
# A node answers an order to end a step after KillWait. Without an answer in time the controller repeats the order a
# minute later, and ends a job's next start, which cred_expire lets begin earlier than on a real cluster.
MessageTimeout=10
KillWait=5
MinJobAge=600
JobRequeue=1
UnkillableStepTimeout=60
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=sched_min_interval=0,sched_interval=5,batch_sched_delay=0,bf_interval=5,default_queue_depth=1000
PriorityType=priority/basic
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=30
JobCompType=jobcomp/filetxt
JobCompLoc={site.root}/log/jobcomp.txt
PlugStackConfig={site.root}/plugstack.conf
# Per node, or the PMIx servers of the nodes take each other's files in /tmp.
TmpFS={site.root}/tmp/%n
NodeName={nodes} NodeHostname={names} NodeAddr={site.network_prefix}.[1-{last}] Port={port} {size}
PartitionName=DEFAULT Nodes={nodes} OverSubscribe=NO DefaultTime=10 MaxTime=INFINITE PreemptMode=OFF PriorityTier=5
PartitionName=main Default=YES
PartitionName=debug Nodes=node1 MaxTime=30
PartitionName=low PriorityTier=1 PreemptMode=REQUEUE GraceTime=5
PartitionName=high PriorityTier=10
{_accounting(site) if site.settings.accounting else ""}{_further_lines(site)}"""


def _further_lines(site: Site) -> str:
    return "".join(f"{line}\n" for line in site.settings.conf)


def _accounting(site: Site) -> str:
    # AccountingStoragePass: without it, clients look for munge's socket in /run and retry for ever.
    return f"""\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost={site.controller_address}
AccountingStoragePort={site.dbd_port}
AccountingStoragePass={site.munge_socket}
AccountingStorageTRES=gres/gpu
AccountingStorageEnforce=associations,limits,qos
"""


# Read only where `conf` asks for a plugin of control groups, such as TaskPlugin=task/cgroup.
CGROUP_CONF = "CgroupAutomount=no\nConstrainRAMSpace=yes\n"


def gres_conf(site: Site) -> str:
    if not site.settings.gpus:
        return ""
    # Slurm sets CUDA_VISIBLE_DEVICES only for character devices; the links point to /dev/null.
    files = f"{site.root}/dev/nvidia[0-{site.settings.gpus - 1}]"
    return f"NodeName=node[1-{site.settings.nodes}] Name=gpu Type={site.settings.gpu_type} File={files}\n"


def slurmdbd_conf(site: Site) -> str:
    return f"""\
AuthType=auth/munge
AuthInfo=socket={site.munge_socket}
DbdHost=localhost
DbdAddr={site.controller_address}
DbdPort={site.dbd_port}
SlurmUser={site.user}
LogFile={site.root}/log/slurmdbd.log
PidFile={site.root}/pids/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={site.mariadb_port}
StorageUser=slurm
StoragePass=slurm
StorageLoc=slurm_acct_db
"""


def mariadb_arguments(site: Site) -> list[str]:
    return [
        "--no-defaults",
        f"--user={site.user}",
        f"--datadir={site.root}/db",
        f"--tmpdir={site.root}/mariadb-tmp",
        f"--socket={site.root}/db/socket",
        f"--pid-file={site.root}/pids/mariadbd.pid",
        "--bind-address=127.0.0.1",
        f"--port={site.mariadb_port}",
        "--skip-name-resolve",
        f"--init-file={site.root}/init.sql",
        "--innodb-buffer-pool-size=32M",
        "--innodb-log-file-size=16M",
        "--innodb-flush-log-at-trx-commit=0",
        "--innodb-lock-wait-timeout=900",
        "--performance-schema=OFF",
        "--skip-log-bin",
    ]


INIT_SQL = """\
CREATE DATABASE IF NOT EXISTS slurm_acct_db;
CREATE USER IF NOT EXISTS 'slurm'@'127.0.0.1' IDENTIFIED BY 'slurm';
GRANT ALL ON slurm_acct_db.* TO 'slurm'@'127.0.0.1';
"""


def sacctmgr_script(user: str) -> str:
    """The user has one account and may use two of three QOS."""
    return f"""\
add cluster {CLUSTER}
add account {ACCOUNT} Cluster={CLUSTER}
add qos {SHORT_QOS},{FORBIDDEN_QOS}
modify qos {SHORT_QOS} set MaxWall=10 Flags=DenyOnLimit
add user {user} Account={ACCOUNT} Cluster={CLUSTER}
modify user {user} where Account={ACCOUNT} set DefaultAccount={ACCOUNT} QOS={QOS},{SHORT_QOS} DefaultQOS={QOS}
"""


def hosts(site: Site, machine: str) -> str:
    """The nodes' /etc/hosts: a node's own name resolves to its address, which is how gloo finds its interface.

    ``machine`` is this machine's /etc/hosts; it comes last, since Debian's says 127.0.1.1 for the host name.
    """
    lines = [f"{site.node_address(number)} {name}" for number, name in enumerate(site.node_names, 1)]
    return "\n".join(["127.0.0.1 localhost", f"{site.controller_address} {site.host}", *lines, machine])

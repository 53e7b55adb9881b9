"""Starting, breaking and stopping a cluster."""

from __future__ import annotations

import os
import pwd
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path

from . import config, nodes, packages, pyxis
from .config import Settings, Site
from .packages import ClusterError, say
from .processes import Process, kill, spawn, until, writing_to

PREFIX = "fp8slurm-"
# What a Slurm job around the tests, or a user's habits, would push into every command.
FOREIGN = ("SLURM", "SBATCH_", "SALLOC_", "SRUN_", "SCANCEL_", "SQUEUE_", "SACCT", "SINFO_", "PMI")


def why_not(settings: Settings | None = None) -> str | None:
    """Return why this machine cannot run a cluster, or None if it can (perhaps after an installation)."""
    if not sys.platform.startswith("linux"):
        return f"Slurm needs Linux, and this is {sys.platform}"
    settings = settings or Settings()
    reason = packages.why_not_installable(packages.missing(settings.accounting))
    if reason is None and settings.pyxis:
        if isinstance(found := pyxis.find(), str):
            return found
        if settings.shared or not nodes.namespaces_allowed():
            return "pyxis needs nodes with disks of their own, and this machine allows no namespaces"
    return reason


class Cluster:
    """A running cluster. Make one with `Cluster.up`, or find one again with `Cluster.at`."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self._started: list[subprocess.Popen[bytes]] = []  # by this object; ours to reap

    @classmethod
    def up(cls, settings: Settings | None = None, root: Path | None = None, stay: bool = False) -> Cluster:
        """Installs what is missing and starts a cluster; all nodes are idle when it returns.

        Args:
            root: its folder, absent or left over from a cluster; by default a new short one in /tmp.
            stay: keep it when this process ends. Otherwise it goes then, however the process ends.

        Raises:
            ClusterError: with the reason; nothing is left behind.
        """
        settings = settings or Settings()
        if reason := why_not(settings):
            raise ClusterError(reason)
        if problem := settings.problem or _unusable(root):
            raise ClusterError(problem)
        if needs := packages.missing(settings.accounting):
            packages.install(needs)
        _reclaim(root)
        cluster = cls(_found(settings, root, stay))
        try:
            cluster._boot()
        except BaseException:
            cluster.down()
            raise
        return cluster

    @classmethod
    def at(cls, root: Path) -> Cluster:
        """The cluster whose folder is ``root``, started by any process. Raises ClusterError if there is none."""
        try:
            return cls(Site.load(root))
        except FileNotFoundError:
            raise ClusterError(f"there is no cluster in {root}") from None
        except (ValueError, TypeError, KeyError) as error:
            raise ClusterError(f"{root}/cluster.json was written by another version of these tests: {error}") from None

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *error: object) -> None:
        self.down()

    # -- using it

    @property
    def root(self) -> Path:
        return self.site.root

    @property
    def env(self) -> dict[str, str]:
        """The environment for commands on this cluster: this process's, without another Slurm's variables."""
        own = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
        # Charliecloud refuses to start without USER, which services and containers often lack.
        return {**own, "PATH": packages.SEARCH, "USER": self.site.user, "SLURM_CONF": str(self.site.slurm_conf)}

    def run(
        self,
        *argv: str,
        check: bool = True,
        timeout: float = 180,
        cwd: Path | None = None,
        env: dict[str, str] | None = None,
        input: str = "",
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command as a user of the cluster would. ``env`` comes on top of `env`, ``input`` is its stdin.

        Raises:
            ClusterError: it fails, and ``check``.
            subprocess.TimeoutExpired: it runs longer than ``timeout`` seconds.
        """
        done = subprocess.run(
            argv, env={**self.env, **(env or {})}, cwd=cwd or self.root, input=input,
            capture_output=True, text=True, timeout=timeout, check=False,
        )  # fmt: skip
        if check and done.returncode:
            raise ClusterError(f"{' '.join(argv)} exited {done.returncode}:\n{done.stdout}{done.stderr}")
        return done

    def wait_state(self, job: str, *states: str, timeout: float = 180) -> str:
        """Waits until squeue shows the job in one of ``states`` (it shows finished jobs too, for ten minutes)."""
        state = ""

        def reached() -> bool:
            nonlocal state
            state = self.run("squeue", "-h", "-t", "all", "-j", job, "-o", "%T", check=False).stdout.strip()
            return state in states

        if not until(reached, timeout, every=0.1):
            raise ClusterError(f"job {job} is {state or 'unknown'} after {timeout:g} s, not {' or '.join(states)}")
        return state

    def history(self, job: str, field: str = "state") -> list[str]:
        """One sacct field for each run of a job, the oldest first (a requeued job has several)."""
        return self.run("sacct", "-D", "-X", "-n", "-P", "-j", job, "-o", field).stdout.split("\n")[:-1]

    def node_state(self, node: int) -> str:
        return self.run("sinfo", "-h", "-p", "main", "-n", f"node{node}", "-o", "%T", check=False).stdout.strip()

    # -- breaking it

    def kill_node(self, node: int) -> None:
        """A power cut: slurmd, job steps and tasks of the node are gone at once. Slurm notices after 10 s or so."""
        self._kill(f"node{node}")

    def start_node(self, node: int, wait: bool = True) -> None:
        """Boots a node again; with ``wait`` it has registered and takes jobs when this returns."""
        before = self._slurmd_start(node)
        self._start_node(node)
        if wait:
            # Until the controller misses a dead node it calls it idle: its state alone says nothing.
            usual = ("idle", "mixed", "allocated")
            ready = lambda: self._slurmd_start(node) != before and self.node_state(node) in usual  # noqa: E731
            self._expect(ready, 30, f"node{node} to come back", f"node{node}")

    def stop_controller(self) -> None:
        """kill -9 of slurmctld."""
        self._kill("slurmctld")

    def start_controller(self) -> None:
        # -i: after kill -9 a state file may be cut short, which must not keep the controller down.
        self._spawn("slurmctld", [nodes.program("slurmctld"), "-D", "-i"])
        ping = lambda: "UP" in self.run("scontrol", "ping", check=False).stdout  # noqa: E731
        self._expect(ping, 15, "slurmctld to answer", "slurmctld")

    def stop_dbd(self) -> None:
        """kill -9 of slurmdbd: sacct stops answering, jobs go on."""
        self._kill("slurmdbd")

    def start_dbd(self) -> None:
        self._spawn("slurmdbd", [nodes.program("slurmdbd"), "-D"])
        answers = lambda: self.run("sacctmgr", "-n", "show", "cluster", check=False).returncode == 0  # noqa: E731
        self._expect(answers, 15, "slurmdbd to answer", "slurmdbd")

    def settle(self) -> None:
        """Waits until slurmctld has written what it knows to disk, which it does up to 5 s after a change.

        kill -9 before that is another drill: the controller comes back with what it knew then, has lost a job that was
        just submitted, gives its number to the next, or starts a running job again and drains its node.
        """
        state, now = self.root / "state" / "job_state", time.time()
        until(lambda: state.exists() and state.stat().st_mtime > now, 6, every=0.1)

    def heal(self) -> None:
        """Makes it whole and empty again: the dead are started, jobs cancelled, drained nodes resumed, all idle."""
        dead = [name for name in [*self._daemons(), *self.site.node_names] if not self._alive(name)]
        if "slurmdbd" in dead:
            self.start_dbd()
        if "slurmctld" in dead:
            self.start_controller()
        for node, name in enumerate(self.site.node_names, 1):
            if name in dead:
                self._start_node(node)
        self.run("scancel", "-u", self.site.user)
        if not until(self._all_idle, 3, every=0.1):
            names = ",".join(self.site.node_names)
            self.run("scontrol", "update", f"NodeName={names}", "State=RESUME", check=False)  # refused where not needed
            self._expect(self._all_idle, 60, "all nodes to be idle", "slurmctld", *self.site.node_names)

    def processes(self, name: str = "*") -> list[Process]:
        """What runs of this cluster, jobs included; with ``name``, of one node or daemon."""
        logs = self.root / "log"
        names = (f"{name}.out", f"slurmd-{name}.log")
        return writing_to(lambda path: path.parent == logs and any(fnmatch(path.name, each) for each in names))

    def node_process(self, node: int) -> int:
        """A process in a node's own namespaces, for nsenter; the recorded one is their parent, outside of them."""
        recorded = self._recorded(f"node{node}")
        children = Path(f"/proc/{recorded.pid}/task/{recorded.pid}/children").read_text() if recorded else ""
        if not children.split():
            raise ClusterError(f"node{node} does not run")
        return int(children.split()[0])

    def down(self) -> None:
        """Stops all that the cluster started, jobs included, and removes its folder and bridge. Twice is fine."""
        recorded = [self._recorded(name) for name in [*self.site.node_names, *self._daemons()]]
        kill([*filter(None, recorded), *self.processes()])
        kill(self.processes())  # what was being forked meanwhile
        for child in self._started:
            if child.stdin:
                child.stdin.close()
            child.wait()
        if self.site.network:
            nodes.switch_off(self.site)
        elif not self.site.namespaces:
            nodes.name_nodes_on_host(self.site, present=False)
        shutil.rmtree(self.root, ignore_errors=True)

    # -- inside

    def _boot(self) -> None:
        self._write_files()
        if self.site.owner:
            self._guard()
        self._spawn("munged", self._munged())
        if self.site.network:
            nodes.switch_on(self.site)
        elif not self.site.namespaces:
            nodes.name_nodes_on_host(self.site, present=True)
        self._expect(self.site.munge_socket.exists, 5, "munged to answer", "munged")
        if self.site.settings.accounting:
            self._start_mariadb()
            self.start_dbd()
            self.run("sacctmgr", "-i", input=config.sacctmgr_script(self.site.user))
        # A slurmd that starts before the controller listens tries again only seconds later.
        self.start_controller()
        for node in range(1, self.site.settings.nodes + 1):
            self._start_node(node)
        self._expect(self._all_idle, 30, "all nodes to be idle", "slurmctld", *self.site.node_names)

    def _write_files(self) -> None:
        site = self.site
        for folder in ("pids", "log", "state", "spool", "tmp", "disk", "local", "dev", "munge", "db"):
            (site.root / folder).mkdir()
        for name in site.node_names:
            for folder in ("spool", "tmp", "disk"):
                (site.root / folder / name).mkdir()
                (site.root / folder / name).chmod(0o755 if folder == "spool" else 0o1777)
        for gpu in range(site.settings.gpus):
            (site.root / "dev" / f"nvidia{gpu}").symlink_to("/dev/null")
        _write(site.root / "munge" / "key", os.urandom(128))
        _write(site.root / "slurmdbd.conf", config.slurmdbd_conf(site).encode())
        site.slurm_conf.write_text(config.slurm_conf(site))
        (site.root / "gres.conf").write_text(config.gres_conf(site))
        (site.root / "cgroup.conf").write_text(config.CGROUP_CONF)
        (site.root / "init.sql").write_text(config.INIT_SQL)
        (site.root / "hosts").write_text(config.hosts(site, nodes.ETC_HOSTS.read_text()))
        plugstack = site.settings.plugstack
        (site.root / "plugstack.conf").write_text(Path(plugstack).read_text() if plugstack else "")
        if site.settings.pyxis:
            self._write_pyxis()

    def _write_pyxis(self) -> None:
        found = pyxis.find()
        if isinstance(found, str):
            raise ClusterError(found)
        with (self.root / "plugstack.conf").open("a") as file:
            file.write(pyxis.plugstack(found, self.site.local))
        (self.root / "bin").mkdir()
        (self.root / "bin" / "enroot").write_text(pyxis.wrapper(found, self.site.local))
        (self.root / "bin" / "enroot").chmod(0o755)

    def _guard(self) -> None:
        """A process that takes the cluster down once the other end of its stdin, held by us alone, is closed.

        So nothing stays behind after Ctrl-C, SIGTERM or kill -9 of the tests, and no handler of theirs is touched.
        """
        # By this folder's name, not by `tests.slurm`: pytest and `python -m` import it under different ones.
        argv = [sys.executable, str(Path(__file__).parent / "guard.py"), str(self.root)]
        self._started.append(spawn(argv, self.root / "log" / "guard.out", {**os.environ}, subprocess.PIPE))

    def _munged(self) -> list[str]:
        folder = self.root / "munge"
        files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        options = [f"--{option}={folder / name}" for option, name in files.items()]
        return [nodes.program("munged"), "--foreground", "--force", "--num-threads=8", *options]

    def _start_mariadb(self) -> None:
        folder = ["--no-defaults", f"--datadir={self.root}/db", f"--user={self.site.user}"]
        simple = ["--auth-root-authentication-method=normal", "--skip-test-db"]
        # Temporary tables are named by the process's number alone: two clusters that start at once must not share /tmp.
        own = self.root / "mariadb-tmp"
        own.mkdir(exist_ok=True)
        self.run(nodes.program("mariadb-install-db"), *folder, *simple, env={"TMPDIR": str(own)})
        self._spawn("mariadbd", [nodes.program("mariadbd"), *config.mariadb_arguments(self.site)])

        def listens() -> bool:
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", self.site.mariadb_port)) == 0

        self._expect(listens, 30, "MariaDB to answer", "mariadbd")

    def _all_idle(self) -> bool:
        idle = self.run("sinfo", "-h", "-p", "main", "-t", "idle", "-o", "%D", check=False).stdout.strip()
        return idle == str(self.site.settings.nodes)

    def _slurmd_start(self, node: int) -> str:
        shown = self.run("scontrol", "-o", "show", "node", f"node{node}", check=False).stdout
        return next((word for word in shown.split() if word.startswith("SlurmdStartTime=")), "")

    def _start_node(self, node: int) -> None:
        stdin = subprocess.PIPE if self.site.network else subprocess.DEVNULL
        child = self._spawn(f"node{node}", nodes.command(self.site, node), stdin)
        if child.stdin:
            nodes.plug_in(self.site, node, child.pid)
            with suppress(BrokenPipeError):  # died at once: whoever waits for it shows its log
                child.stdin.write(b"plugged in\n")
                child.stdin.close()

    def _spawn(self, name: str, argv: Sequence[str], stdin: int = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
        if self._alive(name):
            raise ClusterError(f"{name} already runs")
        # What pyxis starts is found by slurmd's PATH.
        env = {**self.env, "PATH": f"{self.root}/bin:{self.env['PATH']}"}
        child = spawn(argv, self.root / "log" / f"{name}.out", env, stdin)
        self._started.append(child)
        process = Process.of(child.pid)
        if process:
            (self.root / "pids" / name).write_text(f"{process.pid} {process.start}\n")
        return child

    def _recorded(self, name: str) -> Process | None:
        try:
            pid, start = (self.root / "pids" / name).read_text().split()
        except FileNotFoundError:
            return None
        return Process(int(pid), int(start))

    def _alive(self, name: str) -> bool:
        process = self._recorded(name)
        return process is not None and process.alive

    def _kill(self, name: str) -> None:
        """kill -9 of a daemon or node and of what hangs on it, which (with shared namespaces) may outlive it."""
        recorded = self._recorded(name)
        kill([*([recorded] if recorded else []), *self.processes(name)])
        (self.root / "pids" / name).unlink(missing_ok=True)
        for child in self._started:
            child.poll()

    def _daemons(self) -> list[str]:
        return ["munged", *(["mariadbd", "slurmdbd"] if self.site.settings.accounting else []), "slurmctld"]

    def _expect(self, condition: Callable[[], bool], seconds: float, what: str, *logs: str) -> None:
        if not until(condition, seconds, every=0.05):
            raise ClusterError("\n".join([f"waited {seconds:g} s in vain for {what}", *map(self._tail, logs)]))

    def _tail(self, name: str) -> str:
        texts = [path.read_text(errors="replace") for path in sorted((self.root / "log").glob(f"*{name}.*"))]
        return "\n".join([f"--- log of {name}", *(line for text in texts for line in text.splitlines()[-10:])])


def _unusable(root: Path | None) -> str | None:
    # slurm.conf has no quotes, and the path of munge's socket may have 108 characters at most.
    if root and not re.fullmatch(r"/[\w./-]{1,79}", str(root)):
        return f"the root must be an absolute path of at most 80 letters, digits and ._-/, not {root}"
    return None


def _found(settings: Settings, root: Path | None, stay: bool) -> Site:
    """Picks the place, and what a node may have of its own; the folder and (if any) the bridge are made here."""
    if root is None:
        root = Path(tempfile.mkdtemp(prefix=PREFIX, dir="/tmp"))
    else:
        root.mkdir(parents=True)
    root.chmod(0o755)
    try:
        namespaces = not settings.shared and nodes.namespaces_allowed()
        network = namespaces and nodes.network_allowed()
        slot = nodes.claim_slot(network)
        owner = None if stay else Process.of(os.getpid())
        host = socket.gethostname().split(".")[0]
        site = Site(root, settings, _user(), host, namespaces, network, slot, owner)
        site.save()
    except BaseException:
        shutil.rmtree(root)
        raise
    return site


def _user() -> str:
    """Who we are by uid: $USER may be somebody else's, after sudo or in a container."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        raise ClusterError(f"Slurm needs a user with a name, and uid {os.geteuid()} has none") from None


def _reclaim(root: Path | None) -> None:
    """Takes down what is left of clusters whose owner is gone, and whatever is in ``root``."""
    for file in Path("/tmp").glob(f"{PREFIX}*/cluster.json"):
        with suppress(ClusterError):
            left = Cluster.at(file.parent)
            if left.site.owner and not left.site.owner.alive and os.access(file, os.W_OK):
                say(f"removing what a crashed run left in {left.root}")
                left.down()
    if root and root.exists():
        if (root / "cluster.json").exists():
            left = Cluster.at(root)
            if left._alive("slurmctld"):
                raise ClusterError(f"a cluster already runs in {root}")
            left.down()
        elif any(root.iterdir()):
            raise ClusterError(f"{root} holds something that is no cluster")
        else:
            root.rmdir()


def _write(path: Path, content: bytes) -> None:
    """A file that only its owner reads, from the first moment on."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:  # noqa: PTH123
        file.write(content)

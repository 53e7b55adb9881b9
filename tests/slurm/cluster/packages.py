"""The distribution's packages that the cluster is made of: which are missing, and how they get here."""

from __future__ import annotations

import fcntl
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

# Daemons live in sbin folders, which a login shell of a plain user often leaves out of PATH.
SEARCH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/local/sbin", "/usr/sbin", "/sbin"])
POLICY = Path("/usr/sbin/policy-rc.d")
PMIX = Path(f"/usr/lib/{platform.machine()}-linux-gnu/pmix2/lib")


class ClusterError(RuntimeError):
    """The cluster cannot be had on this machine, or one of its daemons does not do what it should."""


class InstallError(ClusterError):
    """The packages could not be had: no network, no such package, no room."""


@dataclass(frozen=True)
class Need:
    """``probe`` is a program, or the path of a file, that one of ``packages`` (names differ by release) brings."""

    probe: str
    packages: tuple[str, ...]
    optional: bool = False  # the cluster runs without it; tests that use it skip

    @property
    def met(self) -> bool:
        return Path(self.probe).exists() if "/" in self.probe else shutil.which(self.probe, path=SEARCH) is not None


CORE = (
    Need("munged", ("munge",)),
    Need("slurmctld", ("slurmctld",)),
    Need("slurmd", ("slurmd",)),
    Need("sbatch", ("slurm-client",)),
    Need("ip", ("iproute2",)),
    Need("unshare", ("util-linux",)),
    Need(f"{PMIX}/libpmix.so.2", ("libpmix2t64", "libpmix2"), optional=True),  # srun --mpi=pmix
    Need("ch-run", ("charliecloud-runtime",), optional=True),  # the container runtime of the tests
    Need("mksquashfs", ("squashfs-tools",), optional=True),  # .sqsh images
    Need("shellcheck", ("shellcheck",), optional=True),  # batch scripts
)
ACCOUNTING = (
    Need("slurmdbd", ("slurmdbd",)),
    Need("mariadbd", ("mariadb-server-core", "mariadb-server-core-10.6")),
    Need("mariadb-install-db", ("mariadb-server-core", "mariadb-server-core-10.6")),
    Need("my_print_defaults", ("mariadb-client-core", "mariadb-client-core-10.6")),
)


def missing(accounting: bool = True) -> tuple[Need, ...]:
    return tuple(need for need in CORE + (ACCOUNTING if accounting else ()) if not need.met)


def why_not_installable(needs: Sequence[Need]) -> str | None:
    """Why the required ones among ``needs`` cannot be installed by this process; None if they can, or none is."""
    required = list(dict.fromkeys(need.packages[0] for need in needs if not need.optional))
    if not required:
        return None
    if shutil.which("apt-get", path=SEARCH) is None:
        return f"needs the packages {', '.join(required)} (Debian's names), and this system has no apt-get"
    if os.geteuid() != 0:
        command = f"apt-get install --no-install-recommends {' '.join(required)}"
        return f"needs root to install {', '.join(required)}: {command}"
    return None


def install(needs: Sequence[Need]) -> None:
    """Installs what is missing, saying on stderr what is downloaded before it is. Raises InstallError."""
    with _one_at_a_time():
        needs = [need for need in needs if not need.met]  # another test run may have been faster
        if not needs:
            return
        _apt("update", "-qq")
        wanted = list(dict.fromkeys(name for need in needs if (name := _candidate(need))))
        if not wanted:
            return
        size = _apt("install", "--no-install-recommends", "--assume-no", *wanted, check=False)
        say(f"installing with apt-get: {' '.join(wanted)}")
        say(next((line for line in size.splitlines() if line.startswith("Need to get")), "size unknown"))
        with _no_daemon_starts():
            _apt("install", "--no-install-recommends", "-y", "-q", *wanted)
    # Debian's mpi/pmix plugin opens the library by the name that only the -dev package brings.
    if (PMIX / "libpmix.so.2").exists() and not (PMIX / "libpmix.so").exists():
        (PMIX / "libpmix.so").symlink_to("libpmix.so.2")


def say(message: str) -> None:
    print(f"slurm cluster: {message}", file=sys.stderr, flush=True)


def _candidate(need: Need) -> str | None:
    """The first of the names that this release has; an optional package that it lacks is left out."""
    for name in need.packages:
        policy = _apt("policy", name, program="apt-cache")
        if "Candidate:" in policy and "Candidate: (none)" not in policy:
            return name
    if need.optional:
        say(f"this release has no {' or '.join(need.packages)}: tests that use it are skipped")
        return None
    return need.packages[0]  # apt-get then says what is wrong


def _apt(*arguments: str, program: str = "apt-get", check: bool = True) -> str:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C.UTF-8"}
    done = subprocess.run(
        [program, *arguments], env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if check and done.returncode:
        tail = "\n".join((done.stdout + done.stderr).strip().splitlines()[-5:])
        raise InstallError(f"{program} {' '.join(arguments)} failed:\n{tail}")
    return done.stdout


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    with (Path(tempfile.gettempdir()) / "fp8slurm-install.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def _no_daemon_starts() -> Iterator[None]:
    """Where a service manager runs, packages start their daemons at once, unless this file says no."""
    ours = not POLICY.exists()
    if ours:
        POLICY.write_text("#!/bin/sh\nexit 101\n")
        POLICY.chmod(0o755)
    try:
        yield
    finally:
        if ours:
            POLICY.unlink(missing_ok=True)

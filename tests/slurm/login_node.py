"""A real sshd of its own on this machine: what a laptop sees of a cluster."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import signal
import socket
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

from cluster.packages import SEARCH
from cluster.processes import until


def why_no_sshd() -> str | None:
    """Why this machine has no login node; None if it has. Installs what is missing where it can."""
    if shutil.which("ssh") is None:
        return "needs ssh: apt-get install openssh-client"
    if shutil.which("sshd", path=SEARCH):
        return None
    if os.geteuid() or shutil.which("apt-get") is None:
        return "needs sshd: apt-get install --no-install-recommends openssh-server"
    from cluster.packages import InstallError, Need, install

    try:
        install([Need("sshd", ("openssh-server",))])
    except InstallError as error:
        return str(error)
    return None if shutil.which("sshd", path=SEARCH) else "openssh-server brought no sshd"


class LoginNode:
    """sshd on a free port with keys of its own; whoever logs in has `home` and what its .bash_profile says."""

    def __init__(self, folder: Path, home: Path, login: str) -> None:
        self.folder, self.home = folder, home
        folder.mkdir()
        home.mkdir(exist_ok=True)
        (home / ".bash_profile").write_text(login)
        for name in ("host_key", "key", "other_key"):
            command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
            subprocess.run(command, check=True)
        shutil.copy(folder / "key.pub", folder / "authorized_keys")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self.trust("host_key")
        user = pwd.getpwuid(os.getuid()).pw_name
        (folder / "ssh_config").write_text(
            f"Host login\n  HostName 127.0.0.1\n  Port {self.port}\n  User {user}\n  IdentityFile {folder}/key\n"
            f"  IdentitiesOnly yes\n  IdentityAgent none\n  UserKnownHostsFile {folder}/known_hosts\n"
            "  GlobalKnownHostsFile /dev/null\n  StrictHostKeyChecking yes\n"
        )
        (folder / "sshd_config").write_text(
            f"Port {self.port}\nListenAddress 127.0.0.1\nHostKey {folder}/host_key\nPidFile none\nUsePAM no\n"
            f"AuthorizedKeysFile {folder}/authorized_keys\nStrictModes no\nPermitRootLogin prohibit-password\n"
            f"PasswordAuthentication no\nSetEnv HOME={home}\n"
        )
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(exist_ok=True)
        sshd = shutil.which("sshd", path=SEARCH) or "sshd"
        with (folder / "sshd.log").open("wb") as log:
            self._process = subprocess.Popen([sshd, "-D", "-e", "-f", folder / "sshd_config"], stderr=log)
        assert until(self._listens, 10), (folder / "sshd.log").read_text()

    def trust(self, key: str) -> None:
        """Let the laptop know the login node by this key."""
        words = (self.folder / f"{key}.pub").read_text().split()[:2]
        (self.folder / "known_hosts").write_text(f"[127.0.0.1]:{self.port} {' '.join(words)}\n")

    def profile(self, **entries: Any) -> Path:
        """A cluster profile that reaches it."""
        file = self.folder / "site.yaml"
        file.write_text(json.dumps({"ssh": {"host": "login", "config": str(self.folder / "ssh_config")}} | entries))
        return file

    def drop(self) -> int:
        """Cut every connection that is open; how many there were."""
        sessions = self._children()
        for pid in sessions:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return len(sessions)

    def stop(self) -> None:
        self.drop()
        self._process.terminate()
        self._process.wait()

    def _children(self) -> list[int]:
        """The sshd process of each connection, which is a child of the one that listens."""
        tasks = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        return [int(pid) for pid in tasks.read_text().split()] if tasks.exists() else []

    def _listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

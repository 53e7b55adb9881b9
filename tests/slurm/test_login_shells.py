"""Login nodes whose users have other shells than bash: words, files and secrets through a real sshd."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from login_node import LoginNode, why_no_sshd

from fp8launch.cluster.profile import Login

pytestmark = pytest.mark.needs_plugin("ssh")

NASTY = [
    "a b", "'\"'", "\\\\ \\' \\", "!! !x", "$(echo no) `echo no` $HOME", "\n\n", "*", "~", "", "-n", "é", "{a,b}", "%x",
    "a;b|c&d>e", "^x^y", "\t",
]  # fmt: skip
PACKAGES = {"tcsh": "tcsh", "csh": "tcsh", "fish": "fish", "dash": "dash", "zsh": "zsh"}


# What users have in their start-up files: output, with and without an end of the line, and questions.
ASK = "read -t 0.3 answer"
NOISY = {
    ".cshrc": "echo Good morning",
    ".bashrc": f"printf 'no {{newline'; {ASK}",
    ".config/fish/config.fish": "echo '[1]'",
}


@pytest.fixture(params=["tcsh", "fish", "dash", "bash"])
def node(request: pytest.FixtureRequest) -> Iterator[LoginNode]:
    """A login node with a user of this shell, whose start-up files print something and read from stdin."""
    shell = shutil.which(request.param)
    if shell is None:
        pytest.skip(f"needs {request.param}: apt-get install {PACKAGES[request.param]}")
    if os.geteuid() or not shutil.which("useradd"):
        pytest.skip("only root can make a user with this login shell")
    if reason := why_no_sshd():
        pytest.skip(reason)
    name = f"fp8{request.param}"
    folder = Path(tempfile.mkdtemp(prefix="fp8shell-"))
    folder.chmod(0o755)
    subprocess.run(
        ["useradd", "--no-create-home", "--home-dir", str(folder / "home"), "--shell", shell, "--password", "*", name],
        check=True,
    )
    try:
        made = LoginNode(folder / "sshd", folder / "home", f"echo Welcome\n{ASK}\n")
        for file, text in NOISY.items():
            (folder / "home" / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / "home" / file).write_text(f"{text}\n")
        for path in (folder / "home", *(folder / "home").rglob("*")):
            shutil.chown(path, name)
        (folder / "sshd").chmod(0o755)
        config = folder / "sshd" / "ssh_config"
        config.write_text(config.read_text().replace(f"User {pwd.getpwuid(0).pw_name}", f"User {name}"))
        yield made
        made.stop()
    finally:
        subprocess.run(["userdel", "--force", name], check=False, capture_output=True)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def ssh() -> Any:
    from fp8launch.plugins.ssh import ssh

    return ssh


@pytest.fixture
def login(node: LoginNode, ssh: Any, monkeypatch: pytest.MonkeyPatch) -> Login:
    monkeypatch.setattr(ssh, "_sockets", lambda: None)
    return Login(host="login", config=str(node.folder / "ssh_config"))


def test_words_arrive_in_every_shell(ssh: Any, login: Login, capfd: pytest.CaptureFixture[str]) -> None:
    assert ssh.run_there(login, ["sh", "-c", 'printf "%s\\0" "$@"', "sh", *NASTY]) == 0
    assert capfd.readouterr().out.split("\0")[:-1] == NASTY


def test_files_arrive_and_are_the_user_s_alone(ssh: Any, login: Login, node: LoginNode) -> None:
    files = {"0-a.yaml": "name: a\n", "cluster.yaml": "é: '$(x)'\n"}
    folder = ssh.put(login, files)
    assert {path.name: path.read_text() for path in folder.iterdir()} == files
    assert folder.is_relative_to(node.home)
    assert not folder.stat().st_mode & 0o077
    assert folder.owner() != "root"


def test_secrets_arrive_and_are_on_no_command_line(ssh: Any, login: Login, capfd: pytest.CaptureFixture[str]) -> None:
    """The program there prints its variable and every command line that it can see."""
    value = "s3cret-Va1ue!'\"$(x)\n`y`"
    look = 'printf "%s\\0" "$MY_TOKEN"; cat /proc/[0-9]*/cmdline 2>/dev/null | tr "\\0" " "'
    assert ssh.run_there(login, ["sh", "-c", look], {"MY_TOKEN": value}) == 0
    got, _, lines = capfd.readouterr().out.partition("\0")
    assert got == value
    assert "sshd" in lines
    assert "s3cret" not in lines


def test_the_exit_status_is_the_command_s(ssh: Any, login: Login) -> None:
    assert ssh.run_there(login, ["sh", "-c", "exit 7"]) == 7

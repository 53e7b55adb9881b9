"""What is sent through ssh is what arrives, whichever login shell is at the other end."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import only, refused

from fp8launch.cluster.profile import Login, load_cluster
from fp8launch.plugins.ssh import ssh

SHELLS = [shell for shell in ("sh", "bash", "dash", "zsh", "tcsh", "csh", "fish") if shutil.which(shell)]
WORD = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=40)


def arrives(shell: str, *words: str) -> list[str]:
    line = ssh._words('printf "%s\\0" "$@"', *words)
    done = subprocess.run([shell, "-c", line], capture_output=True, check=True)
    return done.stdout.decode().split("\0")[:-1]


@settings(max_examples=12, deadline=None)
@given(st.lists(WORD, min_size=1, max_size=4))
def test_any_words_arrive_as_they_are(words: list[str]) -> None:
    assert arrives("sh", *words) == words


@pytest.mark.parametrize("shell", SHELLS)
def test_in_every_shell_that_is_here(shell: str) -> None:
    nasty = [
        "a b",
        "'\"'",
        "\\\\ \\' \\",
        "!! !x",
        "$(echo no) `echo no` $HOME",
        "\n\n",
        "*",
        "~",
        "",
        "-n",
        "é",
        "{a,b}",
    ]
    assert arrives(shell, *nasty) == nasty


@pytest.fixture
def fake_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An `ssh` that keeps its arguments and runs the command here, in a separate home, as sshd would."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / ".bash_profile").write_text("echo greeting\n")
    program = tmp_path / "bin" / "ssh"
    program.write_text(
        f"#!/bin/bash\nprintf '%s\\n' \"$@\" > '{tmp_path}/arguments'\n"
        f"HOME='{tmp_path}/home' XDG_CACHE_HOME= exec sh -c \"${{!#}}\"\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    return tmp_path


def test_files_are_put_where_only_their_owner_reads_them(fake_ssh: Path) -> None:
    files = {"0-a.yaml": "name: a\n", "cluster.yaml": "é: '$(x)'\n"}
    folder = ssh.put(Login(host="login"), files)
    assert {p.name: p.read_text() for p in folder.iterdir()} == files
    assert folder.is_relative_to(fake_ssh / "home")
    assert not stat.S_IMODE(folder.stat().st_mode) & 0o077
    assert ssh.put(Login(host="login"), files) == folder
    assert ssh.put(Login(host="login"), {**files, "cluster.yaml": "x: 1\n"}) != folder


@pytest.mark.parametrize(
    "plant",
    [
        lambda cache: cache.chmod(0o777),
        lambda cache: (os.chown(cache, 0, 65534), cache.chmod(0o775)),
        lambda cache: os.chown(cache / "fp8launch", 65534, 65534),
        lambda cache: os.chown(cache / "fp8launch/at", 65534, 65534),
        lambda cache: ((cache / "fp8launch").rename(cache / "x"), (cache / "fp8launch").symlink_to(cache / "x")),
    ],
)
def test_files_are_not_put_where_others_can_replace_them(fake_ssh: Path, plant: Callable[[Path], object]) -> None:
    """What lies there is the recipe that the login node submits next."""
    if os.geteuid():
        pytest.skip("only root can give files away")
    files = {"0-a.yaml": "name: a\n"}
    folder = ssh.put(Login(host="login"), files)
    cache = fake_ssh / "home" / ".cache"
    cache.chmod(0o1777)  # as /tmp is: nobody renames what another made
    (cache / "fp8launch").chmod(0o775)
    assert ssh.put(Login(host="login"), files) == folder
    assert not (cache / "fp8launch").stat().st_mode & 0o022
    cache.chmod(0o755)
    plant(cache)
    assert "other users could replace the recipe" in str(
        only(refused(ssh.put, Login(host="login"), files, exit_code=3))
    )


def test_a_greeting_is_not_data(fake_ssh: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert ssh.run_there(Login(host="login"), ["sh", "-c", "echo data; exit 3"]) == 3
    shown = capfd.readouterr()
    assert (shown.out, shown.err) == ("data\n", "greeting\n")


def test_secrets_arrive_and_are_in_no_argument(fake_ssh: Path, capfd: pytest.CaptureFixture[str]) -> None:
    secrets = {"TOKEN": "hush $(x)\n'y", "OTHER": "a=b"}
    program = "import os; print([os.environ['TOKEN'], os.environ['OTHER']])"
    assert ssh.run_there(Login(host="login"), [sys.executable, "-c", program], secrets) == 0
    assert capfd.readouterr().out == f"{list(secrets.values())}\n"
    assert "hush" not in (fake_ssh / "arguments").read_text()


def test_the_profile_becomes_sshs_options(fake_ssh: Path) -> None:
    login = Login(host="login.example", user="me", port=2222, identity="~/.ssh/id", config="/etc/c")
    ssh.run_there(login, ["true"])
    words = (fake_ssh / "arguments").read_text().split("\n")
    for option, value in (("-l", "me"), ("-p", "2222"), ("-i", str(Path("~/.ssh/id").expanduser())), ("-F", "/etc/c")):
        assert words[words.index(option) + 1] == value
    assert words[words.index("login.example") - 1] == "--"
    assert "BatchMode=yes" in words


@pytest.mark.parametrize("host", ["-oProxyCommand=touch x", "", "a b", "$(x)"])
def test_a_host_is_never_an_option(tmp_path: Path, host: str) -> None:
    file = tmp_path / "site.yaml"
    file.write_text(f"ssh: {{host: '{host}'}}\n")
    assert "ssh" in str(only(refused(load_cluster, str(file))))

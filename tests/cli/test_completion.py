"""Completion in the shells themselves: commands, recipes, runs, studies, profiles and keys."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import shutil
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from support import wait_for

from fp8launch.cli import commands
from fp8launch.cluster.profile import config_folder
from fp8launch.rundir.registry import default_root
from fp8launch.rundir.run_dir import create_run_folder

RUN = "tiny_cpu-20261122-075613-dbcb"


@pytest.fixture
def shell(home: Path, tmp_path: Path) -> dict[str, str]:
    """The environment of a user with one run and one cluster profile."""
    manifest = {"run_id": RUN, "name": "tiny_cpu", "created": "2026-11-22T07:56:13+00:00", "jobs": []}
    create_run_folder(default_root(), RUN, {}, manifest)
    config_folder().mkdir(parents=True)
    (config_folder() / "juniper.yaml").write_text("description: x\n")
    binaries = tmp_path / "bin"
    binaries.mkdir()
    (binaries / "fp8launch").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m fp8launch "$@"\n')
    (binaries / "fp8launch").chmod(0o755)
    return {**os.environ, "HOME": str(home), "PATH": f"{binaries}:{os.environ['PATH']}"}


CASES = [
    (["su"], "submit"),
    (["check", "llama8b_f"], "llama8b_fp8"),
    (["submit", "studies/scaling_w"], "studies/scaling_weak_llama8b"),
    (["logs", "tiny"], RUN),
    (["submit", "tiny_cpu", "--cluster", "jun"], "juniper"),
    (["submit", "tiny_cpu", "--set", "parallel.t"], "parallel.tp"),
    (["submit", "tiny_cpu", "--set", "megatron.overlap_g"], "megatron.overlap_grad_reduce"),
    pytest.param(["init", "recipe", "llama3_8"], "llama3_8b", marks=pytest.mark.needs_plugin("init")),
    pytest.param(["init", "cl"], "cluster", marks=pytest.mark.needs_plugin("init")),
    (["submit", "--dry"], "--dry-run"),
]


@pytest.mark.parametrize(
    ("words", "answer"), CASES, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_bash_completes(shell: dict[str, str], words: list[str], answer: str) -> None:
    script = (
        'eval "$(fp8launch completion bash)"; COMP_WORDS=(fp8launch "$@"); COMP_CWORD=$#; '
        "_fp8launch_completion fp8launch; printf '%s\\n' \"${COMPREPLY[@]}\""
    )
    done = subprocess.run(
        ["bash", "-c", script, "bash", *words], env=shell, capture_output=True, text=True, check=False
    )
    assert answer in done.stdout.splitlines(), done.stdout + done.stderr


@pytest.mark.parametrize(
    ("words", "answer"), CASES[:4], ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_fish_completes(shell: dict[str, str], words: list[str], answer: str) -> None:
    if shutil.which("fish") is None:
        pytest.skip("fish is not installed")
    script = f"fp8launch completion fish | source; complete --do-complete 'fp8launch {' '.join(words)}'"
    done = subprocess.run(["fish", "-c", script], env=shell, capture_output=True, text=True, check=False)
    assert answer in [line.split("\t")[0] for line in done.stdout.splitlines()], done.stdout + done.stderr


def test_zsh_has_its_script(shell: dict[str, str]) -> None:
    if shutil.which("zsh") is None:
        pytest.skip("zsh is not installed")
    script = 'autoload -Uz compinit; compinit -u; eval "$(fp8launch completion zsh)"; print ${_comps[fp8launch]}'
    done = subprocess.run(["zsh", "-f", "-c", script], env=shell, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "_fp8launch_completion", done.stderr


# Names that another user could give a run folder: a shell that reads them as code makes the file `canary`.
HOSTILE = {
    "semicolon": "hostile;touch${IFS}canary",
    "substitution": "hostile$(touch${IFS}canary)",
    "newline": "hostile\nplain,hostile;touch${IFS}canary\nplain\nhostile;touch${IFS}canary\n_",
    "space": "hostile & touch canary",
    "escape": "hostile\x1b]0;title\x07",
}
PROMPT = "typed here> "
INTERACTIVE = {
    "bash": (["bash", "--norc", "-i"], 'PS1="typed here""> "; eval "$(fp8launch completion bash)"'),
    "zsh": (
        ["zsh", "-f", "-i"],
        'autoload -Uz compinit; compinit -u -d "$HOME/dump"; eval "$(fp8launch completion zsh)"; PS1="typed here""> "',
    ),
    "fish": (
        ["fish", "--no-config", "-i"],
        "fp8launch completion fish | source; function fish_prompt; echo -n typed 'here> '; end",
    ),
}


class Terminal:
    """A shell on its own terminal."""

    def __init__(self, command: list[str], environment: dict[str, str], folder: Path) -> None:
        self.screen = ""
        main, other = pty.openpty()
        self.main = main
        self.process = subprocess.Popen(
            command,
            stdin=other,
            stdout=other,
            stderr=other,
            env=environment,
            cwd=folder,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(other)

    def type(self, text: str) -> None:
        os.write(self.main, text.encode())

    def read(self) -> str:
        while select.select([self.main], [], [], 0.05)[0]:
            try:
                chunk = os.read(self.main, 1 << 16)
            except OSError:
                break
            if not chunk:
                break
            self.screen += chunk.decode(errors="replace")
        return self.screen

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.main)


def complete_and_enter(name: str, shell: dict[str, str], folder: Path, words: str) -> str:
    """Type words, press Tab and Enter in an interactive shell, and return what its terminal got."""
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed")
    command, setup = INTERACTIVE[name]
    terminal = Terminal(command, {**shell, "TERM": "dumb", "COLUMNS": "200"}, folder)
    asked = folder / "asked"
    try:
        terminal.type(f"{setup}\r")
        wait_for(lambda: PROMPT in terminal.read())
        asked.unlink(missing_ok=True)
        terminal.type(f"{words}\t")
        wait_for(lambda: terminal.read() and asked.exists())
        terminal.type("\rexit\r")
        wait_for(lambda: terminal.read() and terminal.process.poll() is not None)
        return terminal.read()
    finally:
        terminal.close()


@pytest.fixture
def folder(shell: dict[str, str], tmp_path: Path) -> Path:
    """A working folder; `asked` in it lists what completed, and with which words fp8launch was called."""
    program = Path(shell["PATH"].split(":")[0], "fp8launch")
    folder = tmp_path / "working"
    folder.mkdir()
    program.write_text(
        f'#!/bin/sh\n"{sys.executable}" -m fp8launch "$@"\nstatus=$?\n'
        f'printf "%s|" "$_FP8LAUNCH_COMPLETE" "$@" >> "{folder}/asked"\necho >> "{folder}/asked"\nexit $status\n'
    )
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("name", INTERACTIVE)
def test_the_name_of_another_user_s_run_is_never_executed(
    shell: dict[str, str], folder: Path, name: str, kind: str
) -> None:
    """bash inserts what a program offers without quoting it."""
    hostile = HOSTILE[kind]
    manifest = {"run_id": hostile, "name": "x", "created": "2026-11-22T07:56:13+00:00", "jobs": []}
    create_run_folder(default_root(), hostile, {}, manifest)
    screen = complete_and_enter(name, shell, folder, "fp8launch logs hostil")
    assert not (folder / "canary").exists(), screen
    assert "|logs|hostil|\n" in (folder / "asked").read_text(), screen


@pytest.mark.slow
@pytest.mark.parametrize("name", INTERACTIVE)
def test_a_plain_name_is_completed_at_the_prompt(shell: dict[str, str], folder: Path, name: str) -> None:
    complete_and_enter(name, shell, folder, "fp8launch logs tiny_cpu-2")
    assert re.search(rf"\|logs\|{RUN}\|$", (folder / "asked").read_text(), re.M)


def test_a_name_like_an_option_is_not_offered(shell: dict[str, str]) -> None:
    manifest = {"run_id": "--yes", "name": "x", "created": "2026-11-22T07:56:13+00:00", "jobs": []}
    create_run_folder(default_root(), "--yes", {}, manifest)
    asked = {**shell, "_FP8LAUNCH_COMPLETE": "bash_complete", "COMP_WORDS": "fp8launch logs ", "COMP_CWORD": "2"}
    done = subprocess.run(["fp8launch"], env=asked, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["plain,latest", f"plain,{RUN}"]


def test_own_runs_are_offered_before_those_of_others(shell: dict[str, str]) -> None:
    if os.geteuid():
        pytest.skip("only root can give files away")
    manifest = {"run_id": "tiny_cpu-9", "name": "tiny_cpu", "created": "2027-11-22T07:56:13+00:00", "jobs": []}
    theirs = create_run_folder(default_root(), "tiny_cpu-9", {}, manifest)
    os.chown(theirs.path, 65534, 65534)
    asked = {**shell, "_FP8LAUNCH_COMPLETE": "bash_complete", "COMP_WORDS": "fp8launch logs tiny", "COMP_CWORD": "2"}
    done = subprocess.run(["fp8launch"], env=asked, capture_output=True, text=True, check=False)
    assert done.stdout.split() == [f"plain,{RUN}", "plain,tiny_cpu-9"]


def test_a_path_is_left_to_the_shell(shell: dict[str, str]) -> None:
    asked = {**shell, "_FP8LAUNCH_COMPLETE": "bash_complete", "COMP_WORDS": "fp8launch check ./mi", "COMP_CWORD": "2"}
    done = subprocess.run(["fp8launch"], env=asked, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "file,./mi"


def test_every_command_is_in_one_group() -> None:
    groups = dict.fromkeys(command.group for command in commands().values())
    assert list(groups) == ["Prepare", "Run", "Read", "Site"]


def test_no_color_is_respected(shell: dict[str, str]) -> None:
    script = "import pty, sys; sys.exit(pty.spawn([sys.executable, '-m', 'fp8launch', 'parse', '/nope']) >> 8)"
    for no_color, coloured in (("", True), ("1", False)):
        env = {**shell, "TERM": "xterm", "NO_COLOR": no_color}
        done = subprocess.run([sys.executable, "-c", script], env=env, stdin=subprocess.DEVNULL, capture_output=True,
                              text=True, check=False)  # fmt: skip
        assert ("\x1b[" in done.stdout) == coloured, done.stdout

"""Completion in the shells themselves: commands, recipes, runs, studies, profiles and keys."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

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
    (["init", "recipe", "llama3_8"], "llama3_8b"),
    (["init", "cl"], "cluster"),
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

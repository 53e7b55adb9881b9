"""How much is fuzzed: a few hundred cases, or as many as `FP8LAUNCH_FUZZ=N` says (about N in all)."""

from __future__ import annotations

import contextlib
import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from sandbox import Sandbox

from fp8launch.plugin_registry import SELECTION
from fp8launch.schedulers.slurm import inventory, slurm_cli
from fp8launch.submit import submission

HERE = Path(__file__).parent
_sandboxes: list[Sandbox] = []


@pytest.fixture(scope="session")
def _watched(tmp_path_factory: pytest.TempPathFactory) -> Sandbox:
    box = Sandbox(Path(os.path.realpath(tmp_path_factory.mktemp("sandbox"))))
    _sandboxes.append(box)

    def see(event: str, arguments: tuple[object, ...]) -> None:
        if box.watching:
            box.see(event, arguments)

    sys.addaudithook(see)  # stays for good, and looks at nothing between the cases
    return box


@pytest.fixture(scope="module")
def box(_watched: Sandbox) -> Iterator[Sandbox]:
    """A sandbox as home, run root, working folder and place for temporary files; without Slurm's or any programs."""
    patch = pytest.MonkeyPatch()
    for name in ("home", "runs", "work", "tmp", "bin"):
        (_watched.root / name).mkdir(exist_ok=True)
    for name in [n for n in os.environ if n.startswith(("XDG_", "SLURM", "FP8LAUNCH_")) and n != SELECTION]:
        patch.delenv(name)
    patch.setenv("HOME", str(_watched.root / "home"))
    patch.setenv("FP8LAUNCH_RUNS", str(_watched.runs))
    patch.setenv("FP8LAUNCH_TRACEBACK", "1")  # a bug is an exception here
    patch.setenv("TMPDIR", str(_watched.root / "tmp"))
    patch.setenv("PATH", str(_watched.root / "bin"))
    patch.setattr("tempfile.tempdir", None)
    patch.setattr(sys, "dont_write_bytecode", True)
    patch.setenv("MPLCONFIGDIR", str(_watched.root / "tmp"))
    patch.chdir(_watched.work)
    with contextlib.suppress(ImportError):
        # It looks for fonts, by a program too, when it is first imported.
        importlib.import_module("matplotlib.font_manager")
    yield _watched
    patch.undo()


@pytest.fixture
def talk(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, tuple[int, str, str]]]:
    """What each command answers: exit status, stdout, stderr."""
    answers: dict[str, tuple[int, str, str]] = {}

    def call(*command: str, timeout: float = 0) -> subprocess.CompletedProcess[str]:
        status, out, err = answers.get(Path(command[0]).name, (127, "", "not there"))
        return subprocess.CompletedProcess(command, status, out, err)

    monkeypatch.setattr(slurm_cli, "call", call)
    monkeypatch.setattr(submission, "SETTLE_SECONDS", 0.0)  # nobody is late here
    yield answers
    inventory.read_site.cache_clear()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for one in _sandboxes:
        terminalreporter.write_line(f"fuzzing: {one.cases} commands in {one.seconds:.0f} s")

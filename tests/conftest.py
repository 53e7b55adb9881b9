"""What all tests share: golden files with one command to write them again, and a home of their own."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from order import SLURM, file_of, place

# Imports and thousands of collected tests stay to the end. Python would search them for garbage again and again.
gc.set_threshold(200_000, 10, 10)

# How long examples take, to run or to draw, says more of the machine's load than of the code.
settings.register_profile("fp8launch", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("fp8launch")

# Variables of a surrounding job, and of a user's own folders, would reach what the tests start.
OTHERS = ("FP8LAUNCH_RUNS", "FP8LAUNCH_HOME", "FP8LAUNCH_IMAGE", "XDG_STATE_HOME", "XDG_CONFIG_HOME")
for name in [n for n in os.environ if n.startswith(OTHERS)]:
    del os.environ[name]


# A shell that runs tests in the background has SIGINT ignored, and every command that they start would inherit that.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the golden files, do not compare with them")


# Workers with a test cluster of their own. Its tests mostly wait: for Slurm's pace, for trainings of several processes.
CLUSTERS = 2


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: place(item.nodeid))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """One worker more than processors for `-n auto`: those with a test cluster leave theirs half idle."""
    return len(os.sched_getaffinity(0)) + 1


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Hand out whole files in the order of `order`, so that their fixtures are made once; Slurm's to two workers only.

    pytest-xdist ignores its own groups (a mark) under pytest 9.2, whose node ids no longer take a suffix.
    """
    if config.getvalue("dist") != "load":
        return None  # asked for otherwise
    from xdist.scheduler import LoadScopeScheduling

    config.option.loadscopereorder = False  # it would put the files with the most tests first

    class Scheduling(LoadScopeScheduling):
        """`workqueue` has the files that no worker has yet, in the order of the tests."""

        def _split_scope(self, nodeid: str) -> str:
            return file_of(nodeid)

        def _assign_work_unit(self, node: Any) -> None:
            has_cluster = node in list(self.nodes)[:CLUSTERS]
            for scope in self.workqueue:
                if has_cluster or not scope.startswith(SLURM):
                    self.workqueue.move_to_end(scope, last=False)
                    break
            super()._assign_work_unit(node)

    return Scheduling(config, log)


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compares a text with the file of that name in the golden folder beside the test."""

    def compare(name: str, text: str) -> None:
        file = request.path.parent / "golden" / name
        if request.config.getoption("--update-golden"):
            file.parent.mkdir(exist_ok=True)
            file.write_text(text, encoding="utf-8")
        assert file.is_file(), f"no golden file {name}: pytest --update-golden writes it"
        assert text == file.read_text(encoding="utf-8"), f"{name} differs: look, then pytest --update-golden"

    return compare


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home: no cluster profiles, no known run roots."""
    folder = tmp_path / "home"
    folder.mkdir()
    for name in ("XDG_CONFIG_HOME", "XDG_STATE_HOME", "FP8LAUNCH_RUNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(folder))
    return folder


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, str], str]:
    """Writes a file below the test's folder and returns its path."""

    def write_file(name: str, text: str) -> str:
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        return str(file)

    return write_file


@pytest.fixture(scope="session")
def shellcheck() -> Callable[[str], None]:
    """Asserts that shellcheck has nothing to say about a script. Skips without shellcheck."""
    program = shutil.which("shellcheck")
    if program is None:
        pytest.skip("shellcheck is not installed")

    def check(script: str) -> None:
        # SC2016: a value with a dollar sign in single quotes is what was asked for.
        command = [program, "--shell=bash", "--exclude=SC2016", "-"]
        done = subprocess.run(command, input=script, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout

    return check

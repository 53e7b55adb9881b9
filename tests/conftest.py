"""Fixtures and hooks for all tests: golden files, an empty home, and the order of test files."""

from __future__ import annotations

import gc
import importlib.abc
import importlib.machinery
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from order import SLURM, place, unit

from fp8launch import plugin_registry

# Imports and thousands of collected tests live until the end. Searching them for garbage repeatedly is slow.
gc.set_threshold(200_000, 10, 10)

# The time to draw and run examples depends more on the machine's load than on the code.
settings.register_profile("fp8launch", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("fp8launch")

Said = tuple[int, str, str]

# Variables of a surrounding job or of the user's folders would reach the programs that tests start.
OTHERS = ("FP8LAUNCH_RUNS", "FP8LAUNCH_HOME", "FP8LAUNCH_IMAGE", "XDG_STATE_HOME", "XDG_CONFIG_HOME")
for name in [n for n in os.environ if n.startswith(OTHERS)]:
    del os.environ[name]

# Most tests have an empty home. Each one would fetch Megatron again, and ask it again about the same recipes.
os.environ.setdefault("XDG_CACHE_HOME", str(Path.home() / ".cache"))

# In a shell's background jobs SIGINT is ignored, and every command that a test starts would inherit this.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


class InactivePlugins(importlib.abc.MetaPathFinder):
    """Refuse to import the code of plugins that `FP8LAUNCH_PLUGINS` leaves out, so that no test depends on it.

    Their descriptions (`plugin.py`) can be imported: messages name the plugin that is missing.
    """

    def __init__(self) -> None:
        self.active = {plugin.name for plugin in plugin_registry.active()}

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        _, _, module = name.partition("fp8launch.plugins.")
        plugin, _, rest = module.partition(".")
        if rest and rest != "plugin" and plugin not in self.active:
            raise ModuleNotFoundError(f"{name} belongs to the plugin {plugin}, which is not active", name=name)
        return None


if plugin_registry.SELECTION in os.environ:
    sys.meta_path.insert(0, InactivePlugins())


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the golden files, do not compare with them")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests of plugins that are not active, such as with `FP8LAUNCH_PLUGINS=plan pytest tests/plugins/plan`."""
    active = {plugin.name for plugin in plugin_registry.active()}
    for mark in item.iter_markers("needs_plugin"):
        (name,) = mark.args
        if name not in active:
            pytest.skip(f"the plugin {name} is not active")


# Workers that start a test cluster. Slurm tests mostly wait, for Slurm or for trainings of several processes.
CLUSTERS = 2


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: place(item.nodeid))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Use one more worker than processors for `-n auto`: workers with a test cluster are idle half of the time."""
    return len(os.sched_getaffinity(0)) + 1


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Schedule whole files in the order of `order`: fixtures are made once per file. Two workers get Slurm tests.

    pytest-xdist ignores its own groups (a mark) under pytest 9.2, whose node ids no longer take a suffix.
    """
    if config.getvalue("dist") != "load":
        return None  # the user requested another scheduler
    from xdist.scheduler import LoadScopeScheduling

    config.option.loadscopereorder = False  # it would put the files with the most tests first

    class Scheduling(LoadScopeScheduling):
        """`workqueue` has the files that are not yet assigned, in the order of the tests."""

        def _split_scope(self, nodeid: str) -> str:
            return unit(nodeid)

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
    """Return a function that compares a text with a file in the `golden` folder next to the test."""

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
    monkeypatch.setenv("HF_HOME", str(folder / ".cache" / "huggingface"))
    return folder


@pytest.fixture
def say(
    home: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, str, str]]:
    """Runs a command in this process; exit code, stdout, stderr. There is no Slurm."""
    from fp8launch.cli import run

    monkeypatch.setenv("FP8LAUNCH_RUNS", str(home / "runs"))
    monkeypatch.setenv("SLURM_CONF", "/nonexistent/slurm.conf")

    def command(*arguments: str) -> Said:
        capfd.readouterr()
        code = run(list(arguments))
        out, err = capfd.readouterr()
        assert "a bug in" not in err
        return code, out, err

    return command


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
        # SC2016: a value with a dollar sign is put in single quotes on purpose.
        command = [program, "--shell=bash", "--exclude=SC2016", "-"]
        done = subprocess.run(command, input=script, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout

    return check


@pytest.fixture(scope="session")
def megatron() -> None:
    """Skips where this Python has no torch and Megatron to train with."""
    for package in ("torch", "megatron", "megatron.training"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed for {sys.executable}")


@pytest.fixture
def secret(home: Path) -> Path:
    """A private file of this user."""
    file = home / "private" / "secret.jsonl"
    file.parent.mkdir(mode=0o700)
    file.write_text('{"text": "my secret"}\n')
    return file


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """An empty folder, to give away once it is filled."""
    folder = tmp_path / "theirs"
    folder.mkdir()
    return folder

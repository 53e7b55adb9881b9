"""fp8launch with one scheduler, which may be a dictionary: fixtures for `conftest.py` of a folder of tests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from command_line import Said, said
from memory_scheduler import NAME, Memory, MemoryScheduler
from support import wait_for

from fp8launch import plugin_registry
from fp8launch.plugin_registry import Plugin
from fp8launch.rundir.registry import find_run
from fp8launch.submit import submission


@dataclass
class Site:
    """fp8launch as a user has it, with one scheduler. `end` ends the newest job of a run."""

    backend: str
    capsys: pytest.CaptureFixture[str]
    home: Path
    options: tuple[str, ...] = ()
    memory: Memory = field(default_factory=Memory)

    def __call__(self, *arguments: str, expect: int = 0) -> Said:
        return said(self.capsys, *arguments, expect=expect)

    def submit(self, *arguments: str, recipe: str = "tiny_cpu", expect: int = 0) -> Said:
        return self("submit", recipe, "--backend", self.backend, *self.options, *arguments, expect=expect)

    def json(self, *arguments: str) -> Any:
        return json.loads(self(*arguments, "--json").out)

    def state(self, run: str) -> dict[str, Any]:
        answer: dict[str, Any] = self.json("runs", run)[0]
        return answer

    def wait(self, run: str, *states: str, seconds: float = 20) -> dict[str, Any]:
        wait_for(lambda: self.state(run)["state"] in states, seconds)
        return self.state(run)

    def end(self, run: str, status: int = 0) -> None:
        folder = find_run(run)
        if self.backend == NAME:
            self.memory.end(folder, status)
        else:
            (folder.path / "end").write_text(f"{status}\n")


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Memory]:
    """The in-memory scheduler, registered as any scheduler is."""
    monkeypatch.setattr(submission, "SETTLE_SECONDS", 0.0)
    memory = Memory()
    monkeypatch.setattr(plugin_registry, "_added", [])
    plugin_registry.add(Plugin("memory", schedulers={NAME: lambda: MemoryScheduler(memory)}))
    yield memory


@pytest.fixture
def in_memory(home: Path, memory: Memory, capsys: pytest.CaptureFixture[str]) -> Site:
    return Site(NAME, capsys, home, memory=memory)

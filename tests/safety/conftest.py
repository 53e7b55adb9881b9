"""The command in this process, with what it said."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fp8launch.cli import run

Said = tuple[int, str, str]


@pytest.fixture
def say(home: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Said]:
    """Runs a command; exit code, stdout, stderr. There is no Slurm."""
    monkeypatch.setenv("FP8LAUNCH_RUNS", str(home / "runs"))
    monkeypatch.setenv("SLURM_CONF", "/nonexistent/slurm.conf")

    def command(*arguments: str) -> Said:
        capfd.readouterr()
        code = run(list(arguments))
        out, err = capfd.readouterr()
        assert "a bug in" not in err
        return code, out, err

    return command

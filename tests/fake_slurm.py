"""Run folders, and Slurm commands that answer as another version or a broken site would.

The real Slurm that the suite starts is one version with everything on; what it cannot show is shown here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fp8launch.job.job import Job, Resources
from fp8launch.rundir.run_dir import RunFolder, create_run_folder
from fp8launch.schedulers.slurm import inventory


@pytest.fixture
def a_job(tmp_path: Path) -> Job:
    resources = Resources(
        nodes=2,
        tasks_per_node=8,
        gpus_per_node=8,
        time_limit="00:30:00",
        account="acc",
        exclusive=True,
        options={"gres_type": "h100", "options": {"comment": "two words"}},
    )
    return Job("r", "", str(tmp_path / "runs/r-1"), resources, 8, "srun", "python3")


@pytest.fixture
def a_run(tmp_path: Path) -> Callable[..., RunFolder]:
    """A run folder with this script and the ids of these jobs."""

    def make(*jobs: str, name: str = "r-1", **files: str) -> RunFolder:
        manifest = {"run_id": name, "jobs": [{"id": job} for job in jobs], "host": os.uname().nodename}
        return create_run_folder(tmp_path / "runs", name, {k.replace("_", "."): v for k, v in files.items()}, manifest)

    return make


class FakeSlurm:
    """Programs in a folder in front of PATH. `calls` are the lines that they were called with."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._log = folder / "calls"

    def program(self, name: str, answer: str = "", status: int = 0, complaint: str = "", before: str = ":") -> None:
        file = self.folder / name
        file.write_text(
            f"#!/bin/bash\necho {name} \"$@\" >> '{self._log}'\nenv > '{self.folder}/{name}.env'\n{before}\n"
            f"cat <<'END'\n{answer}\nEND\ncat >&2 <<'END'\n{complaint}\nEND\nexit {status}\n"
        )
        file.chmod(0o755)

    @property
    def calls(self) -> list[str]:
        return self._log.read_text().splitlines() if self._log.exists() else []

    def environment(self, name: str) -> dict[str, str]:
        lines = (self.folder / f"{name}.env").read_text().splitlines()
        return dict(line.split("=", 1) for line in lines if "=" in line)


@pytest.fixture
def fake_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeSlurm]:
    folder = tmp_path / "slurm-bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.delenv("SLURM_CONF", raising=False)
    inventory.read_site.cache_clear()
    yield FakeSlurm(folder)
    inventory.read_site.cache_clear()

"""`fp8launch doctor` says what is there and what is missing, and its exit code whether a run can start here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]


class Machine:
    """A user's home on a machine with chosen programs and Python packages."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.programs = folder / "bin"
        self.programs.mkdir()
        self.profiles = folder / ".config" / "fp8launch" / "clusters"
        self.profiles.mkdir(parents=True)
        self.packages: Path | None = None

    def without(self, *names: str) -> None:
        """A Python with all packages of this one but those."""
        self.packages = self.folder / "packages"
        self.packages.mkdir()
        for entry in Path(sysconfig.get_path("purelib")).iterdir():
            if not entry.name.startswith(names) and not entry.name.endswith(".pth"):
                (self.packages / entry.name).symlink_to(entry)

    def program(self, name: str, text: str) -> None:
        (self.programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (self.programs / name).chmod(0o755)

    def doctor(self, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        own = {"HOME": str(self.folder), "PATH": str(self.programs), "FP8LAUNCH_RUNS": str(self.folder / "runs")}
        path = [str(ROOT / "launchers"), *([str(self.packages)] if self.packages else [])]
        python = [sys.executable, *(["-S"] if self.packages else [])]
        return subprocess.run(
            [*python, "-m", "fp8launch", "doctor", *arguments],
            env={**own, "PYTHONPATH": os.pathsep.join(path), **env},
            capture_output=True, text=True, timeout=60, check=False, cwd=self.folder,
        )  # fmt: skip

    def findings(self, *arguments: str, expect: int = 0, **env: str) -> dict[str, dict[str, Any]]:
        done = self.doctor(*arguments, "--json", **env)
        assert done.returncode == expect, done.stdout + done.stderr
        answer = json.loads(done.stdout)
        assert answer["ok"] == (expect == 0)
        assert {f["state"] for f in answer["findings"]} <= {"ok", "missing", "note"}
        return {f["what"]: f for f in answer["findings"]}


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def trains() -> bool:
    import importlib.util

    return all(importlib.util.find_spec(name) for name in ("torch", "megatron"))


def test_a_machine_that_trains_by_itself(machine: Machine) -> None:
    if not trains():
        pytest.skip("torch or megatron-core is not installed")
    found = machine.findings()
    assert found["Slurm"]["state"] == "note" and "no sbatch" in found["Slurm"]["found"]
    assert found["torch"]["state"] == found["megatron-core"]["state"] == "ok"
    assert found["run root"]["found"].startswith(f"{machine.folder}/runs, ")
    assert "0.19" in found["flag schemas"]["found"]
    assert not (machine.folder / "runs").exists()


def test_a_machine_that_can_run_nothing(machine: Machine) -> None:
    machine.without("torch", "megatron", "submitit")
    found = machine.findings(expect=3)
    assert found["torch"]["state"] == found["megatron-core"]["state"] == found["submitit"]["state"] == "note"
    assert "pip install" in found["torch"]["advice"]
    done = machine.doctor()
    assert done.returncode == 3
    assert "No run can be started from here" in done.stderr
    assert "torch" in done.stdout and "Traceback" not in done.stderr


def test_a_run_root_that_cannot_be(machine: Machine) -> None:
    (machine.folder / "file").write_text("")
    found = machine.findings(expect=3, FP8LAUNCH_RUNS=str(machine.folder / "file" / "runs"))
    assert found["run root"]["state"] == "missing" and "is not a folder" in found["run root"]["found"]


def test_a_cluster_profile_that_does_not_load(machine: Machine) -> None:
    (machine.profiles / "default.yaml").write_text("partitoin: main\n")
    done = machine.doctor("--json")
    assert done.returncode == 3
    problem = json.loads(done.stdout)["problems"][0]
    assert problem["where"].endswith("default.yaml:1") and "partitoin" in problem["message"]
    assert machine.doctor("--cluster", "nonesuch").returncode == 3


def test_a_container_runtime_that_the_profile_names(machine: Machine) -> None:
    (machine.profiles / "here.yaml").write_text("runtime: apptainer\n")
    name = "container runtime apptainer"
    assert machine.findings("--cluster", "here", expect=0 if trains() else 3)[name]["state"] == "missing"
    machine.program("apptainer", "exit 0")
    found = machine.findings("--cluster", "here", expect=0 if trains() else 3)
    assert found[name] == {"state": "ok", "what": name, "found": f"{machine.programs}/apptainer", "advice": None}


@pytest.mark.parametrize(
    ("script", "state", "says"),
    [
        ("printf 'NVIDIA H200, 580.1\\nNVIDIA H200, 580.1\\n'", "ok", "2 x NVIDIA H200, 580.1"),
        ("echo 'driver/library version mismatch'; exit 18", "note", "mismatch"),
        ("exit 9", "note", "nothing"),
    ],
)
def test_gpus_as_nvidia_smi_tells(machine: Machine, script: str, state: str, says: str) -> None:
    machine.program("nvidia-smi", script)
    found = machine.findings(expect=0 if trains() else 3)["GPUs here"]
    assert found["state"] == state and says in found["found"]


def test_nothing_heavy_is_imported(machine: Machine) -> None:
    code = (
        "import sys, fp8launch.plugins.doctor.examine as offers; offers.examine(None); "
        "print(*{'torch', 'megatron.core', 'submitit', 'numpy'} & set(sys.modules))"
    )
    env = {"HOME": str(machine.folder), "PATH": str(machine.programs), "PYTHONPATH": str(ROOT / "launchers")}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""

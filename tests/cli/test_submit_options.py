"""What `submit` says before it submits: the GPU model, a machine without GPUs, the cost of a study, a bad name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support import path_without_slurm

from fp8launch.cli import run
from fp8launch.schedulers import local

STUDY = (
    "submit",
    "llama8b_fp8",
    "--backend",
    "sbatch",
    "--set",
    "container.image=null",
    "--sweep",
    "train.lr=1e-4,2e-4",
)


@pytest.fixture(autouse=True)
def machine(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without Slurm and GPUs."""
    monkeypatch.setenv("PATH", path_without_slurm(tmp_path / "bin"))
    (tmp_path / "bin" / "nvidia-smi").unlink(missing_ok=True)
    monkeypatch.setattr(local, "_GPU_DEVICES", ())


def test_a_machine_without_gpus_is_named_before_anything_else(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["submit", "llama8b_fp8", "--backend", "local"]) != 0
    err = capsys.readouterr().err
    assert err.index("no-gpu") < err.index("error:")
    assert "the recipe needs h100 GPUs, and this machine has no GPU [no-gpu]" in err
    assert "recipes/hardware/h100.yaml:" in err


def test_the_gpu_is_an_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*STUDY, "--gpu", "h200", "--dry-run"]) == 0
    assert "1 x 8 h200" in capsys.readouterr().err
    assert run(["submit", "llama8b_fp8", "--gpu", "h2000", "--dry-run"]) == 2
    assert "--gpu" in capsys.readouterr().err


def test_a_dry_run_of_a_study_shows_its_cost(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*STUDY, "--dry-run"]) == 0
    assert "2 runs, at most 8.0 GPU-hours (time limits x GPUs)" in capsys.readouterr().err
    assert run([*STUDY, "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["gpu_hours_at_most"] == 8.0


def test_a_study_without_a_gpu_costs_no_gpu_hours(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["submit", "tiny_cpu", "--seeds", "1,2", "--backend", "local", "--dry-run"]) == 0
    shown = capsys.readouterr().err
    assert "2 runs without a GPU" in shown
    assert "GPU-hours" not in shown


@pytest.mark.parametrize("name", ["../x y", "", ".hidden", "a/b"])
def test_a_name_that_no_study_can_have_is_refused_at_the_dry_run(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["submit", "tiny_cpu", "--backend", "local", "--dry-run", "--study", name]) == 2
    assert f"'{name}' is not a valid name for a study" in capsys.readouterr().err

"""Which scheduler a submission without --backend gets: never this machine where a cluster is meant."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import path_without_slurm

from fp8launch import cli, schedulers
from fp8launch.cluster.profile import Cluster, config_folder
from fp8launch.rundir.registry import default_root
from fp8launch.rundir.run_dir import create_run_folder
from fp8launch.schedulers.slurm import inventory

DOWN = "Slurmctld(primary) at head is DOWN"


@pytest.fixture
def without_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", path_without_slurm(tmp_path / "bin-without-slurm"))
    monkeypatch.delenv("SLURM_CONF", raising=False)
    inventory.read_site.cache_clear()


def test_without_slurm_runs_go_to_this_machine(without_slurm: None) -> None:
    assert schedulers.default(Cluster()).name == "local"
    assert schedulers.default(Cluster(run_root="/shared", python="/usr/bin/python3")).name == "local"


@pytest.mark.parametrize(
    "options", [{"partition": "main"}, {"account": "a"}, {"requeue": False}, {"options": {"reservation": "r"}}]
)
def test_a_profile_with_slurm_options_means_slurm(without_slurm: None, options: dict[str, Any]) -> None:
    assert schedulers.default(Cluster(**options)).name == "sbatch"


def test_a_dead_controller_is_no_reason_to_train_here(fake_slurm: Any) -> None:
    fake_slurm.program("sbatch", "slurm 24.11.5")
    fake_slurm.program("scontrol", DOWN, status=1)
    assert schedulers.default(Cluster()).name == "sbatch"


def test_with_a_dead_controller_nothing_starts(
    home: Path, fake_slurm: Any, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    fake_slurm.program("scontrol", DOWN, status=1)
    fake_slurm.program("sbatch", status=1, complaint="sbatch: error: Unable to contact slurm controller")
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\ntouch {tmp_path}/trained\n")
    python.chmod(0o755)
    assert cli.run(["submit", "tiny_cpu", "--set", f"launch.python={python}", "--wait"]) == 3
    assert "Unable to contact slurm controller" in capfd.readouterr().err
    fake_slurm.program("squeue")
    assert not (tmp_path / "trained").exists()
    made = [file.parent for file in home.rglob("manifest.json")]
    fake_slurm.program("sbatch", "4242")
    assert cli.run(["submit", "tiny_cpu", "--set", f"launch.python={python}"]) == 0
    assert [file.parent for file in home.rglob("manifest.json")] == made, "the same command completes it"


def test_a_profile_for_a_cluster_that_is_not_here(
    home: Path, without_slurm: None, write: Callable[[str, str], str], capfd: pytest.CaptureFixture[str]
) -> None:
    profile = write("c.yaml", "partition: main\n")
    assert cli.run(["submit", "tiny_cpu", "--cluster", profile]) == 3
    err = capfd.readouterr().err
    assert "[no-slurm]" in err and "--backend local" in err
    assert not list(home.rglob("manifest.json"))
    assert cli.run(["submit", "tiny_cpu", "--cluster", profile, "--dry-run"]) == 0
    assert "#SBATCH --partition=main" in capfd.readouterr().out


def test_a_slurm_conf_that_is_not_there_is_named(
    home: Path, fake_slurm: Any, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_slurm.program("sbatch", "slurm 24.11.5")
    monkeypatch.setenv("SLURM_CONF", "/nowhere/slurm.conf")
    assert cli.run(["submit", "tiny_cpu"]) == 3
    assert "SLURM_CONF is /nowhere/slurm.conf" in capfd.readouterr().err
    assert not list(home.rglob("manifest.json"))


NO_CONFIGURATION = "scontrol: fatal: Could not establish a configuration source"


def test_slurm_without_a_cluster_leaves_runs_to_this_machine(
    home: Path, fake_slurm: Any, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Distributions install Slurm's commands as a dependency of other packages."""
    monkeypatch.delenv("SLURM_CONF", raising=False)
    fake_slurm.program("sbatch", "slurm 24.11.5")
    fake_slurm.program("scontrol", status=1, complaint=NO_CONFIGURATION)
    inventory.read_site.cache_clear()
    assert cli.run(["submit", "tiny_cpu", "--dry-run"]) == 0
    shown = capfd.readouterr()
    assert "#SBATCH" not in shown.out and "warning: sbatch is installed but finds no cluster" in shown.err


@pytest.mark.parametrize(
    "options", [("--backend", "sbatch"), ("--partition", "main"), ("--cluster", "site"), ("--cluster", "./site.yaml")]
)
def test_a_cluster_that_was_named_is_never_replaced_by_this_machine(
    home: Path, fake_slurm: Any, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, options: tuple[str]
) -> None:
    monkeypatch.delenv("SLURM_CONF", raising=False)
    monkeypatch.chdir(home)
    for folder in (home, config_folder()):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "site.yaml").write_text("python: /usr/bin/python3\n")
    fake_slurm.program("sbatch", "slurm 24.11.5")
    fake_slurm.program("scontrol", status=1, complaint=NO_CONFIGURATION)
    inventory.read_site.cache_clear()
    assert cli.run(["submit", "tiny_cpu", *options]) == 3
    assert "[no-slurm]" in capfd.readouterr().err


def test_after_a_run_on_a_cluster_nothing_trains_on_its_login_node(
    home: Path, fake_slurm: Any, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLURM_CONF", raising=False)
    create_run_folder(default_root(), "a-1", {}, {"created": "2026-01-01T00:00:00+00:00", "backend": "sbatch"})
    fake_slurm.program("sbatch", "slurm 24.11.5")
    fake_slurm.program("scontrol", status=1, complaint=NO_CONFIGURATION)
    inventory.read_site.cache_clear()
    assert cli.run(["submit", "tiny_cpu"]) == 3
    assert "[no-slurm]" in capfd.readouterr().err

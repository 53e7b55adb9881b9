"""Drills on a full disk: a small file system as run root or for checkpoints, filled to the last byte."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from cluster.processes import until
from drilling import ITERATIONS, MODEL, Chain, row
from launching import Site, sets

pytestmark = [pytest.mark.train, pytest.mark.slow, pytest.mark.drill]


@dataclass
class Disk:
    """A file system of 24 MiB, which node 1 has too."""

    folder: Path

    def fill(self) -> None:
        with (self.folder / "ballast").open("wb", buffering=0) as file:
            for size in (1 << 20, 1 << 12, 1):
                while True:
                    try:
                        file.write(b"x" * size)
                    except OSError:
                        break
        assert os.statvfs(self.folder).f_bavail == 0

    def make_room(self) -> None:
        (self.folder / "ballast").unlink(missing_ok=True)


@pytest.fixture
def disk(site: Site) -> Iterator[Disk]:
    folder = site.folder / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "drill", str(folder)], check=False).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        _reboot(site)
        assert until(lambda: site.slurm.node_state(1) == "idle", 90)
        yield Disk(folder)
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False)
        _reboot(site)  # the cluster is healed after each test


def _reboot(site: Site) -> None:
    """A node has the mounts that there were when it was started."""
    site.slurm.kill_node(1)
    assert until(lambda: "down" in site.slurm.node_state(1), 60)  # before, idle says nothing
    site.slurm.start_node(1, wait=False)


NODE = "nodelist: node1\n"


def test_disk_full_at_the_manifest(site: Site, disk: Disk) -> None:
    disk.fill()
    site.runs = disk.folder / "runs"
    (site.folder / "site.yaml").write_text(NODE)
    choices = ["--backend", "sbatch", "--run-root", str(site.runs), "--cluster", str(site.folder / "site.yaml")]
    # Checkpoints elsewhere: the check refuses them on a full disk before anything is written.
    choices += [*MODEL, *sets(f"checkpoint.dir={site.folder}/ckpt", "checkpoint.interval=400")]
    refused = site.run("submit", "recipes/tiny_cpu.yaml", *choices)
    assert refused.returncode in (1, 3), refused.stderr
    assert site.slurm.run("squeue", "-h").stdout == ""
    told = next(line for line in refused.stderr.splitlines() if "error" in line)
    assert "left" in told or "cannot write the run folder: No space left on device [" in told
    disk.make_room()
    run = site.submit(*choices)
    assert [folder.name for folder in site.runs.glob("tiny_cpu-*")] == [Path(run).name]
    one = Chain(site, Path(run).name)
    assert one.over(240)["state"] == "completed"
    row("disk full at the manifest, then freed; the same `submit`", one, told.replace(str(disk.folder), "DISK").strip())


def test_disk_full_at_the_log(site: Site, disk: Disk, chain: Callable[..., Chain]) -> None:
    """Run root full, checkpoints elsewhere: a log that cannot grow is no hang, and the training reaches its end."""
    elsewhere = sets(f"checkpoint.dir={site.folder}/ckpt", "survive.hang_after=60")
    site.runs = disk.folder / "runs"
    site.env["FP8LAUNCH_RUNS"] = str(site.runs)
    one = chain("--attempts", "3", *elsewhere, profile=NODE)
    one.trained(40)
    disk.fill()
    one.reaches(lambda: site.slurm.run("squeue", "-h").stdout == "", 400)
    assert one.checkpoint == ITERATIONS
    disk.make_room()
    assert site.state(one.run)["state"] == "completed"
    again = site.run("resume", one.run)
    assert again.returncode == 1 and "has completed its 400 iterations" in again.stderr, again.stderr
    row("disk full at the log", one, "the training is done; its log ends where the disk was full")


def test_disk_full_at_a_checkpoint(site: Site, disk: Disk, chain: Callable[..., Chain]) -> None:
    one = chain("--attempts", "3", *sets(f"checkpoint.dir={disk.folder}/ckpt"), profile=NODE)
    state = one.over(240)  # 24 MiB hold some checkpoints, not all
    assert state["survival"]["stopped"].startswith("disk-full"), state
    reached = one.checkpoint
    assert 0 < reached < ITERATIONS
    report = site.json("parse", one.run)
    assert report["failure"]["code"] == "disk-full"
    for old in sorted((disk.folder / "ckpt").glob("iter_*")):
        if int(old.name[5:]) != reached:
            subprocess.run(["rm", "-r", str(old)], check=True)
    done = site.run("resume", one.run)
    assert done.returncode == 0 and f"from iteration {reached}" in done.stderr, done.stderr
    one.reaches(lambda: one.checkpoint > reached, 90)
    site.run("cancel", one.run)
    row("disk full at a checkpoint, then freed; `resume`", one, state["survival"]["stopped"])

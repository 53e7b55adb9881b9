"""Survival of runs in containers, by a container runtime that distributions package: what CI has without pyxis."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from cluster import Image
from cluster.processes import until
from launching import Site, sets

INTERVAL = "checkpoint.interval=10"


def profile(site: Site, image: Image, *more: str) -> Path:
    file = site.folder / "site.yaml"
    mounts = ", ".join([*map(str, image.mounts), *more])
    file.write_text(f"runtime: charliecloud\nimages: {{tiny: {image.folder}}}\nmounts: [{mounts}]\n")
    return file


def log(site: Site, run: str) -> dict[str, Any]:
    file = site.runs / run / "attempts.json"
    if not file.is_file():
        return {"attempts": [], "finished": False}
    found: dict[str, Any] = json.loads(file.read_text())
    return found


@pytest.mark.train
@pytest.mark.parametrize("mode", ["srun", "torchrun"])
def test_a_container_job_that_starts_again_continues(site: Site, image: Image, mode: str) -> None:
    saves = site.folder / "saves"
    saves.mkdir()
    inside = sets(
        "container.image=tiny",
        f"launch.python={sys.executable}",
        f"launch.mode={mode}",
        "train.iterations=200",
        "checkpoint.dir=/mnt/z",
        INTERVAL,
        "survive.attempts=2",
    )
    run = site.submit("--cluster", str(profile(site, image, f"{saves}:/mnt")), *inside)
    assert until((saves / "z" / "latest_checkpointed_iteration.txt").exists, 240, 0.5)
    site.slurm.run("scontrol", "requeue", site.state(run)["jobs"][0])
    assert until(lambda: log(site, run)["finished"], 300, 0.5), log(site, run)
    first, second = log(site, run)["attempts"]
    assert (first["cause"], first["counts"]) == ("interrupted", False)
    assert second["before"] == first["after"] >= 10


def test_an_image_without_the_jobs_python(site: Site, image: Image) -> None:
    inside = sets("container.image=tiny", "launch.python=python4", "checkpoint.dir=ckpt", INTERVAL)
    run = site.submit("--cluster", str(profile(site, image)), *inside, *sets("survive.attempts=2"))
    assert until(lambda: site.state(run)["state"] == "failed", 120, 0.5), site.state(run)
    assert "python4" in site.json("parse", run)["failure"]["message"]
    assert "stopped" in site.state(run)["survival"] and "command-not-found" in site.state(run)["survival"]["stopped"]


@pytest.mark.train
def test_ranks_of_a_node_mount_the_same_image_at_once(site: Site, image: Image) -> None:
    file = site.folder / "squashed.yaml"
    mounts = ", ".join(map(str, image.mounts))
    file.write_text(f"runtime: charliecloud\nimages: {{tiny: {image.squash()}}}\nmounts: [{mounts}]\n")
    inside = sets("container.image=tiny", f"launch.python={sys.executable}", "train.iterations=3")
    run = site.submit("--cluster", str(file), *inside, *sets("resources.nodes=1", "resources.gpus_per_node=2"))
    assert until(lambda: site.state(run)["state"] in ("completed", "failed"), 240, 0.5)
    assert site.state(run)["state"] == "completed", site.json("parse", run)["failure"]

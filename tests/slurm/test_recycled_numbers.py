"""Runs whose jobs have one number: Slurm begins again at FirstJobId once it has used all up to MaxJobId."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Cluster, Settings, why_not
from cluster.processes import until
from launching import Site, sets

# One number for all jobs, which Slurm gives away again two seconds after the end of a job.
ONE_NUMBER = ("FirstJobId=100", "MaxJobId=101", "MinJobAge=2")


@pytest.fixture
def one_number(tmp_path: Path) -> Iterator[Site]:
    settings = Settings(nodes=1, conf=ONE_NUMBER)
    if reason := why_not(settings):
        pytest.skip(reason)
    with Cluster.up(settings) as cluster:
        yield Site(cluster, tmp_path)


def started(site: Site, program: str) -> str:
    """A run whose training is a program that does not look at its arguments."""
    return site.submit("--backend", "sbatch", "--yes", *sets(f"launch.python={program}"))


def ended(site: Site, run: str) -> str:
    assert until(lambda: site.state(run)["state"] in ("completed", "failed"), 120, 0.5), site.state(run)
    return str(site.state(run)["state"])


def test_runs_with_jobs_of_one_number_are_told_apart(one_number: Site, tmp_path: Path) -> None:
    site = one_number
    first = started(site, "/usr/bin/true")
    assert ended(site, first) == "completed"
    second = started(site, "/usr/bin/false")
    assert ended(site, second) == "failed"
    waits = tmp_path / "waits"
    waits.write_text("#!/bin/sh\nexec sleep 600\n")
    waits.chmod(0o755)
    third = started(site, str(waits))
    assert until(lambda: site.state(third)["state"] == "running", 120, 0.5), site.state(third)
    found = {one["run"]: one for one in site.json("runs", first, second, third)}
    assert {one["jobs"][0] for one in found.values()} == {"100"}
    assert [found[run]["state"] for run in (first, second, third)] == ["completed", "failed", "running"]
    # The exit status in the run folder is not all that there is: the accounting has a row for each of them.
    assert [found[run]["source"] for run in (first, second, third)] == ["sacct", "sacct", "squeue"]
    done = site.run("cancel", first, second)
    assert done.returncode == 0, done.stderr
    assert site.state(third)["state"] == "running"
    assert site.run("cancel", third).returncode == 0
    assert until(lambda: site.state(third)["state"] == "cancelled", 60, 0.5), site.state(third)

"""`data build --cluster`: an array over the shards of a dataset on a real Slurm, and the merge that follows."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from launching import ROOT, Site
from support import wait_for

pytestmark = pytest.mark.needs_plugin("data")

KILLED = [sys.executable, str(ROOT / "tests/killed_launcher.py")]


def _source(folder: Path, count: int) -> list[str]:
    texts = [f"document {at} " + "word " * (at % 50) for at in range(count)]
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return texts


def test_an_array_builds_what_one_machine_builds(site: Site) -> None:
    _source(site.folder, 400)
    profile = site.folder / "site.yaml"
    profile.write_text("name: site\n")
    words = ["data", "build", str(site.folder / "a.jsonl"), "--tokenizer", "bytes", "--shard-bytes", "5000"]
    done = site.run(*words, "--out", str(site.folder / "here"))
    assert done.returncode == 0, done.stderr
    there = [
        *words,
        "--out",
        str(site.folder / "there"),
        "--cluster",
        str(profile),
        "--jobs",
        "3",
        "--time",
        "00:10:00",
    ]
    done = site.run(*there, "--wait")
    assert done.returncode == 0, done.stderr
    for ending in ("bin", "idx"):
        assert (site.folder / f"there.{ending}").read_bytes() == (site.folder / f"here.{ending}").read_bytes()
    assert not (site.folder / "there.build").exists()

    def completed_tasks() -> int:
        tasks = site.slurm.run("sacct", "-X", "-n", "-P", "-o", "JobID,State").stdout
        return sum("_" in line and "COMPLETED" in line for line in tasks.splitlines())

    wait_for(lambda: completed_tasks() >= 3)  # the accounting learns of an end later than the queue


def test_the_same_command_builds_what_a_failed_task_left(site: Site) -> None:
    texts = _source(site.folder, 200)
    file = site.folder / "a.jsonl"
    good = file.read_text().splitlines(keepends=True)
    profile = site.folder / "site.yaml"
    profile.write_text("name: site\n")
    file.write_text("".join([*good[:150], "broken\n", *good[150:]]))
    words = [
        "data",
        "build",
        str(file),
        "--tokenizer",
        "bytes",
        "--shard-bytes",
        "2000",
        "--out",
        str(site.folder / "out"),
    ]
    words += ["--cluster", str(profile), "--jobs", "4", "--time", "00:10:00", "--wait"]
    done = site.run(*words)
    assert done.returncode == 1, done.stderr
    assert "shards are not finished" in done.stderr
    logs = "".join(log.read_text() for log in (site.folder / "out.build").glob("slurm-*.out"))
    assert f"{file}:151: error: this document cannot be used" in logs
    done = site.run(*words, "--on-error", "skip")
    assert done.returncode == 0, done.stderr
    assert f"{len(texts):,} documents" in done.stdout


class Builds:
    """Commands that build one dataset by jobs that begin when `begin` is called, and what Slurm has of them."""

    def __init__(self, site: Site) -> None:
        self.site = site
        _source(site.folder, 200)
        profile = site.folder / "later.yaml"
        profile.write_text(f"name: site\noptions: {{begin: now+10hours}}\nstorage: {{data: {site.folder}/data}}\n")
        (site.folder / "data").mkdir()
        words = ["data", "build", str(site.folder / "a.jsonl"), "--tokenizer", "bytes", "--shard-bytes", "2000"]
        self.here = [*words, "--out", str(site.folder / "here")]
        # Relative: below the profile's storage.
        self.words = [*words, "--out", "there", "--cluster", str(profile), "--jobs", "3", "--time", "00:10:00"]

    def killed(self, at: int = 0, after: float = 0.0, log: str = "") -> None:
        """Give the command, and kill it before its side effect number `at`, or `after` so many seconds of that."""
        env = {"KILL_BELOW": f"{self.site.folder}/", "KILL_AT": str(at), "KILL_AFTER": str(after), "KILL_LOG": log}
        done = subprocess.run(
            [*KILLED, *self.words], env={**self.site.env, **env}, cwd=ROOT, capture_output=True, check=False
        )
        assert done.returncode in (-signal.SIGKILL, 0), done.stderr

    def steps(self) -> list[str]:
        """The side effects of a command that is left alone, in order."""
        log = self.site.folder.parent / "steps"
        self.killed(log=str(log))
        return log.read_text().splitlines()

    def jobs(self) -> list[str]:
        """The arrays and other jobs that wait or run, each once."""
        rows = self.site.slurm.run("squeue", "-h", "-t", "PD,R", "-o", "%F|%k").stdout.split()
        return sorted({row.partition("|")[0] for row in rows if "fp8launch:data-" in row})

    def clear(self) -> None:
        self.site.slurm.run("scancel", *self.jobs())
        wait_for(lambda: not self.jobs())

    def begin(self) -> None:
        for job in self.jobs():
            self.site.slurm.run("scontrol", "update", f"JobId={job}", "StartTime=now")


@pytest.mark.slow
def test_killed_around_sbatch_nothing_is_submitted_twice_and_nothing_is_lost(site: Site) -> None:
    builds = Builds(site)
    assert site.run(*builds.here).returncode == 0
    steps = builds.steps()
    assert len(builds.jobs()) == 2
    builds.clear()
    array, merge = (number for number, step in enumerate(steps, 1) if step == "command sbatch")
    places = [(array, 0.0), (array, 0.02), (merge, 0.0), (merge, 0.02), (array + 1, 0.0)]
    for at, after in places:
        builds.killed(at, after)
        done = site.run(*builds.words)
        assert done.returncode == 0, done.stderr
        jobs = builds.jobs()
        assert jobs == sorted(done.stdout.split()) and len(jobs) == 2, (at, after, steps[at - 1])
        if (at, after) != places[-1]:
            builds.clear()
    # Of the last one the array was there, and only the merge was missing: these jobs make the whole dataset.
    refused = site.run(*builds.words, "--restart")
    assert refused.returncode == 1 and "have not ended" in refused.stderr
    builds.begin()
    done = site.run(*builds.words, "--wait")
    assert done.returncode == 0, done.stderr
    assert "submitted earlier" in done.stderr or "already exists" in done.stderr
    for ending in ("bin", "idx"):
        assert (site.folder / f"data/there.{ending}").read_bytes() == (site.folder / f"here.{ending}").read_bytes()


LATE = """
import sys, time
from pathlib import Path
from fp8launch.cli import run
from fp8launch.plugins.data.cli import array

begin, looked, ended = array.make_folder, Path(sys.argv.pop(1)), Path(sys.argv.pop(1))

def late(folder):
    looked.touch()
    while not ended.exists():
        time.sleep(0.1)
    begin(folder)

array.make_folder = late
sys.exit(run(sys.argv[1:]))
"""


def test_jobs_that_end_while_the_command_begins_are_not_submitted_again(site: Site) -> None:
    builds = Builds(site)
    assert site.run(*builds.words).returncode == 0
    looked, ended = site.folder / "looked", site.folder / "ended"
    command = [sys.executable, "-c", LATE, str(looked), str(ended), *builds.words]
    with subprocess.Popen(command, env=site.env, cwd=ROOT, stderr=subprocess.PIPE, text=True) as late:
        wait_for(looked.exists)
        builds.begin()
        wait_for(lambda: not builds.jobs())
        ended.touch()
        assert late.stderr is not None
        said = late.stderr.read()
    assert late.returncode == 0, said
    assert "this dataset already exists" in said
    assert builds.jobs() == []
    assert (site.folder / "data/there.manifest.json").exists()
    assert not (site.folder / "data/there.build").exists()

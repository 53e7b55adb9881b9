"""`data build --cluster`: an array over the shards of a dataset on a real Slurm, and the merge that follows."""

from __future__ import annotations

import json
from pathlib import Path

from launching import Site
from support import wait_for


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

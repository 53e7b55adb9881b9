"""What fuzzing found: texts that Python calls digits and that are no numbers, or have too many of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fp8launch.check.site import minutes, parse_gpus, parse_nodes, parse_partitions
from fp8launch.runs.folder import RunFolder, create_run_folder
from fp8launch.runs.store import all_runs
from fp8launch.train import saved

WORDS = ("²", "9" * 5000, "-1", "1_0", "0x1", "1\n2")


@pytest.mark.parametrize("word", WORDS)
def test_in_the_tracker_of_a_checkpoint(tmp_path: Path, word: str) -> None:
    (tmp_path / saved.TRACKER).write_text(word)
    assert saved.latest(tmp_path) == 0
    assert saved.repair(tmp_path)
    assert not (tmp_path / saved.TRACKER).exists()


@pytest.mark.parametrize("word", WORDS)
def test_in_what_sinfo_and_scontrol_say(word: str) -> None:
    word = word.replace("\n", "")
    assert parse_nodes(f"main|n1|idle|gpu:{word}|{word}|x")["main"][0].cpus in (0, 12)
    assert parse_partitions(f"PartitionName=p MaxNodes={word} MaxTime={word}", {})[0].max_nodes in (None, 12)
    assert minutes(word) in (None, 12)
    assert parse_gpus(f"gpu:{word}") is not None


@pytest.mark.parametrize("code", ["²:0", "0:²", f"{'9' * 5000}:0", "x", "", ":", "1"])
def test_in_what_sacct_says(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    for name, line in (("squeue", ""), ("sacct", f"12|FAILED|{code}|None")):
        (bin_ / name).write_text(f"#!/bin/sh\ncat <<'END'\n{line}\nEND\n")
        (bin_ / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{bin_}:/usr/bin:/bin")
    from fp8launch.backends import slurm

    run = create_run_folder(tmp_path / "runs", "r-1", {}, {"jobs": [{"id": "12"}]})
    assert slurm.states([run])[0].status == "failed"


@pytest.mark.parametrize("created", ["0001-01-01T00:00:00+00:00", "9999-12-31T23:59:59-23:59", "x", None, 7, "²"])
def test_in_the_time_of_a_manifest(home: Path, created: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP8LAUNCH_RUNS", str(home / "runs"))
    make: Callable[..., RunFolder] = create_run_folder
    make(home / "runs", "r-1", {}, {"created": created, "jobs": []})
    assert [run.run_id for run in all_runs()] == ["r-1"]

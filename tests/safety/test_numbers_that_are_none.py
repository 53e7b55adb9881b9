"""What fuzzing found: texts that Python calls digits and that are no numbers, or have too many of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fp8launch.cli import run
from fp8launch.injob.supervisor import checkpoints
from fp8launch.logs.evidence import parse_evidence
from fp8launch.rundir.registry import all_runs
from fp8launch.rundir.run_dir import RunFolder, create_run_folder
from fp8launch.schedulers.slurm.inventory import minutes, parse_gpus, parse_nodes, parse_partitions


@pytest.fixture(autouse=True)
def bugs_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP8LAUNCH_TRACEBACK", "1")


WORDS = ("²", "9" * 5000, "-1", "1_0", "0x1", "1\n2")


@pytest.mark.parametrize("word", WORDS)
def test_in_the_tracker_of_a_checkpoint(tmp_path: Path, word: str) -> None:
    (tmp_path / checkpoints.TRACKER).write_text(word)
    assert checkpoints.latest(tmp_path) == 0
    assert checkpoints.repair(tmp_path)
    assert not (tmp_path / checkpoints.TRACKER).exists()


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
    from fp8launch.schedulers.slurm import slurm_jobs

    run = create_run_folder(tmp_path / "runs", "r-1", {}, {"jobs": [{"id": "12"}]})
    assert slurm_jobs.states([run])[0].status == "failed"


DUMP = "------------------------ arguments ------------------------"
DUMP_END = "-------------------- end of arguments ---------------------"
ITERATIONS = "".join(
    f" iteration {i}/ 20 | elapsed time per iteration (ms): 100.0 | global batch size: 8 | lm loss: 1.0 |\n"
    for i in range(1, 13)
)


@pytest.mark.parametrize("name", ["world_size", "seq_length", "num_layers", "micro_batch_size"])
@pytest.mark.parametrize("value", ["9" * 400, "9" * 19, "-" + "9" * 400, "1e400"])
def test_in_the_arguments_that_a_log_prints(home: Path, name: str, value: str) -> None:
    lines = [f"  {key} {'.' * 40} {value if key == name else 4}\n" for key in ("seq_length", "world_size", name)]
    log = home / "a.log"
    log.write_text(f"{DUMP}\n{''.join(lines)}{DUMP_END}\n{ITERATIONS}")
    for words in (["parse", str(log), "--json", "--gpu", "h100"], ["compare", str(log), str(log), "--force"]):
        assert run(words) in (0, 1)


@pytest.mark.parametrize("number", ["9" * 400, "9" * 19, "-" + "9" * 400])
def test_in_a_manifest(home: Path, monkeypatch: pytest.MonkeyPatch, number: str) -> None:
    monkeypatch.setenv("FP8LAUNCH_RUNS", str(home / "runs"))
    for name in ("r-1", "r-2"):
        folder = create_run_folder(home / "runs", name, {}, {"jobs": [], "layout": {"world": 1}}).path
        text = (folder / "manifest.json").read_text()
        (folder / "manifest.json").write_text(text.replace('"world": 1', f'"world": {number}'))
        (folder / "logs" / "1-0.log").write_text(ITERATIONS)
    for words in (["runs"], ["compare", "r-1", "r-2", "--force"], ["parse", "r-1"], ["cancel", "r-1"]):
        assert run(words) in (0, 1, 2)


def test_the_largest_numbers_of_a_recipe_come_back_from_its_manifest(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FP8LAUNCH_RUNS", str(home / "runs"))
    largest = "9" * 39
    recipe = home / "r.yaml"
    recipe.write_text(f"extends: tiny_cpu\nname: r\nmegatron: {{seed: {largest}}}\n")
    words = ["submit", str(recipe), "--backend", "local", "--wait", "--yes", "--set", "launch.python=/bin/true"]
    assert run(words) == 0
    assert run(["cancel", "latest"]) == 0


@pytest.mark.parametrize("kind", ["node", "probe", "tensors", "kernels"])
def test_in_what_the_job_reports(kind: str) -> None:
    assert parse_evidence(f'fp8launch-{kind}: {{"gpus": {{"H200": {"9" * 400}}}}}') is None
    assert parse_evidence(f'fp8launch-{kind}: {{"gpus": {{"H200": 8}}}}') is not None


@pytest.mark.parametrize("created", ["0001-01-01T00:00:00+00:00", "9999-12-31T23:59:59-23:59", "x", None, 7, "²"])
def test_in_the_time_of_a_manifest(home: Path, created: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP8LAUNCH_RUNS", str(home / "runs"))
    make: Callable[..., RunFolder] = create_run_folder
    make(home / "runs", "r-1", {}, {"created": created, "jobs": []})
    assert [run.run_id for run in all_runs()] == ["r-1"]


@pytest.mark.parametrize(
    ("text", "most"),
    [
        ("megatron: {" + ", ".join(f"zz{i}: 1" for i in range(9_000)) + "}", 51),
        ("".join(f"s{i}: 1\n" for i in range(9_000)), 101),
        ("env: {" + ", ".join(f"A{i}: [1]" for i in range(9_000)) + "}", 101),
    ],
    ids=["flags", "sections", "values"],
)
def test_thousands_of_wrong_names_take_seconds(tmp_path: Path, text: str, most: int) -> None:
    """The nearest name was looked for once for each: 9 000 unknown flags took 37 s."""
    from fp8launch.diagnostics import UserError
    from fp8launch.job.prepared import prepare

    recipe = tmp_path / "r.yaml"
    recipe.write_text(f"extends: tiny_cpu\nname: r\n{text}\n")
    begun = time.process_time()
    with pytest.raises(UserError) as refused:
        prepare(str(recipe))
    assert time.process_time() - begun < 10
    assert len(refused.value.problems) == most
    assert "more" in refused.value.problems[-1].message

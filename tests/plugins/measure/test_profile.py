"""Profiles of a range of iterations: real trainings on the CPU, and what reports show of them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from train_jobs import MOCK, forked

from fp8launch.report.throughput import parse_paths


def request(tool: str, ranks: list[int], start: int = 3, end: int = 4) -> str:
    return json.dumps({"tool": tool, "start": start, "end": end, "ranks": ranks})


@pytest.mark.train
def test_ranks_of_a_cpu_are_profiled_by_operator_and_train_the_same(megatron: None, tmp_path: Path) -> None:
    argv = [*MOCK, "--train-iters", "10"]
    plain = forked(2, argv).succeeded()
    run = forked(2, argv, folder=tmp_path, FP8LAUNCH_PROFILE=request("torch", [1], 6, 7)).succeeded()
    assert run.losses == plain.losses

    trace = json.loads(gzip.decompress((tmp_path / "profile/rank1_6-7.trace.json.gz").read_bytes()))
    assert any(event.get("name") == "aten::mm" for event in trace["traceEvents"])
    assert [file.name for file in (tmp_path / "profile").iterdir()] == ["rank1_6-7.trace.json.gz"]

    log = tmp_path / "log"
    log.write_text(run.output)
    report = parse_paths([log])
    (profile,) = report.as_json()["profile"]["profiles"]  # type: ignore[index]
    assert (profile["tool"], profile["rank"], profile["iterations"]) == ("torch", 1, [6, 7])
    assert {"aten::mm", "aten::add_"} <= {row["name"] for row in profile["top"]}
    assert sum(row["share"] for row in profile["top"]) == pytest.approx(1, abs=0.2)
    assert report.steady_state.dropped["profiled"] == (6, 7, 8)


@pytest.mark.train
def test_a_profile_that_cannot_be_is_one_line_and_training_goes_on(megatron: None, tmp_path: Path) -> None:
    run = forked(
        1, [*MOCK, "--train-iters", "4"], folder=tmp_path, FP8LAUNCH_PROFILE=request("memory", [0])
    ).succeeded()
    assert list(run.losses) == [1, 2, 3, 4]
    assert run.output.count("this run has no GPU") == 1
    assert not (tmp_path / "profile").exists()

"""Profiles of a range of iterations: real trainings on the CPU, and what reports show of them."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support import parse_paths
from train_jobs import MOCK, forked

from fp8launch.plugins.measure.injob import kernel_families, memory_summary, nsight
from fp8launch.plugins.measure.injob.memory_summary import Mark


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
    assert "aten::mm" in {row["name"] for row in profile["top"]}
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


# --- Memory

MAIN = {"name": "<module>", "filename": "/code/worker.py", "line": 1}


def code(*names: str) -> list[dict[str, object]]:
    """Frames with these functions, innermost first, as PyTorch's allocator reports them."""
    return [{"name": name, "filename": f"/site-packages/megatron/core/{name}.py", "line": 7} for name in names]


def event(action: str, address: int, size: int, time: int, frames: object = ()) -> dict[str, object]:
    return {"action": action, "addr": address, "size": size, "time_us": time, "frames": frames, "stream": 0}


def test_the_peak_is_found_with_what_is_allocated_then() -> None:
    """Blocks 1 and 2 are older than the history. At the peak, block 1 and three others are allocated."""
    layer = [*code("mlp", "forward"), MAIN]
    events = [
        event("free_requested", 2, 1000, 10),
        event("segment_alloc", 50, 8192, 19),
        event("alloc", 3, 2048, 20, layer),
        event("alloc", 4, 2000, 30, layer),
        event("alloc", 5, 512, 40, code("backward")),
        event("free_requested", 4, 2000, 50),
        event("free_completed", 4, 2000, 51),
        event("free_requested", 3, 2048, 60),
        event("alloc", 3, 512, 70, [*code("optimizer"), MAIN]),
    ]
    blocks = [
        {"address": address, "size": size, "state": "active_allocated", "frames": frames}
        for address, size, frames in ((1, 1024, code("weight")), (3, 512, ()), (5, 512, ()))
    ]
    segments = [{"device": 1, "total_size": 16384, "blocks": [*blocks, {"size": 4096, "state": "inactive"}]}]
    marks = [Mark(15, 6, None), Mark(25, 6, 2)]
    found = memory_summary.summary({"device_traces": [[], events], "segments": segments}, 1, marks, 100)
    assert (found["peak_allocated"], found["peak_reserved"]) == (1024 + 2048 + 2048 + 512, 16384)
    assert (found["peak_iteration"], found["part"], found["layer"]) == (6, "backward", None)
    assert found["live"] == [
        {"where": "megatron/core/mlp.py:7 mlp", "bytes": 4096, "blocks": 2},
        {"where": "megatron/core/weight.py:7 weight", "bytes": 1024, "blocks": 1},
        {"where": "megatron/core/backward.py:7 backward", "bytes": 512, "blocks": 1},
    ]
    assert found["complete"]


@pytest.mark.parametrize(
    ("frames", "part", "layer"),
    [
        ([*code("mlp", "forward", "forward_step"), MAIN], "forward", 3),
        (code("linear_backward"), "backward", None),
        ([], "backward", None),
        ([*code("distrib_optimizer"), MAIN], "optimizer", None),
        ([*code("finalize_model_grads"), MAIN], "other", None),
    ],
)
def test_the_stack_of_an_allocation_tells_the_part_of_the_iteration(
    frames: list[dict[str, object]], part: str, layer: int | None
) -> None:
    found = memory_summary.moment(event("alloc", 1, 1, 20, frames), [Mark(10, 4, None), Mark(15, 4, 3)])
    assert (found["peak_iteration"], found["part"], found["layer"]) == (4, part, layer)


# --- Nsight Systems


def test_the_command_of_nsys_neither_ends_the_training_nor_records_all_of_it() -> None:
    words = nsight.command(
        "/opt/nsys", Path("/runs/100%/profile/rank0_6-8"), ["python", "worker.py", "--", "--lr", "1"]
    )
    assert words[:2] == ["/opt/nsys", "profile"]
    assert words[-5:] == ["python", "worker.py", "--", "--lr", "1"]
    assert {"--capture-range=cudaProfilerApi", "--capture-range-end=stop"} <= set(words)
    # nsys expands %h, %p and %q.
    assert "--output=/runs/100%%/profile/rank0_6-8" in words


@pytest.mark.train
@pytest.mark.parametrize(
    ("nsys", "reason"),
    [
        (None, "there is no nsys on this machine or in this image"),
        ("#!/bin/sh\necho Illegal instruction >&2\nexit 3\n", "nsys exits with 3 here: Illegal instruction"),
    ],
)
def test_without_a_usable_nsys_the_training_runs_unprofiled(
    megatron: None, tmp_path: Path, nsys: str | None, reason: str
) -> None:
    if nsys is None and nsight.find_nsys():
        pytest.skip("nsys is installed here")
    if nsys is not None:
        (tmp_path / "nsys").write_text(nsys)
        (tmp_path / "nsys").chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    run = forked(1, [*MOCK, "--train-iters", "4"], folder=tmp_path, PATH=path, FP8LAUNCH_PROFILE=request("nsys", [0]))
    assert list(run.succeeded().losses) == [1, 2, 3, 4]
    (line,) = [line for line in run.output.splitlines() if "fp8launch: " in line and "profile" in line]
    assert line.startswith("fp8launch: rank 0 trains without a profile: ")
    assert line.endswith(reason)


def test_signals_that_wait_in_nsys_are_seen() -> None:
    """A process with blocked signals, as nsys is here."""
    program = (
        "import os, signal, sys; signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR1})\n"
        "print(flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert nsight.pending(process.pid) == set()
        process.send_signal(signal.SIGTERM)
        assert nsight.pending(process.pid) == {signal.SIGTERM}
        process.kill()
    assert nsight.pending(process.pid) == set()


def test_the_summary_of_nsys_is_read() -> None:
    row = '{"Time (%)": 60.0, "Total Time (ns)": 3000000, "Instances": 2, "Name": "nvjet_sm90_qqtst"}'
    text = f"Processing 1 report with cuda_gpu_kern_sum.py...\n[{row}]\n"
    assert nsight.kernel_totals(text) == {"nvjet_sm90_qqtst": kernel_families.Total(2, 3_000_000)}

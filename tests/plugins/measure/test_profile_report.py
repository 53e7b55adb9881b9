"""What `parse` shows of profiles."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support import parse_paths
from test_tensor_stats import LINE

GEMM, REDUCE = "nvjet_sm90_qqtst_128x256_128x4_2x1_v_bz_coopA_TNT", "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL"


def kernels(rank: int, gemm_ms: float, reduce_ms: float, busy_ms: float, waiting_ms: float) -> str:
    record = {
        "v": 1, "tool": "torch", "rank": rank, "iteration": 6, "last_iteration": 8, "wall_ms": 300.0,
        "busy_ms": busy_ms, "waiting_ms": waiting_ms,
        "families": {"fp8_gemm": {"count": 9, "ms": gemm_ms}, "communication": {"count": 3, "ms": reduce_ms}},
        "top": [
            {"name": f"void {GEMM}", "family": "fp8_gemm", "count": 9, "ms": gemm_ms},
            {"name": REDUCE, "family": "communication", "count": 3, "ms": reduce_ms},
        ],
        "trace": f"profile/rank{rank}_6-8.trace.json.gz",
    }  # fmt: skip
    return f"fp8launch-kernels: {json.dumps(record)}"


def report_of(folder: Path, *said: str) -> Any:
    lines = []
    for n in range(1, 21):
        if n == 9:
            lines += said
        lines.append(LINE.format(n=n, ms=900.0 if 6 <= n <= 9 else 100.0))
    (folder / "log").write_text("\n".join(lines) + "\n")
    return parse_paths([folder / "log"])


def test_the_slowest_of_several_ranks_is_shown(tmp_path: Path) -> None:
    """Rank 0 spends longer in its kernels because it waits for rank 3."""
    report = report_of(tmp_path, kernels(0, 100.0, 180.0, 280.0, 150.0), kernels(3, 200.0, 20.0, 210.0, 10.0))
    shown = report.more["profile"]
    assert shown.value["slowest_rank"] == 3
    first, second = report.as_json()["profile"]["profiles"]
    assert (first["rank"], first["host_bound"], first["waiting_share"]) == (0, False, 0.5)
    assert (second["idle_share"], second["host_bound"]) == (0.3, True)
    assert second["top"][0] == {
        "name": f"void {GEMM}", "family": "fp8_gemm", "calls": 9, "ms": 200.0, "share": 200 / 220,
    }  # fmt: skip
    assert shown.lines == (
        "profile of rank 0, iterations 6-8, by torch: profile/rank0_6-8.trace.json.gz",
        "  GPU idle 7%, not host-bound; only communicating 50%",
        "profile of rank 3, iterations 6-8, by torch: profile/rank3_6-8.trace.json.gz",
        "  GPU idle 30%, host-bound; only communicating 3%",
        "   share        ms   calls  family         kernel",
        "   90.9%     200.0       9  fp8_gemm       nvjet_sm90_qqtst_128x256…bz_coopA_TNT",
        "    9.1%      20.0       3  communication  ncclDevKernel_ReduceScat…bf16_RING_LL",
        "slowest rank: 3, by the time of its kernels without communication",
    )
    assert max(map(len, shown.lines)) <= 80
    assert report.steady_state.dropped["profiled"] == (6, 7, 8, 9)
    assert report.speed.step_time_ms.max == 100.0


def test_kernels_of_nsys_and_its_file_are_one_profile(tmp_path: Path) -> None:
    said = {"v": 1, "tool": "nsys", "rank": 0, "iteration": 6, "last_iteration": 8, "wall_ms": 300.0}
    top = [{"name": GEMM, "family": "fp8_gemm", "count": 9, "ms": 100.0}]
    of_kernels = {**said, "families": {"fp8_gemm": {"count": 9, "ms": 100.0}}, "top": top}
    file = {**said, "file": "profile/rank0_6-8.nsys-rep"}
    lines = (f"fp8launch-kernels: {json.dumps(of_kernels)}", f"fp8launch-profile: {json.dumps(file)}")
    (profile,) = report_of(tmp_path, *lines).as_json()["profile"]["profiles"]
    assert (profile["tool"], profile["file"], profile["gpu_ms"]) == ("nsys", "profile/rank0_6-8.nsys-rep", 100.0)


def test_a_memory_profile_excludes_all_iterations_up_to_its_end(tmp_path: Path) -> None:
    said = {"v": 1, "tool": "memory", "rank": 0, "iteration": 6, "last_iteration": 8, "peak_allocated": 2**30}
    report = report_of(tmp_path, f"fp8launch-profile: {json.dumps(said)}")
    assert report.steady_state.dropped["profiled"] == (3, 4, 5, 6, 7, 8, 9)


def test_the_time_that_a_profiler_adds_does_not_make_a_run_host_bound(tmp_path: Path) -> None:
    """A profiled step took 130 ms, a usual one 100 ms: a GPU that was busy for 95 ms was called host-bound."""
    record = {"v": 1, "rank": 0, "iteration": 6, "last_iteration": 8, "wall_ms": 390.0, "busy_ms": 285.0, "top": []}
    report = report_of(tmp_path, f"fp8launch-kernels: {json.dumps(record)}")
    (found,) = report.as_json()["profile"]["profiles"]
    assert found["idle_share"] == pytest.approx(105 / 390)
    assert found["idle_share_of_usual_step"] == pytest.approx(0.05)
    assert not found["host_bound"]
    assert report.more["profile"].lines[1] == "  GPU idle 27% (5% of a usual step), not host-bound"


def test_malformed_and_hostile_records_are_left_out(tmp_path: Path) -> None:
    hostile = {"rank": 0, "iteration": 6, "top": [7, {"name": "\x1b[31mred\n", "ms": 1.0}], "wall_ms": "x", "trace": []}
    torn = 'fp8launch-profile: {"rank": 0, "itera'
    report = report_of(tmp_path, torn, "fp8launch-profile: {}", f"fp8launch-kernels: {json.dumps(hostile)}")
    (profile,) = report.as_json()["profile"]["profiles"]
    assert [row["name"] for row in profile["top"]] == ["\\x1b[31mred"]
    assert all(line.isprintable() for line in report.more["profile"].lines)


@pytest.mark.parametrize("said", [{"tool": "memory"}, {"tool": "\x1b[31m"}, {"peak_allocated": "all", "live": {}}])
@pytest.mark.parametrize("kind", ["kernels", "profile"])
def test_a_record_without_what_its_tool_reports_is_shown_as_far_as_it_goes(
    kind: str, said: dict[str, Any], tmp_path: Path
) -> None:
    report = report_of(tmp_path, f"fp8launch-{kind}: {json.dumps({'rank': 0, 'iteration': 6, **said})}")
    lines = report.more["profile"].lines
    assert lines[0].startswith("profile of rank 0, iteration 6, by ")
    assert all(line.isprintable() for line in lines)

"""Are states divided as asked? From logs of real runs on two CPU processes (tests/data/peers), and every other case."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support import parse_paths

from fp8launch import cli
from fp8launch.report.verify import judge_sharding

LOGS = Path(__file__).parents[1] / "data" / "peers"
WHOLE, HALF = [1000, 1000], [512, 512]


def evidence(asked: str, in_effect: str, optimizer: Any, weights: Any = WHOLE, **more: Any) -> dict[str, Any]:
    counts = {"parameters": 1000, "optimizer_elements": optimizer, "weight_elements": weights}
    return {"v": 1, "asked": asked, "in_effect": in_effect, **counts, **more}


@pytest.mark.parametrize(
    ("data", "refuted", "text"),
    [
        (evidence("zero1", "zero1", HALF), False, "ZeRO 1 is in effect: each rank holds 512 of 1000"),
        (evidence("zero2", "zero2", HALF), False, "ZeRO 2 is in effect"),
        (evidence("zero3", "zero3", HALF, HALF), False, "ZeRO 3 is in effect"),
        (evidence("fsdp2", "fsdp2", HALF, HALF), False, "FSDP2 is in effect"),
        (evidence("ddp", "ddp", WHOLE), False, "DDP is in effect: each rank holds 1000 of 1000"),
        (
            evidence("zero2", "ddp", WHOLE),
            True,
            "ZeRO 2 was requested, but optimizer states are not partitioned: each rank holds",
        ),
        (evidence("zero2", "zero2", WHOLE), True, "optimizer states are not partitioned"),
        (evidence("zero2", "none", WHOLE), True, "no sharding is in effect"),
        (evidence("zero3", "zero3", HALF, WHOLE), True, "ZeRO 3 was requested, but weights are not partitioned"),
        (evidence("fsdp2", "fsdp2", [1000, 0], HALF), True, "optimizer states are not partitioned"),
        (evidence("zero2", "zero1", HALF), True, "ZeRO 2 was requested, but ZeRO 1 is in effect"),
        (evidence("ddp", "zero1", HALF), True, "DDP was requested, but ZeRO 1 is in effect"),
        (evidence("zero1", "zero1", [126] * 8), False, "ZeRO 1 is in effect"),
        (evidence("zero1", "zero1", [600] * 8), True, "not partitioned"),
        (evidence("zero2", "zero2", [1000], [1000]), False, "one rank: nothing to shard"),
    ],
)
def test_the_elements_of_each_rank_decide(data: dict[str, Any], refuted: bool, text: str) -> None:
    found = judge_sharding(data)
    assert found is not None
    assert (found.refuted, text in found.text) == (refuted, True), found.text


@pytest.mark.parametrize(
    "data",
    [
        {},
        evidence("zero9", "zero9", HALF),
        evidence("zero2", "zero2", [0, 0]),
        evidence("zero2", "zero2", "many"),
        evidence("zero2", "zero2", [1, "2"]),
        evidence("zero2", "zero2", HALF, parameters=0),
        evidence("zero2", "zero2", HALF, parameters="all"),
    ],
)
def test_evidence_that_says_nothing_judges_nothing(data: dict[str, Any]) -> None:
    assert judge_sharding(data) is None


def verify(log: str, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    status = cli.run(["verify", str(LOGS / f"{log}.log.xz"), *words])
    out = capsys.readouterr().out
    assert all(len(line) <= 80 for line in out.splitlines()) or "--json" in words
    return status, out if "--json" in words else " ".join(out.split())


@pytest.mark.parametrize(
    ("log", "status", "verdict", "text"),
    [
        ("zero2_fp8", 0, "verified", "ZeRO 2 is in effect: each rank holds 53408 of 106816 elements"),
        ("zero3_rowwise", 0, "verified", "ZeRO 3 is in effect: each rank holds 53408 of 106816 elements"),
        ("fsdp2_fp8_gather", 0, "verified", "FSDP2 is in effect: each rank holds 53408 of 106816 elements"),
        (
            "zero2_dropped",
            1,
            "verified",
            "ZeRO 2 was requested, but optimizer states are not partitioned: each rank holds 106816 of",
        ),
        (
            "fsdp2_dropped",
            1,
            "not FP8",
            "FSDP2 was requested, but optimizer states are not partitioned: each rank holds 106816 of",
        ),
    ],
)
def test_verify_reads_real_runs(
    log: str, status: int, verdict: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, shown = verify(log, capsys)
    assert code == status
    assert shown.startswith(verdict) and text in shown
    code, shown = verify(log, capsys, "--json")
    found = json.loads(shown)
    assert (code, found["ok"], found["verdict"]) == (status, status == 0, verdict)
    assert (found["not_partitioned"] or "").startswith(text if status else "")
    assert [one["kind"] for one in found["evidence"]] == ["modules", "arguments", "sharding"]


def test_modules_name_the_recipe_of_the_library(capsys: pytest.CaptureFixture[str]) -> None:
    assert "13 of 14 linears ran in FP8 with torchao.rowwise" in verify("zero3_rowwise", capsys)[1]
    assert "13 of 15 weights are FP8 tensors" in verify("fsdp2_fp8_gather", capsys)[1]


def test_a_run_that_was_not_divided_has_failed() -> None:
    report = parse_paths([LOGS / "zero2_dropped.log.xz"], gpu="h200", world_size=2)
    assert report.status == "failed" and report.failure is not None
    assert (report.failure.code, report.failure.line) == ("not-partitioned", 4)
    divided = parse_paths([LOGS / "zero2_fp8.log.xz"], gpu="h200", world_size=2)
    assert (divided.status, divided.training.iteration_last) == ("ok", 3)


def test_the_precision_that_the_probe_saw_asked_for_is_reported() -> None:
    """A log of Accelerate has no arguments of Megatron; `parse` said `FP8: None, None`."""
    found = parse_paths([LOGS / "zero3_rowwise.log.xz"]).fp8
    assert found is not None
    assert (found["recipe"], found["format"]) == ("rowwise", "e4m3")

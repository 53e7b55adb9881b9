"""Where a step's time goes: Megatron's timers, read from runs on H200."""

from pathlib import Path

import pytest
from support import parse_paths
from tests.support import sitting

from fp8launch.logs import read_log
from fp8launch.logs.lines import Timer, parse_timer
from fp8launch.logs.reader import Scanner
from fp8launch.report.text import step_parts


@pytest.fixture(scope="module")
def logs() -> Path:
    return sitting("2026-11-22-best-x2-more")


@pytest.mark.parametrize(
    ("name", "forward", "backward"), [("phases_fp8", 1261.9, 2683.0), ("phases_bf16", 1784.0, 3803.2)]
)
def test_the_parts_add_up_to_the_step(logs: Path, name: str, forward: float, backward: float) -> None:
    report = parse_paths([logs / f"{name}.log"])
    parts = {part.name: part for part in step_parts(report)}
    assert report.speed.step_time_ms is not None
    assert sum(part.ms for part in parts.values()) == pytest.approx(report.speed.step_time_ms.median)
    assert sum(part.share for part in parts.values()) == pytest.approx(1)
    assert parts["forward"].ms == pytest.approx(forward, abs=0.1)
    assert parts["backward"].ms == pytest.approx(backward, abs=0.1)
    assert parts["rest"].share < 0.01
    assert "pipeline communication" not in parts


def test_json_has_every_timer_by_megatrons_name(logs: Path) -> None:
    timers = parse_paths([logs / "phases_fp8.log"]).as_json()["timers_ms"]
    assert isinstance(timers, dict)
    assert timers["optimizer-inner-step"]["n"] == 4
    assert set(timers) >= {"forward-compute", "backward-compute", "batch-generator", "all-grads-sync", "optimizer"}


def test_a_run_without_timers_has_no_parts(logs: Path) -> None:
    report = parse_paths([logs / "ours_again.log"])
    assert report.speed.timers_ms == {}
    assert not list(step_parts(report))


def test_warm_up_does_not_count(logs: Path) -> None:
    log = read_log(logs / "phases_fp8.log")
    first = log.iterations.value("timer:optimizer", 0)
    timers = parse_paths([logs / "phases_fp8.log"]).speed.timers_ms
    assert first > timers["optimizer"].max


@pytest.mark.parametrize("size", [97, 4096, 1 << 20])
def test_pieces_of_a_log_give_the_same_timers(logs: Path, size: int) -> None:
    data = (logs / "phases_fp8.log").read_bytes()
    scanner = Scanner()
    for start in range(0, len(data), size):
        scanner.feed(data[start : start + size])
    # Ten of each of six iterations, below those of the start.
    names = [timer.name for _, timer in scanner.finish().timers]
    assert len(names) == 71
    assert len(set(names[:11])) == 11
    assert names[-60:] == 6 * names[-10:]


@pytest.mark.parametrize("prefix", ["", "3: ", "[default3]:"])
def test_a_timer_behind_what_launchers_put_in_front(prefix: str) -> None:
    line = f"{prefix}    optimizer ......................................: (71.93, 72.36)"
    assert parse_timer(line) == Timer("optimizer", 72.36)


@pytest.mark.parametrize(
    "text",
    [
        "    optimizer ...: (71.93)",
        "    optimizer ...: (71.93, many)",
        "    adam_beta1 ...................................... 0.9",
        "optimizer ...: (1, 2) and more",
    ],
)
def test_other_lines_are_no_timers(text: str) -> None:
    assert parse_timer(text) is None


def test_a_timer_above_every_iteration_belongs_to_none(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text("    optimizer .....: (71.93, 72.36)\n", encoding="utf-8")
    assert parse_paths([log]).speed.timers_ms == {}

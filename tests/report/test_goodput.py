"""Goodput: where the allocated time of a run with several attempts went."""

from __future__ import annotations

import json
import re
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from made_runs import Made, of, write_run

from fp8launch import cli

NOON = datetime(2026, 11, 20, 12, tzinfo=timezone.utc).timestamp()
NODE = 'fp8launch-node: {"node": "n1", "rank": 0, "gpus": {}, "driver": null, "utc_offset": -18000}'
SAVE = "    save-checkpoint ................................: (1900.00, 2000.00)"
EVALUATION = "    evaluate .......................................: (900.00, 1000.00)"


def iteration(number: int, at: float, ms: float = 1000.0) -> str:
    """An iteration line of a node five hours west of Greenwich; `at` counts seconds from noon in Greenwich."""
    stamp = datetime.fromtimestamp(NOON + at - 5 * 3600, timezone.utc).strftime("%Y-%m-%d %H:%M:%S.%f")
    return (
        f" [{stamp}] iteration {number:8d}/      40 | consumed samples: {8 * number:12d} |"
        f" elapsed time per iteration (ms): {ms:.1f} | global batch size:     8 | lm loss: 2.000000E+00 |"
    )


def attempt(name: str, began: float, ended: float | None, before: int) -> dict[str, Any]:
    found = {"name": name, "job": name.partition("-")[0], "began": NOON + began, "before": before}
    return found if ended is None else {**found, "ended": NOON + ended}


def interrupted(tmp_path: Path, *attempts: dict[str, Any], **logs: list[str]) -> Path:
    jobs = [{"id": "1", "submitted": "2026-11-20T13:00:00+01:00"}]
    folder = write_run(tmp_path / "made-1", None, jobs=jobs)
    (folder / "attempts.json").write_text(json.dumps({"attempts": list(attempts)}))
    (folder / "logs").mkdir()
    for name, lines in logs.items():
        (folder / "logs" / f"{name[1:].replace('_', '-')}.log").write_text("\n".join([NODE, *lines, ""]))
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Submitted at noon, 30 s in the queue, killed at iteration 39 and continued from 15 after another 100 s."""
    return interrupted(
        tmp_path,
        attempt("1-0", 30, 100, 0),
        attempt("1-1", 200, 251, 15),
        # The checkpoint of iteration 15 lies between two lines.
        l1_0=[iteration(10, 60), SAVE, iteration(20, 72), iteration(30, 82), iteration(39, 91)],
        l1_1=[iteration(20, 225), iteration(30, 235), EVALUATION, iteration(40, 246), SAVE],
    )


def parsed(run: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    assert cli.run(["parse", str(run), "--json"]) == 0
    return json.loads(capsys.readouterr().out)["goodput"]


def test_the_parts_add_up_to_the_allocated_time(run: Path, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    goodput = parsed(run, capsys)
    assert goodput["seconds"] == pytest.approx(
        {"iterations": 40, "lost": 24, "start_up": 40, "checkpoints": 4, "evaluation": 1, "after_iterations": 12}
    )
    assert goodput["allocated_s"] == pytest.approx(121)
    assert goodput["share"] == pytest.approx(40 / 121, abs=1e-4)
    assert (goodput["attempts"], goodput["gpus"], goodput["lost_iterations"]) == (2, 8, 24)
    assert goodput["gpu_hours"] == pytest.approx(121 * 8 / 3600)
    assert goodput["queue_s"] == pytest.approx(130)


def test_people_read_it_as_a_table(run: Path, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cli.run(["parse", str(run)])
    out = capsys.readouterr().out
    assert "goodput 33.1% of 0.27 GPU-hours in 2 attempts; in the queue for 130 s" in out
    rows = [" ".join(line.split()) for line in out.splitlines()]
    assert "lost: 24 iterations 24.0 19.8%" in rows and "start-up 40.0 33.1%" in rows


def test_a_comparison_has_it_as_a_column(run: Path) -> None:
    [row] = of(run).as_json()["rows"]  # type: ignore[misc]
    assert row["goodput"] == pytest.approx(40 / 121)
    assert row["runs"][0]["goodput"]["lost_iterations"] == 24


def test_the_time_until_a_user_resumes_is_no_queue(run: Path, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = json.loads((run / "manifest.json").read_text())
    manifest["jobs"].append({"id": "1", "submitted": "2026-11-20T12:03:10+00:00"})
    (run / "manifest.json").write_text(json.dumps(manifest))
    assert parsed(run, capsys)["queue_s"] == pytest.approx(30 + 10)


def test_an_attempt_without_iterations_is_start_up(
    tmp_path: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = interrupted(
        tmp_path,
        attempt("1-0", 0, 60, 0),
        attempt("1-1", 60, None, 0),
        l1_0=["Segmentation fault"],
        l1_1=[iteration(1, 100), iteration(40, 139)],
    )
    seconds = parsed(run, capsys)["seconds"]
    assert seconds["start_up"] == pytest.approx(60 + 39)
    assert (seconds["iterations"], seconds["lost"]) == (pytest.approx(40), 0)


@pytest.mark.parametrize("record", ["", "{}", '{"attempts": [{"job": "1", "name": 3}]}'])
def test_without_a_record_of_attempts_there_is_none(
    run: Path, home: Path, capsys: pytest.CaptureFixture[str], record: str
) -> None:
    (run / "attempts.json").write_text(record)
    assert parsed(run, capsys) is None


def test_logs_without_the_offset_of_their_clock_have_none(
    run: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Logs of earlier versions: their time stamps cannot be compared with the supervisor's."""
    for log in (run / "logs").iterdir():
        log.write_text(log.read_text().replace(', "utc_offset": -18000', ""))
    assert parsed(run, capsys) is None


def test_the_clock_is_known_if_another_rank_prints_into_its_line(
    run: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = parsed(run, capsys)
    for log in (run / "logs").iterdir():
        log.write_text(log.read_text().replace(NODE, f"> building the model{NODE}> building the data\n"))
    assert parsed(run, capsys) == expected


def test_the_time_of_an_iteration_is_known_if_another_rank_prints_into_its_line(
    run: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = parsed(run, capsys)
    saving = "saving checkpoint at iteration      15 to /scratch/project/user/made/checkpoints in torch_dist"
    for log in (run / "logs").iterdir():
        log.write_text(re.sub(r"^ \[", f"{saving} [", log.read_text(), flags=re.MULTILINE))
    assert parsed(run, capsys) == expected


def test_one_attempt_is_not_worth_a_column(tmp_path: Path, home: Path) -> None:
    run = write_run(tmp_path / "one", Made())
    [row] = of(run).as_json()["rows"]  # type: ignore[misc]
    assert row["goodput"] is None

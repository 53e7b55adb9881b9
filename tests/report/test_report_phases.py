"""Runs in phases in reports: numbers of each, never mixed, with the status and the proof of FP8 of each."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from made_runs import OUT_OF_MEMORY, WHOLE, Made, of, phase_log, shifted, write_phases, write_run
from rich.console import Console
from support import log_text, sitting

from fp8launch.cli import run as command
from fp8launch.report.comparison import compare
from fp8launch.report.export import to_markdown, to_terminal
from fp8launch.report.phases import PhaseSpan
from fp8launch.report.read_run import run_from_folder, spans_of
from fp8launch.report.text import render_text
from fp8launch.report.throughput import read_logs, summarise_run
from fp8launch.rundir.run_dir import RunFolder


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., RunFolder]:
    """A run folder in three phases with these logs, one for each attempt."""
    return lambda *logs, name="phased": RunFolder(write_phases(tmp_path / name, *logs))


def report_of(run: RunFolder) -> Any:
    logs = read_logs([attempt.log for attempt in run.attempts()])
    return summarise_run(logs, spans_of(run.manifest()))


def test_each_phase_has_its_own_median(run: Callable[..., RunFolder]) -> None:
    report = report_of(run(*WHOLE))
    assert [(p.name, p.span, p.report.speed.step_time_ms.median) for p in report.phases] == [
        ("warmup", "1-10", 1000.0), ("body", "11-40", 500.0), ("cooldown", "41-50", 1000.0),
    ]  # fmt: skip
    assert [p.report.status for p in report.phases] == ["ok", "ok", "ok"]


def test_the_run_s_numbers_are_those_of_its_longest_phase(run: Callable[..., RunFolder]) -> None:
    report = report_of(run(*WHOLE))
    body = report.phases[1].report
    assert report.speed.step_time_ms == body.speed.step_time_ms
    assert (report.speed.step_time_ms.min, report.speed.step_time_ms.max) == (500.0, 500.0)
    assert report.fp8["recipe"] == "tensorwise"
    assert (report.training.iterations, report.training.iteration_last, report.status) == (50, 50, "ok")
    assert report.training.loss_first == pytest.approx(10.0 / 1.01, rel=1e-5)
    assert len(report.attempts) == 3
    assert "the speed is from phase body, iterations 11-40" in report.notes[0]


def test_a_phase_cut_in_two_is_one_phase(run: Callable[..., RunFolder]) -> None:
    late = "[exiting program after 9.0 minutes] datetime: 2026-11-20 10:00:00 "
    cut = phase_log(10, 25, 500.0, "tensorwise", told=40, ending=late)
    rest = phase_log(25, 40, 600.0, "tensorwise")
    report = report_of(run(WHOLE[0], cut, rest, WHOLE[2]))
    assert [p.name for p in report.phases] == ["warmup", "body", "cooldown"]
    assert report.phases[1].report.training.iterations == 30
    assert {report.phases[1].report.speed.step_time_ms.min, report.phases[1].report.speed.step_time_ms.max} == {
        500.0,
        600.0,
    }


def test_a_run_that_stopped_between_phases_is_not_done(run: Callable[..., RunFolder]) -> None:
    report = report_of(run(*WHOLE[:2]))
    assert report.status == "incomplete"
    assert [p.report.status for p in report.phases] == ["ok", "ok"]


def test_a_start_that_died_at_once_belongs_to_the_phase_that_it_was_told(run: Callable[..., RunFolder]) -> None:
    died = phase_log(10, 10, 500.0, "tensorwise", told=40, ending=OUT_OF_MEMORY)
    report = report_of(run(WHOLE[0], died))
    assert [(p.name, p.report.status) for p in report.phases] == [("warmup", "ok"), ("body", "failed")]
    assert report.status == "failed"


def test_logs_alone_are_told_apart_by_precision(tmp_path: Path) -> None:
    files = []
    for i, text in enumerate(WHOLE):
        files.append(tmp_path / f"{i}.log")
        files[-1].write_text(text)
    report = summarise_run(read_logs(files))
    assert [(p.name, p.span) for p in report.phases] == [
        ("bf16 1", "1-10"),
        ("tensorwise", "11-40"),
        ("bf16 2", "41-50"),
    ]
    assert report.speed.step_time_ms.median == 500.0
    assert {line.number for line in report.steady_state.kept} <= set(range(11, 41))
    one = summarise_run(read_logs(files[:1]))
    assert one.phases == ()


def real(name: str, begin: int) -> str:
    """A real log of an H200; `asked_but_bf16` lost its FP8 without a word."""
    return shifted(log_text(sitting("2026-11-20-verify") / f"{name}.log"), begin, 1000)


def test_memory_is_that_of_the_phase_also_in_one_file() -> None:
    (log,) = read_logs([sitting("2026-11-21-numerics2") / "phases.log"])
    phases = summarise_run([log]).phases
    assert {phase.name: phase.report.peak_memory_mib for phase in phases} == {
        "bf16 1": 16941.26, "tensorwise": 15701.34, "bf16 2": 16941.26,
    }  # fmt: skip


def test_a_narrow_terminal_breaks_no_word_of_the_table() -> None:
    logs = [sitting("2026-11-21-numerics2") / f"{name}.log" for name in ("phases", "phases_param_gather")]
    found = of(*logs)
    for shown in (render_text(found.runs()[0], 80), to_terminal(found, 80)):
        console = Console(width=80, record=True, file=io.StringIO())
        console.print(shown)
        table = console.export_text()
        assert re.search(r"^[a-z]* *tensorwise  70-120 .* 63,262\.1 +2\.2563", table, re.MULTILINE), table


@pytest.fixture
def proven(tmp_path: Path) -> Callable[..., RunFolder]:
    """Real logs of an H200, the second as if it had gone on from the first."""

    def write(second: str) -> RunFolder:
        phases = [{"name": "warmup", "begin": 0, "end": 100}, {"name": "body", "begin": 100, "end": 1000}]
        folder = write_run(tmp_path / "proven", None, phases=phases)
        (folder / "logs").mkdir()
        (folder / "logs" / "1-0.log").write_text(real("bf16", 0))
        (folder / "logs" / "1-1.log").write_text(second)
        return RunFolder(folder)

    return write


def test_fp8_is_proven_where_it_was_asked_for(
    proven: Callable[..., RunFolder], capsys: pytest.CaptureFixture[str]
) -> None:
    run = proven(real("tensorwise", 100))
    assert command(["verify", str(run.path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {name: one["verdict"] for name, one in found["phases"].items()} == {"warmup": "not FP8", "body": "verified"}
    assert (found["verdict"], found["asked"]) == ("verified", True)
    assert command(["verify", str(run.path)]) == 0
    assert re.search(r"phase body: verified", capsys.readouterr().out)


def test_fp8_that_did_not_run_in_its_phase_fails_the_run(
    proven: Callable[..., RunFolder], capsys: pytest.CaptureFixture[str]
) -> None:
    run = proven(real("asked_but_bf16", 100))
    assert command(["verify", str(run.path)]) == 1
    assert "phase warmup: not FP8" in capsys.readouterr().out
    assert command(["parse", str(run.path), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["status"], found["failure"]["code"]) == ("failed", "fp8-not-running")
    assert [(p["name"], p["status"]) for p in found["phases"]] == [("warmup", "ok"), ("body", "failed")]


def test_parse_shows_them(run: Callable[..., RunFolder], capsys: pytest.CaptureFixture[str]) -> None:
    folder = run(*WHOLE)
    assert command(["parse", str(folder.path)]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"body +11-40 +ok +tensorwise, requested only +500.0", shown)
    assert command(["parse", str(folder.path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(p["name"], p["begin"], p["end"], p["step_time_ms"]["median"]) for p in found["phases"]] == [
        ("warmup", 0, 10, 1000.0), ("body", 10, 40, 500.0), ("cooldown", 40, 50, 1000.0),
    ]  # fmt: skip


class TestCompared:
    def test_speed_is_of_the_longest_phase_and_losses_are_all(self, run: Callable[..., RunFolder]) -> None:
        measured = run_from_folder(run(*WHOLE))
        assert {line.number for line in measured.steady_state.kept} <= set(range(11, 41))
        assert [line.number for line in measured.steady_state.lines] == list(range(1, 51))
        assert measured.facts["precision"] == "bf16 then tensorwise then bf16"

    def test_every_format_has_the_phases(self, run: Callable[..., RunFolder], tmp_path: Path) -> None:
        plain = write_run(tmp_path / "plain", Made(lambda i: 1000.0, 50))
        comparison = compare([run_from_folder(run(*WHOLE)), run_from_folder(RunFolder(plain))])
        assert list(comparison.as_json()["phases"]) == ["phased"]  # type: ignore[call-overload]
        assert "| phased | body | 11-40 | ok | tensorwise, requested only | 500.0 |" in to_markdown(comparison)
        speedup = next(e.speedup for e in comparison.rows if e.runs[0].name == "phased")
        assert speedup is not None and speedup.value == pytest.approx(2.0)

    def test_runs_without_phases_have_none(self, tmp_path: Path) -> None:
        plain = write_run(tmp_path / "plain", Made(lambda i: 1000.0, 50))
        comparison = compare([run_from_folder(RunFolder(plain))])
        assert comparison.as_json()["phases"] == {}
        assert "Phases" not in to_markdown(comparison)


def test_spans_come_from_the_manifest() -> None:
    assert spans_of({}) == spans_of({"phases": []}) == ()
    assert spans_of({"phases": [{"name": "a", "begin": 0, "end": 5, "argv": []}]}) == (PhaseSpan("a", 0, 5),)

"""TensorBoard event files: the same numbers as in the text log, from files that its own library wrote."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support import parse_paths
from tests.support import only, refused

from fp8launch.cli import run
from fp8launch.logs.event_files import event_files, read_events
from fp8launch.report.named_runs import read_runs
from fp8launch.report.throughput import summarise

ROOT = Path(__file__).parents[3]


def test_without_the_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    problem = only(refused(read_events, [tmp_path / "events.out.tfevents.1.x"], exit_code=3))
    assert "fp8launch[tensorboard]" in problem.fix


def test_what_is_an_event_file(tmp_path: Path) -> None:
    for name in ("events.out.tfevents.2.x", "events.out.tfevents.1.x", "a.log"):
        (tmp_path / name).touch()
    assert [f.name for f in event_files(tmp_path)] == ["events.out.tfevents.1.x", "events.out.tfevents.2.x"]
    assert event_files(tmp_path / "a.log") == []
    assert event_files(tmp_path / "nothing") == []


@pytest.fixture
def write_events(tmp_path: Path):
    """Writes scalars by tag and step, and texts, as one event file of a folder."""
    pytest.importorskip("tensorboard")
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    def write(scalars: dict[str, dict[int, float]], texts: dict[str, object], number: int = 0) -> Path:
        folder = tmp_path / f"events{number}"
        writer = EventFileWriter(str(folder))
        for tag, value in texts.items():
            tensor = TensorProto(dtype=7, string_val=[str(value).encode()])
            text = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
            summary = Summary(value=[Summary.Value(tag=f"{tag}/text_summary", metadata=text, tensor=tensor)])
            writer.add_event(Event(step=0, summary=summary))
        for tag, values in scalars.items():
            for step, value in values.items():
                summary = Summary(value=[Summary.Value(tag=tag, simple_value=value)])
                writer.add_event(Event(step=step, summary=summary))
        writer.close()
        return folder

    return write


STEPS = range(1, 13)
SCALARS = {
    "iteration-time": {i: 9.0 if i < 3 else 0.5 for i in STEPS},
    "throughput": dict.fromkeys(STEPS, 500.0),
    "batch-size": dict.fromkeys(STEPS, 64.0),
    "batch-size vs samples": {64 * i: 64.0 for i in STEPS},
    "lm loss": {i: 10.0 - i / 2 for i in STEPS},
    "lm loss vs samples": {64 * i: 3.0 for i in STEPS},
    "loss-scale": dict.fromkeys(STEPS, 1.0),
    "lm loss validation": {6: 7.5},
    "lm loss validation vs samples": {384: 7.5},
    "mem-max-allocated-bytes": {1: 2.0**30, 2: 2.0**31},
}
TEXTS = {"seq_length": 4096, "world_size": 8, "train_iters": 12, "fp8": "hybrid", "fp8_recipe": "tensorwise"}


def test_numbers(write_events) -> None:
    found = summarise(read_events(event_files(write_events(SCALARS, TEXTS))), gpu="h100")
    assert found.status == "ok"
    assert found.speed.step_time_ms.median == 500
    assert found.speed.tokens_per_s_per_gpu.median == pytest.approx(64 * 4096 / 0.5 / 8)
    assert found.speed.tflops_per_gpu.median == 500
    assert found.speed.mfu.median == pytest.approx(500 / 1979)
    assert found.peak_memory_mib == 2048
    assert (found.training.loss_first, found.training.loss_last) == (9.5, 4.0)
    assert found.steady_state.dropped == {"process start": (1, 2), "after evaluation": (7,)}
    assert found.training.validations[0]["losses"] == {"lm loss": 7.5}


def test_a_loss_that_is_nan_to_the_end(write_events) -> None:
    scalars = {**SCALARS, "lm loss": {i: 5.0 if i < 8 else math.nan for i in STEPS}}
    found = summarise(read_events(event_files(write_events(scalars, TEXTS))))
    assert (found.status, found.failure.code) == ("failed", "nan")


def test_without_the_planned_iterations_nobody_knows_that_it_is_done(write_events) -> None:
    found = summarise(read_events(event_files(write_events(SCALARS, {}))))
    assert found.status == "incomplete"


def test_parse_takes_a_folder_of_events(write_events, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_events({"lm loss": {n: 5.0 - n / 10 for n in range(1, 11)}}, {})
    assert run(["parse", str(folder), "--json"]) in (0, 1)
    assert json.loads(capsys.readouterr().out)["loss_last"] == pytest.approx(4.0)


def test_compare_takes_a_folder_of_events(write_events) -> None:
    one = read_runs([str(write_events(SCALARS, TEXTS))])
    assert [(run.name, run.facts["precision"], run.good) for run in one] == [("events0", "tensorwise", True)]


@pytest.mark.train
def test_a_real_run_says_the_same_in_both(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    settings = {
        "tensorboard_dir": tmp_path / "events", "tensorboard_log_interval": 1, "log_timers_to_tensorboard": "true",
        "log_world_size_to_tensorboard": "true",
    }  # fmt: skip
    words = [word for name, value in settings.items() for word in ("--set", f"megatron.{name}={value}")]
    done = subprocess.run(
        [sys.executable, "-m", "fp8launch", "submit", str(ROOT / "recipes/tiny_cpu.yaml"), "--backend", "local",
         "--wait", "--run-root", str(tmp_path / "runs"), *words],
        env={**os.environ, "HOME": str(tmp_path)}, capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    text = parse_paths(sorted((tmp_path / "runs").glob("*/logs/*-0.log")))
    events = summarise(read_events(event_files(tmp_path / "events")))
    assert (events.status, events.training.lines, events.steady_state.dropped) == (
        text.status,
        text.training.lines,
        text.steady_state.dropped,
    )
    assert events.speed.step_time_ms.median == pytest.approx(text.speed.step_time_ms.median, abs=0.06)
    assert events.training.loss_last == pytest.approx(text.training.loss_last, rel=1e-6)
    assert events.setup.seq_length == text.setup.seq_length
    assert re.fullmatch(r"\d+-\d+", events.attempts[0].iterations)

"""Live tracking: what a tracker has is read back by its own library."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import only, refused, wait_for

from fp8launch.cli import run
from fp8launch.cluster.profile import Cluster
from fp8launch.injob.local_job import LOCAL_RUN, LocalProcesses, processes_with, send
from fp8launch.injob.supervisor.checkpoints import latest
from fp8launch.job.build_job import UNPLACED, placed, plan
from fp8launch.job.prepared import prepare
from fp8launch.job.script import end_lines
from fp8launch.plugins.tracking.injob.log_rows import LogRows, Row
from fp8launch.plugins.tracking.injob.tracked_run import TrackedRun
from fp8launch.plugins.tracking.job_lines import end_trackers, start_trackers
from fp8launch.schedulers.local import LocalScheduler

ROOT = Path(__file__).resolve().parents[3]
FOLLOW = ROOT / "launchers/fp8launch/plugins/tracking/injob/follow.py"
# The environment with the libraries of W&B and MLflow.
PYTHON = ROOT / ".cache/trackers/bin/python"
with_libraries = pytest.mark.skipif(not PYTHON.is_file(), reason="W&B and MLflow are not installed in .cache/trackers")

READS_WANDB = """
import json, sys
from pathlib import Path
from fp8launch.plugins.tracking.injob.wandb_run import records_in
for file in sorted(Path(sys.argv[1]).glob("tracking/wandb/offline-run-*/*.wandb")):
    for record in records_in(file):
        if record.HasField("history"):
            row = {i.key or i.nested_key[0]: json.loads(i.value_json) for i in record.history.item}
            print(json.dumps([file.name, record.history.step.num, row.get("loss"), row.get("validation_loss")]))
"""
READS_MLFLOW = """
import json, sys
from mlflow import MlflowClient
client = MlflowClient(tracking_uri=sys.argv[1])
for experiment in client.search_experiments():
    for run in client.search_runs([experiment.experiment_id]):
        validation = {m.step: m.value for m in client.get_metric_history(run.info.run_id, "validation_loss")}
        for metric in client.get_metric_history(run.info.run_id, "loss"):
            print(json.dumps([run.info.run_name, metric.step, metric.value, validation.get(metric.step)]))
"""


def line(number: int, loss: float = 2.0) -> str:
    return (
        f" [2026-11-27 11:52:{number % 60:02d}.250000] iteration {number:8d}/     400 |"
        f" consumed samples: {number * 8:12d} | elapsed time per iteration (ms): 500.0 |"
        f" throughput per GPU (TFLOP/s/GPU): 400.5 | learning rate: 5.000000E-03 |"
        f" global batch size:     8 | lm loss: {loss:.6E} | loss scale: 1.0 | grad norm: 0.845 |"
        " number of skipped iterations:   0 | number of nan iterations:   0 |\n"
    )


def settings_of(tracker: str, folder: Path) -> dict[str, Any]:
    return {
        "wandb": {"mode": "offline"},
        "mlflow": {"uri": f"sqlite:///{folder.parent}/mlflow.db"},
        "tensorboard": {"dir": None},
    }[tracker]


def logged(tracker: str, folder: Path) -> list[list[Any]]:
    """Return name, iteration, loss and validation loss of each row that a tracker has."""
    if tracker == "tensorboard":
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
        events.Reload()
        validation = {}
        if "validation_loss" in events.Tags()["scalars"]:
            validation = {event.step: event.value for event in events.Scalars("validation_loss")}
        return [[None, event.step, event.value, validation.get(event.step)] for event in events.Scalars("loss")]
    code, word = (READS_WANDB, folder) if tracker == "wandb" else (READS_MLFLOW, settings_of(tracker, folder)["uri"])
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "launchers")}
    command = [str(PYTHON), "-c", code, str(word)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return sorted((json.loads(text) for text in done.stdout.splitlines()), key=lambda row: int(row[1]))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run folder whose training a test plays."""
    folder = tmp_path / "run-1"
    (folder / "logs").mkdir(parents=True)
    manifest = {"name": "tiny", "recipe": {}, "arguments": {"lr": 0.01, "seq_length": 64}, "layout": {"world": 2}}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        process.kill()
        process.wait()


def start(processes: list[subprocess.Popen[str]], tracker: str, folder: Path, attempt: str, **settings: Any) -> Any:
    python = sys.executable if tracker == "tensorboard" else str(PYTHON)
    words = [tracker, str(folder), str(folder / "logs" / attempt), json.dumps(settings or settings_of(tracker, folder))]
    process = subprocess.Popen(
        [python, str(FOLLOW), *words], stderr=subprocess.PIPE, text=True, cwd=folder, start_new_session=True
    )
    processes.append(process)
    return process


def next_line(process: subprocess.Popen[str], seconds: float = 120) -> str:
    """Return the next line of stderr. A process that says nothing for so long is killed, and the line is empty."""
    timer = threading.Timer(seconds, process.kill)
    timer.start()
    try:
        assert process.stderr is not None
        return process.stderr.readline()
    finally:
        timer.cancel()


def said_at_end(process: subprocess.Popen[str]) -> str:
    process.terminate()
    _, said = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "Traceback" not in said
    return said


def has_begun(tracker: str, folder: Path) -> bool:
    pattern = "tensorboard/*.fp8launch" if tracker == "tensorboard" else "tracking/wandb/offline-run-*/*.wandb"
    return any(file.stat().st_size > 500 for file in folder.glob(pattern))


@pytest.mark.slow
@pytest.mark.parametrize("tracker", [pytest.param("wandb", marks=with_libraries), "tensorboard"])
def test_a_killed_tracker_logs_every_iteration_once(
    tracker: str, folder: Path, processes: list[subprocess.Popen[str]]
) -> None:
    """The node fails, and the next attempt repeats iterations from its checkpoint on."""
    log = folder / "logs" / "1-0.log"
    log.write_text("".join(line(number, 3.0) for number in range(1, 40)))
    first = start(processes, tracker, folder, "1-0")
    wait_for(lambda: has_begun(tracker, folder), 120)
    os.killpg(first.pid, signal.SIGKILL)
    with log.open("a") as file:
        file.write("".join(line(number, 3.0) for number in range(40, 43)))
    (folder / "logs" / "1-1.log").write_text("".join(line(number, 2.0) for number in range(31, 61)))
    second = start(processes, tracker, folder, "1-1")
    assert next_line(second).startswith(f"fp8launch: tracking: {tracker}: ")
    if tracker == "wandb":
        assert "wandb sync --id run-1 " in next_line(second)
    assert said_at_end(second) == ""
    rows = logged(tracker, folder)
    assert [row[1] for row in rows] == list(range(1, 61))
    assert len({row[0] for row in rows}) == 1
    # The first value of an iteration stays.
    assert [row[2] for row in rows if row[1] in (42, 43)] == [3.0, 2.0]


@with_libraries
@pytest.mark.slow
def test_a_dead_server_is_a_line_in_the_output(folder: Path, processes: list[subprocess.Popen[str]]) -> None:
    (folder / "logs" / "1-0.log").write_text(line(1) + line(2))
    (folder / "logs" / "1-0.exit").write_text("0\n")
    process = start(processes, "mlflow", folder, "1-0", uri="http://127.0.0.1:9")
    _, said = process.communicate(timeout=90)
    assert process.returncode == 0
    first, *_, last = said.splitlines()
    assert first.startswith("fp8launch: tracking: mlflow: MlflowException: API request to http://127.0.0.1:9/")
    assert last.endswith("2 iterations were not logged: `fp8launch export run-1 --to mlflow` completes the run")
    assert len(said.splitlines()) == 2


@with_libraries
@pytest.mark.train
@pytest.mark.slow
def test_two_attempts_of_a_training_are_one_run(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP8LAUNCH_RUNS", str(tmp_path / "runs"))
    database = tmp_path / "runs" / "mlflow.db"
    sets = ["checkpoint.dir=checkpoints", "checkpoint.interval=20", "train.iterations=120", "megatron.eval_interval=30"]
    sets += [
        "megatron.eval_iters=1",
        "survive.rules.unknown=go-on",
        f"tracking.python={PYTHON}",
        "tracking.tensorboard={}",
    ]
    sets += ["tracking.wandb.mode=offline", f"tracking.mlflow.uri=sqlite:///{database}"]
    words = [word for setting in sets for word in ("--set", setting)]
    assert run(["submit", "tiny_cpu", "--backend", "local", "--yes", "--attempts", "3", *words]) == 0
    folder = next((tmp_path / "runs").glob("*/manifest.json")).parent
    wait_for(lambda: latest(folder / "checkpoints") >= 20, 120)
    send(signal.SIGKILL, LocalProcesses(str(folder)).all)
    wait_for(lambda: not any(processes_with(LOCAL_RUN, str(folder))), 240)
    assert len(json.loads((folder / "attempts.json").read_text())["attempts"]) == 2
    found = {tracker: logged(tracker, folder) for tracker in ("wandb", "mlflow", "tensorboard")}
    for rows in found.values():
        assert [row[1] for row in rows] == list(range(1, 121))
        assert len({row[0] for row in rows}) == 1
        assert [row[1] for row in rows if row[3]] == [30, 60, 90, 120]
    assert [row[2] for row in found["wandb"]] == [row[2] for row in found["mlflow"]]
    # An export completes the run.
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{database}")
    code = f"import sys; sys.path += {[str(site) for site in PYTHON.parents[1].glob('lib/python3*/site-packages')]!r}\n"
    code += f"from fp8launch.cli import run; sys.exit(run(['export', {str(folder)!r}, '--to', 'mlflow']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert logged("mlflow", folder) == found["mlflow"]


class TestRows:
    def read(self, *lines: str) -> list[Row]:
        rows = LogRows(seq_length=64, world_size=2)
        found = [row for text in lines for row in rows.feed(text.rstrip("\n"))]
        return found + list(rows.rest())

    def test_an_iteration_with_its_units(self) -> None:
        [row] = self.read("0: " + line(7))
        tokens = 8 * 64 / (0.5 * 2)
        assert (row.step, row.values) == (
            7,
            {"loss": 2.0, "grad_norm": 0.845, "learning_rate": 0.005, "step_time_ms": 500.0, "tflops_per_gpu": 400.5,
             "tokens_per_s_per_gpu": tokens},
        )  # fmt: skip
        assert time.strftime("%H:%M:%S", time.localtime(row.time)) == "11:52:07"

    def test_what_is_printed_below_an_iteration(self) -> None:
        memory = "[Rank 0] (after 7 iterations) memory (MB) | allocated: 5.00 | max allocated: 70.50 | reserved: 9.00"
        loss = (
            " validation loss at iteration 7 on validation set | lm loss value: 1.5E+00 | lm loss PPL: 7.362201E+00 | "
        )
        test = " validation loss at iteration 7 on test set | lm loss value: 1.6E+00 | lm loss PPL: 7.362201E+00 | "
        first, second = self.read(line(7), memory, loss, test, line(8))
        assert first.values["peak_memory_mib"] == 70.5
        assert (first.values["validation_loss"], first.values["test_loss"]) == (1.5, 1.6)
        assert "validation_loss" not in second.values

    def test_the_throughput_of_bridge(self) -> None:
        without = line(7).replace(" throughput per GPU (TFLOP/s/GPU): 400.5 |", "")
        step_time = "Step Time : 0.50s GPU utilization: 612.3MODEL_TFLOP/s/GPU"
        for lines in ([without, step_time], [step_time, without]):
            assert self.read(*lines)[0].values["tflops_per_gpu"] == 612.3

    def test_repeated_and_broken_lines_are_left_out(self) -> None:
        cut = line(9)[:90]
        rows = self.read(line(7, 3.0), line(8, 3.0), cut, line(7, 2.0), line(8, 2.0), line(9, 2.0))
        assert [(row.step, row.values["loss"]) for row in rows] == [(7, 3.0), (8, 3.0), (9, 2.0)]


def test_ids_are_unique_and_short() -> None:
    assert TrackedRun("run-1", None, {}).id == "run-1"
    ids = {TrackedRun("x" * 90 + end, study, {}).id for end in "ab" for study in (None, "s", "t")}
    assert len(ids) == 6 and max(map(len, ids)) <= 64


def lines_for(*sets: str, cluster: Cluster | None = None) -> list[str]:
    cluster = cluster or Cluster()
    prepared = prepare("tiny_cpu", sets)
    job, recipe = placed(plan(prepared, cluster, UNPLACED), Path("/runs/r")), prepared.loaded.recipe
    lines = start_trackers(job, recipe, cluster)
    command = end_trackers(replace(job, setup=tuple(lines)), LocalScheduler())
    return [*lines, *end_lines([command] if command else [])]


class TestSettings:
    def test_nothing_is_started_without_a_tracker(self) -> None:
        assert lines_for() == []

    def test_a_recipe_wins_over_the_profile(self) -> None:
        site = Cluster(tracking={"wandb": {"project": "site", "mode": "offline"}, "tensorboard": {}})
        text = "\n".join(lines_for("tracking.wandb.project=mine", "tracking.tensorboard=null", cluster=site))
        assert '{"project": "mine", "entity": null, "group": null, "mode": "offline"}' in text
        assert "tensorboard" not in text

    def test_a_wrong_profile_is_refused(self) -> None:
        problem = only(refused(lines_for, cluster=Cluster(tracking={"comet": {}})))
        assert problem.where == "cluster profile: tracking" and "wandb" in f"{problem.message} {problem.fix}"

    @pytest.mark.parametrize("uri", ["https://me:hush@host", "https://me@host/x", "https://host/?api_key=hush"])
    def test_a_login_in_an_address_is_refused_unseen(self, uri: str) -> None:
        problem = only(refused(lines_for, f"tracking.mlflow.uri={uri}"))
        assert "login" in problem.message and "MLFLOW_TRACKING_TOKEN" in str(problem.fix)
        assert "hush" not in problem.message

    def test_values_are_never_executed(self, tmp_path: Path) -> None:
        lines = lines_for(f"tracking.mlflow.uri='$(touch {tmp_path}/canary)`x`'", "tracking.python=/bin/echo")
        script = "\n".join(["set -u", "code=/c run_folder=/r attempt=/a", *lines, "wait"])
        done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
        assert f"$(touch {tmp_path}/canary)`x`" in done.stdout
        assert not list(tmp_path.iterdir())

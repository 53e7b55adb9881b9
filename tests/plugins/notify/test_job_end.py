"""The job itself notifies of the run's end, once, whether somebody waits or not."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import wait_for
from test_notified_runs import PRINTS
from webhook_server import webhook

from fp8launch.cli import run
from fp8launch.cluster.profile import Cluster
from fp8launch.injob.local_job import LOCAL_RUN, LocalProcesses, processes_with, send
from fp8launch.injob.supervisor.checkpoints import latest
from fp8launch.injob.supervisor.run_end import End, end_of
from fp8launch.job.build_job import UNPLACED, placed, plan
from fp8launch.job.prepared import prepare
from fp8launch.plugins.notify.job_end import notify_at_end
from fp8launch.plugins.notify.notify import config_file
from fp8launch.schedulers import by_name

GOOD, LOST = "lm loss: 1.000000E+00 |", ""


class Hook:
    """A webhook whose address is in the variable MY_WEBHOOK, and runs that notify it."""

    def __init__(self, home: Path, messages: list[dict[str, Any]]) -> None:
        self.runs, self.messages = home / "runs", messages

    def configure(self, more: str = "") -> None:
        config_file().parent.mkdir(parents=True, exist_ok=True)
        config_file().write_text(f"notify: {{webhook_variable: MY_WEBHOOK{more}}}\n")

    def submit(self, script: str, *words: str) -> Path:
        """Submit a run of this script, and return its folder."""
        file = self.runs.parent / "prints.py"
        file.write_text(script)
        words = ("submit", "tiny_cpu", "--backend", "local", "--yes", "--set", f"launch.script={file}", *words)
        self.status = run([*words])
        return max((path.parent for path in self.runs.glob("*/manifest.json")), key=lambda path: path.stat().st_mtime)

    def ended(self, folder: Path) -> str:
        """Wait until no process of a run is left, and return what its script printed."""
        wait_for(lambda: not any(processes_with(LOCAL_RUN, str(folder))), 120)
        return (folder / "logs" / "local.out").read_text()


@pytest.fixture
def hook(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hook]:
    monkeypatch.setenv("FP8LAUNCH_RUNS", str(home / "runs"))
    with webhook() as (url, messages):
        monkeypatch.setenv("MY_WEBHOOK", url)
        found = Hook(home, messages)
        found.configure()
        yield found


def prints(loss: str = GOOD, then: str = "", nan_iterations: int = 0) -> str:
    return PRINTS.replace("LOSS", loss).replace("NAN", str(nan_iterations)) + then


def test_nobody_waits(hook: Hook) -> None:
    folder = hook.submit(prints())
    hook.ended(folder)
    (message,) = hook.messages
    assert message == {
        "text": f"{folder.name}: completed", "run": folder.name, "state": "completed", "detail": "", "failure": None,
        "health": [], "loss": 1.0, "iteration": 8,
    }  # fmt: skip
    assert (folder / "logs" / "local-0.exit").read_text() == "0\n"
    for file in filter(Path.is_file, folder.rglob("*")):
        assert os.environ["MY_WEBHOOK"].encode() not in file.read_bytes(), file


def test_a_failure_says_why(hook: Hook) -> None:
    hook.configure(", when: failure")
    folder = hook.submit(prints(then="raise ValueError('a bad shape')\n"))
    hook.ended(folder)
    (message,) = hook.messages
    assert message["state"] == "failed" and "a bad shape" in message["text"]
    assert message["failure"]["message"] == "ValueError: a bad shape"
    hook.ended(hook.submit(prints()))
    assert len(hook.messages) == 1  # a run that completes is no failure


def test_a_run_that_is_nan_to_its_end_is_a_failure(hook: Hook) -> None:
    hook.configure(", when: failure")
    hook.ended(hook.submit(prints(LOST, nan_iterations=1)))
    (message,) = hook.messages
    assert message["state"] == "completed" and message["health"][0]["code"] == "nan"


def test_it_is_not_sent_again_to_somebody_who_waits(hook: Hook) -> None:
    hook.submit(prints(), "--wait")
    assert hook.status == 0
    assert [message["state"] for message in hook.messages] == ["completed"]


def test_somebody_who_waits_sends_it_for_a_job_that_is_killed(hook: Hook) -> None:
    kill_all = (
        "import os, signal\n"
        "from fp8launch.injob.local_job import LOCAL_RUN, processes_with\n"
        "for pid in processes_with(LOCAL_RUN, os.environ[LOCAL_RUN]):\n"
        "    if pid != os.getpid():\n"
        "        os.kill(pid, signal.SIGKILL)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    hook.submit(prints(then=kill_all), "--wait")
    assert hook.status == 1
    assert [message["state"] for message in hook.messages] == ["failed"]


def test_a_variable_that_does_not_reach_the_job(hook: Hook, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MY_WEBHOOK")
    folder = hook.submit(prints())
    assert "no notification was sent: the variable MY_WEBHOOK did not reach the job" in hook.ended(folder)
    monkeypatch.setenv("MY_WEBHOOK", "file:///etc/s3cr3t")
    folder = hook.submit(prints())
    said = hook.ended(folder)
    assert "the variable MY_WEBHOOK does not contain the address of a webhook" in said and "s3cr3t" not in said
    assert hook.messages == []


def test_a_webhook_that_does_not_answer_leaves_the_run_as_it_is(hook: Hook, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_WEBHOOK", "http://127.0.0.1:1/s3cr3t")
    folder = hook.submit(prints())
    said = hook.ended(folder)
    assert "no notification was sent: the webhook cannot be reached" in said and "s3cr3t" not in said
    assert (folder / "logs" / "local-0.exit").read_text() == "0\n"
    assert not list(folder.glob("logs/*.notified"))


def test_a_run_that_is_cancelled(hook: Hook) -> None:
    folder = hook.submit(prints(then="import time\ntime.sleep(600)\n"))
    wait_for(lambda: "iteration        8" in "".join(log.read_text() for log in folder.glob("logs/*-0.log")), 60)
    began = time.monotonic()
    assert run(["cancel", folder.name]) == 0
    assert time.monotonic() - began < 15
    hook.ended(folder)
    assert [message["text"] for message in hook.messages] == [f"{folder.name}: cancelled: by fp8launch cancel"]


@pytest.mark.train
def test_attempts_are_not_ends(hook: Hook) -> None:
    """The first attempt is killed, the second finishes the run: one message."""
    sets = ["checkpoint.dir=checkpoints", "checkpoint.interval=20", "train.iterations=200"]
    sets += ["survive.rules.unknown=go-on"]
    words = [word for setting in sets for word in ("--set", setting)]
    assert run(["submit", "tiny_cpu", "--backend", "local", "--yes", "--attempts", "3", *words]) == 0
    folder = next(hook.runs.glob("*/manifest.json")).parent
    wait_for(lambda: latest(folder / "checkpoints") >= 20, 120)
    send(signal.SIGKILL, LocalProcesses(str(folder)).all)
    hook.ended(folder)
    assert len(json.loads((folder / "attempts.json").read_text())["attempts"]) == 2
    assert [(message["state"], message["iteration"]) for message in hook.messages] == [("completed", 200)]


@pytest.mark.parametrize(
    ("state", "status", "expected"),
    [
        ({"attempts": [{"name": "1-0", "ended": 5}], "waiting": "2"}, 0, None),
        ({"attempts": [{"name": "1-0", "ended": 5}], "waiting": "2"}, 1, None),
        ({"attempts": [{"name": "1-0"}]}, 143, None),  # preempted: Slurm starts the job again
        ({"attempts": [{"name": "1-0"}]}, 1, None),
        ({"attempts": [{"name": "1-0", "ended": 5}], "finished": True}, 0, "completed"),
        ({"attempts": [{"name": "1-0", "ended": 5}], "stopped": "no attempts left"}, 1, "failed"),
        ({"attempts": [{"name": "1-0", "ended": 5}]}, 75, "failed"),
        ({}, 75, "failed"),
    ],
)
def test_when_a_run_with_several_attempts_ends(
    tmp_path: Path, state: dict[str, Any], status: int, expected: str | None
) -> None:
    (tmp_path / "survive.json").write_text("{}")
    (tmp_path / "attempts.json").write_text(json.dumps(state))
    found = end_of(tmp_path, "1-0", status)
    assert (found and found.state) == expected


def test_a_job_that_is_terminated_before_its_training_ends(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    assert end_of(tmp_path, "1-0", 128 + signal.SIGTERM) == end_of(tmp_path, "1-0", 0)
    found = end_of(tmp_path, "1-0", 0)
    assert isinstance(found, End) and found.state == "interrupted"
    (tmp_path / "logs" / "1-0.exit").write_text("143\n")
    assert end_of(tmp_path, "1-0", 143) == End("1-0", "failed", "exit status 143")


def test_trials_of_a_search_send_nothing(hook: Hook, tmp_path: Path) -> None:
    job = plan(prepare("tiny_cpu"), Cluster(), UNPLACED)
    assert notify_at_end(placed(job, tmp_path / "study" / "run"), by_name("local"))
    (tmp_path / "study" / "tune").mkdir(parents=True)
    (tmp_path / "study" / "tune" / "state.json").write_text("{}")
    assert notify_at_end(placed(job, tmp_path / "study" / "run"), by_name("local")) is None

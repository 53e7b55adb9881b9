"""When a silent log is a hang, and what the stacks of its processes say."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from fp8launch.engines.base import EngineArguments
from fp8launch.injob.supervisor import hang_watchdog
from fp8launch.injob.supervisor.failures import ending_of_attempt
from fp8launch.injob.supervisor.health_rules import Event
from fp8launch.injob.supervisor.health_watch import CAUSE, Actions, event_of
from fp8launch.injob.supervisor.job_scheduler import JobScheduler, Training
from fp8launch.job.prepared import prepare
from fp8launch.submit.supervisor_plan import hang_plan

LAUNCHERS = Path(sys.modules["fp8launch"].__path__[0]).parent

LINE = " [2026-01-01 00:00:00] iteration {}/ 100 | consumed samples: 8 | elapsed time per iteration (ms): {} |\n"


def plan(*choices: str) -> dict[str, Any]:
    prepared = prepare("tiny_cpu", ["checkpoint={dir: c, interval: 5}", *choices])
    found = hang_plan(prepared.loaded.recipe, prepared.args)
    assert found is not None
    return found


def seen(*lines: tuple[int, float], silences: tuple[float, ...] = ()) -> hang_watchdog.Progress:
    progress = hang_watchdog.Progress()
    for at, (number, milliseconds) in enumerate(lines):
        progress.silent = silences[at] if at < len(silences) else 1.0
        progress.grown(progress.size + 100, LINE.format(number, milliseconds))
    return progress


def test_a_start_may_take_longer_than_an_hour() -> None:
    assert hang_watchdog.patience(seen(), plan()) > 3600
    assert hang_watchdog.patience(seen(), plan("survive.hang_after=10")) > 3600


def test_silence_is_judged_by_what_this_training_does() -> None:
    every = plan("megatron.log_interval=1", "megatron.eval_iters=0")
    assert hang_watchdog.patience(seen((1, 500.0), (2, 500.0)), every) == 1800
    # 100 iterations of 20 s between two lines, and an evaluation that takes as long as 2 x 50 of them.
    slow = plan("megatron.log_interval=100", "megatron.eval_iters=50")
    assert hang_watchdog.patience(seen((100, 20000.0)), slow) == 4 * 20 * 200
    # A checkpoint that was written for twenty minutes will be again.
    assert hang_watchdog.patience(seen((1, 500.0), (2, 500.0), (3, 500.0), silences=(0, 0, 1200)), every) == 4800


def test_the_users_own_number_is_taken_as_it_is() -> None:
    assert hang_watchdog.patience(seen((1, 60000.0), (2, 60000.0)), plan("survive.hang_after=300")) == 300


def test_a_longer_time_out_of_collectives_comes_first() -> None:
    assert plan("megatron.distributed_timeout_minutes=60")["after"] == 7200


def test_it_can_be_switched_off() -> None:
    prepared = prepare("tiny_cpu", ["checkpoint={dir: c, interval: 5}", "survive.hang_after=0"])
    assert hang_plan(prepared.loaded.recipe, prepared.args) is None
    # How long the whole validation set takes is not known.
    args = EngineArguments(
        **{**vars(prepared.args), "attributes": {**prepared.args.attributes, "full_validation": True}}
    )
    assert hang_plan(prepare("tiny_cpu").loaded.recipe, args) is None


STACK = """\
{label}: {rank}Stack (most recent call first):
{label}: {rank}  File "/a/b/distributed_c10d.py", line 7 in all_reduce
{label}: {rank}  File "/a/b/training.py", line 9 in train
"""


def test_the_rank_without_a_stack_is_named() -> None:
    text = "".join(STACK.format(label=label, rank="") for label in (0, 1, 3))
    words, tasks = hang_watchdog.describe_stacks(hang_watchdog.parse_stacks(text), 4)
    assert words == "ranks 0, 1, 3 in all_reduce (distributed_c10d.py:7); no stack from rank 2"
    assert tasks == [2]


def test_ranks_of_torchrun_are_told_apart() -> None:
    text = (
        "".join(STACK.format(label=rank // 2, rank=f"[rank{rank}]: ") for rank in (0, 1, 2)) + "1: [rank3]: no stack\n"
    )
    words, tasks = hang_watchdog.describe_stacks(hang_watchdog.parse_stacks(text), 2)
    assert words.endswith("no stack from rank 3")
    assert tasks == [1]


def test_the_rank_with_a_different_stack_comes_first() -> None:
    text = "".join(STACK.format(label=label, rank="") for label in range(8))
    text += STACK.format(label=8, rank="").replace("all_reduce", "get_batch")
    words, tasks = hang_watchdog.describe_stacks(hang_watchdog.parse_stacks(text), 9)
    assert words == "rank 8 in get_batch (distributed_c10d.py:7); 8 ranks in all_reduce (distributed_c10d.py:7)"
    assert tasks == []


def test_no_answer_at_all_accuses_nobody() -> None:
    assert hang_watchdog.describe_stacks([], 4) == ("no process gave its stack", [])


def test_a_log_that_grows_or_a_checkpoint_that_is_written_is_no_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer adds to the log for 3 s, then to a checkpoint for 4 s, then to nothing; silence of 2 s is a hang."""
    log, folder = tmp_path / "log", tmp_path / "ckpt" / "iter_0000005"
    folder.mkdir(parents=True)
    log.write_text(LINE.format(1, 10.0))
    writer = textwrap.dedent(f"""
        import time
        for file, count in (({str(log)!r}, 6), ({str(folder / "part")!r}, 8)):
            for _ in range(count):
                with open(file, "a") as stream:
                    stream.write("x\\n")
                time.sleep(0.5)
    """)
    ended: list[float] = []
    monkeypatch.setattr(hang_watchdog, "end_hung", lambda *rest: ended.append(time.monotonic()) or True)
    began = time.monotonic()
    process = subprocess.Popen([sys.executable, "-c", writer])
    plan = {"after": 2, "stated": True, "quiet": 1, "start": 60}
    hang_watchdog.watch(log, tmp_path / "ckpt", JobScheduler("1", tmp_path, {}, {}), plan, None, Actions.of_plan({}))
    assert process.wait(60) == 0
    assert 8.5 < ended[0] - began < 14


def test_a_finding_has_its_own_line_although_a_rank_has_not_ended_its_last_one(tmp_path: Path) -> None:
    """Python writes a line and its end separately."""

    class Step(Training):
        def end(self, at_once: bool = False) -> bool:
            return True

    class Job(JobScheduler):
        def training(self) -> Training:
            return Step()

    log = tmp_path / "1-0.log"
    log.write_text(LINE.format(1, 10.0) + LINE.format(2, 10.0).rstrip("\n"))
    event = Event("nan", "the loss is NaN", 1, 2)
    assert hang_watchdog.end_unhealthy(log, Job("1", tmp_path, {}, {}), event)
    failure = ending_of_attempt(log.read_text() + "\n").failure
    assert failure is not None and failure.code == CAUSE
    assert event_of(CAUSE, failure.source, "", Actions.of_plan({})) == event


RANK = """
import multiprocessing, signal, sys, time
sys.path.insert(0, LAUNCHERS)

def data_loader():
    signal.signal(signal.SIGTERM, lambda number, frame: None)  # as Megatron's does
    while True:
        time.sleep(60)

def waits_here(seconds):
    time.sleep(seconds)

if __name__ == "__main__":
    from fp8launch.injob.rank import signals as helpers
    helpers.tie_helpers_to_rank()
    helpers.tie_helpers_to_rank()
    helpers.answer_with_stack()
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    queue = multiprocessing.get_context("spawn").Manager().Queue()
    fork = multiprocessing.get_context("fork").Process(target=data_loader, daemon=True)
    fork.start()
    print("ready", flush=True)
    for _ in range(4):
        waits_here(1)
    queue.put("whole")
    print(queue.get(), fork.is_alive(), flush=True)
    sys.exit("failed")
"""


def test_helpers_outlive_sigterm_and_end_with_their_rank(tmp_path: Path) -> None:
    """SIGTERM and SIGUSR1 to a rank, to a process that multiprocessing started afresh, and to a fork."""
    script = tmp_path / "rank.py"
    script.write_text(RANK.replace("LAUNCHERS", repr(str(LAUNCHERS))))
    out: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    rank = subprocess.Popen([sys.executable, str(script)], start_new_session=True, **out)
    assert rank.stdout and rank.stdout.readline() == "ready\n"
    time.sleep(0.5)
    for name in ("TERM", "USR1"):
        subprocess.run(["kill", f"-{name}", "--", f"-{rank.pid}"], check=True)
    said, told = rank.communicate(timeout=120)
    assert said == "whole True\n"
    assert rank.returncode == 1
    assert told.count("Stack (most recent call first)") == 1 and "in waits_here" in told

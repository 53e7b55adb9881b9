"""Ctrl-C ends the job of a trial, also one that a killed command left behind."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from memory_scheduler import MemoryJob, MemoryScheduler

from fp8launch.rundir.atomic_io import held


def test_ctrl_c_while_a_trial_is_submitted_ends_its_job(in_memory: Any) -> None:
    """The job began, and nothing of it was recorded."""
    in_memory.memory.interrupted = True
    in_memory("tune", "tiny_cpu", "--backend", in_memory.backend, "--trials", "1", "--knobs", "micro-batch", expect=130)
    assert [job.status for job in in_memory.memory.jobs.values()] == ["cancelled"]


@pytest.mark.parametrize("place", ["session.write_record", "session.predict", "session.run_trial", "trials.check_all"])
def test_ctrl_c_ends_the_trial_of_a_command_that_was_killed(
    in_memory: Any, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Its job runs while the repeated command has not come as far as to follow it."""
    tune = ["tune", "tiny_cpu", "--backend", in_memory.backend, "--trials", "1", "--knobs", "micro-batch"]

    def end(*_: object) -> None:
        raise SystemExit(137)

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as killed, pytest.raises(SystemExit):
        killed.setattr("fp8launch.plugins.tune.trials._follow", end)
        in_memory(*tune)
    assert [job.status for job in in_memory.memory.jobs.values()] == ["pending"]
    monkeypatch.setattr(f"fp8launch.plugins.tune.{place}", interrupt)
    in_memory(*tune, expect=130)
    assert [job.status for job in in_memory.memory.jobs.values()] == ["cancelled"]


def test_ctrl_c_waits_for_a_submission_that_outlived_its_launcher(
    in_memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an sbatch does, it holds the lock of the study, and the job exists only when it is done."""
    jobs = in_memory.memory.jobs
    tune = ["tune", "tiny_cpu", "--backend", in_memory.backend, "--trials", "1", "--knobs", "micro-batch"]
    late: list[threading.Thread] = []

    begun = threading.Event()

    def be_killed(scheduler: Any, members: Any, key: str, *_: object) -> None:
        def accept() -> None:
            with held(members[0].path.parent, wait=10):
                begun.set()
                time.sleep(0.5)
                jobs["1"] = MemoryJob(key, members[0])

        late.append(threading.Thread(target=accept))
        late[0].start()
        raise SystemExit(137)

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as killed, pytest.raises(SystemExit):
        killed.setattr(MemoryScheduler, "_add", be_killed)
        in_memory(*tune)
    assert begun.wait(10)
    monkeypatch.setattr("fp8launch.plugins.tune.session.run_trial", interrupt)
    in_memory(*tune, expect=130)
    late[0].join()
    assert [job.status for job in jobs.values()] == ["cancelled"]

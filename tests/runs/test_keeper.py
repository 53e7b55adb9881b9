"""The keeper by itself: what it decides, writes down and asks Slurm, with real files.

Slurm is a folder of small scripts on PATH that write down how they were called: what its answers lead to is tried on
a real one in tests/slurm.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fp8launch.backends.sbatch import SbatchBackend
from fp8launch.job.cluster import Cluster
from fp8launch.runs.submit import plan_run, prepare
from fp8launch.runs.survival import survival_text
from fp8launch.train import saved

KEEPER = Path(saved.__file__).with_name("keeper.py")
SLURM = {
    "squeue": 'case "$*" in *%S*) echo "$TIMES" ;; *) cat "$FAKE_DIR/queue" ;; esac',
    "scontrol": 'case "$*" in *hostnames*) printf "node%s\\n" 1 2 ;; *) echo "${SHOWN-JobState=RUNNING}" ;; esac',
    "sbatch": "echo 77",
    "scancel": "true",
}


class Job:
    """A run folder, and the keeper called in it as a job's batch script calls it."""

    def __init__(self, folder: Path, *choices: str, profile: Cluster | None = None) -> None:
        self.run = folder / "run"
        (self.run / "logs").mkdir(parents=True)
        self.bin = folder / "bin"
        self.bin.mkdir()
        for name, body in SLURM.items():
            script = f'#!/bin/sh\necho {name} "$@" >> "$FAKE_DIR/calls"\n{body}\n'
            (self.bin / name).write_text(script)
            (self.bin / name).chmod(0o755)
        (self.bin / "queue").write_text("")
        prepared = prepare("tiny_cpu", ["checkpoint={dir: ckpt, interval: 5}", "train.iterations=20", *choices])
        cluster = profile or Cluster()
        job = plan_run(prepared, cluster, self.run, SbatchBackend())
        text = survival_text(prepared.loaded, prepared.args, cluster, job)
        assert text
        (self.run / "survive.json").write_text(text)

    def keeper(self, what: str, name: str = "5-0", *rest: str, **env: str) -> subprocess.CompletedProcess[str]:
        call = self.call(what, name, *rest, **env)
        return subprocess.run(**call, stdout=subprocess.PIPE, timeout=180, check=False)

    def call(self, what: str, name: str = "5-0", *rest: str, **env: str) -> dict[str, Any]:
        """How a process of the keeper is started."""
        hour = [time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + s)) for s in (0, 3600)]
        slurm = {"FAKE_DIR": str(self.bin), "TIMES": " ".join(hour), "SLURM_JOB_NODELIST": "node[1-2]"}
        slurm |= {"SLURM_NTASKS": "4", "SLURM_TASKS_PER_NODE": "2(x2)"}
        return {
            "args": [sys.executable, str(KEEPER), what, str(self.run), str(self.run / "logs" / name), *rest],
            "env": {"PATH": f"{self.bin}:{os.environ['PATH']}", **slurm, **env},
            "stderr": subprocess.PIPE,
            "text": True,
        }

    def begin(self, name: str = "5-0", **env: str) -> subprocess.CompletedProcess[str]:
        return self.keeper("begin", name, **env)

    def end(self, status: int, log: str = "", name: str = "5-0", **env: str) -> subprocess.CompletedProcess[str]:
        (self.run / "logs" / f"{name}.log").write_text(log)
        return self.keeper("end", name, str(status), **env)

    def reach(self, iteration: int) -> None:
        """A checkpoint of one file, in the format of one file a rank."""
        folder = saved.place(self.run / "ckpt", iteration)
        (folder / "mp_rank_00").mkdir(parents=True)
        empty_zip = b"PK\x05\x06" + bytes(18)
        (folder / "mp_rank_00" / "model_optim_rng.pt").write_bytes(empty_zip)
        saved.point_at(self.run / "ckpt", iteration)

    @property
    def record(self) -> dict[str, Any]:
        record: dict[str, Any] = json.loads((self.run / "attempts.json").read_text())
        return record

    @property
    def calls(self) -> str:
        return (self.bin / "calls").read_text()


@pytest.fixture
def job(tmp_path: Path) -> Callable[..., Job]:
    def make(*choices: str, **profile: Any) -> Job:
        return Job(tmp_path, *choices, profile=Cluster(**profile))

    return make


def test_an_attempt_begins_with_when_to_stop(job: Callable[..., Job]) -> None:
    one = job("survive.attempts=3")
    begun = one.begin()
    assert begun.returncode == 0, begun.stderr
    assert int(begun.stdout) == pytest.approx(time.time() + 3600 - 120, abs=5)
    assert "from the beginning" in begun.stderr
    [attempt] = one.record["attempts"]
    assert (attempt["name"], attempt["job"], attempt["before"]) == ("5-0", "5", 0)


@pytest.mark.parametrize("skew", [-1800, 1800])
def test_a_clock_that_differs_from_slurms_changes_nothing(job: Callable[..., Job], skew: int) -> None:
    """The times of Slurm's answers are those of a controller whose clock differs by half an hour."""
    start = time.time() - skew
    times = [time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(start + s)) for s in (0, 3600)]
    begun = job().begin(TIMES=" ".join(times))
    assert int(begun.stdout) == pytest.approx(time.time() + 3600 - 120, abs=5)
    assert "clock is" in begun.stderr


def test_where_nobody_says_when_the_job_ends_its_own_limit_counts(job: Callable[..., Job]) -> None:
    begun = job("resources.time=30").begin(TIMES="N/A N/A")
    assert int(begun.stdout) == pytest.approx(time.time() + 1800 - 120, abs=5)


def test_training_that_reached_its_end_is_done(job: Callable[..., Job]) -> None:
    one = job("survive.attempts=3")
    one.begin()
    one.reach(20)
    ended = one.end(0, "[after training is done]\n")
    assert ended.returncode == 0 and "training is done" in ended.stderr
    assert one.record["finished"]
    again = one.begin("5-1")
    assert (again.returncode, again.stdout) == (0, "")


LEFT = "0: [exiting program after 58.0 minutes] datetime: now\n"
TERM = "0: [exiting program after receiving SIGTERM.] datetime: now\n"
STEP = "0: slurmstepd-node1: error: *** STEP 5.0 ON node1 CANCELLED AT 2026-01-01T00:00:00 ***\n"
OOM = "1: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\n"
XID = "2: NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.\n"
HANG = "fp8launch: hang: the log has not grown for 99 s; rank 0 in wait (x.py:1); no stack from rank 3 on node2\n"
MISSED = "".join(f"{rank}: [rank{rank}]: RuntimeError: [gloo/x.cc:1] Timed out waiting\n" for rank in (0, 1, 2))
STEP_ENDED = "0: slurmstepd-node1: error: *** STEP 5.0 ON node1 CANCELLED AT 2026-11-21T15:58:21 ***\n"
BOTH_MISSED = "".join(f"{rank}: RuntimeError: [gloo/x.cc:1] Connection closed by peer\n" for rank in (0, 2))


@pytest.mark.parametrize(
    ("status", "log", "cause", "node", "goes_on"),
    [
        (0, LEFT, "time-limit", None, True),
        (143, LEFT + STEP, "time-limit", None, True),
        (143, STEP, "cancelled", "node1", False),
        (0, TERM, "signal", None, True),
        (0, "", "unknown", None, False),
        (1, OOM, "out-of-memory", "node1", False),
        (1, XID, "gpu-failure", "node2", True),
        (137, HANG, "hang", "node2", True),
        (1, MISSED, "network", "node2", True),
        (1, BOTH_MISSED, "network", None, True),
        (1, OOM + STEP_ENDED, "out-of-memory", "node1", False),
        (1, BOTH_MISSED + STEP_ENDED, "network", None, True),
        (1, STEP_ENDED + BOTH_MISSED, "cancelled", "node1", False),
        (1, "0: nothing that anybody knows\n", "unknown", None, False),
    ],
)
def test_what_follows_an_end(
    job: Callable[..., Job], status: int, log: str, cause: str, node: str | None, goes_on: bool
) -> None:
    one = job("survive.attempts=3")
    one.begin()
    one.reach(10)
    ended = one.end(status, log)
    [attempt] = one.record["attempts"]
    assert (attempt["cause"], attempt["node"], attempt["after"]) == (cause, node, 10), ended.stderr
    assert ended.returncode == (0 if goes_on else status or 75)
    assert (one.record["stopped"] is None) == goes_on
    excluded = goes_on and node is not None
    assert one.record["excluded"] == ([node] if excluded else [])
    assert ("scontrol requeue 5" in one.calls) == (goes_on and not excluded)
    assert (
        f"sbatch --parsable --dependency=afterany:5 --comment=fp8launch:run.1 --exclude={node}" in one.calls
    ) == excluded
    if log and cause not in ("time-limit", "signal", "unknown"):
        assert attempt["line"] in log


def test_preemption_is_known_in_its_grace_time(job: Callable[..., Job]) -> None:
    one = job("survive.attempts=3")
    one.begin()
    one.end(0, TERM, SHOWN="JobState=RUNNING PreemptTime=2026-01-01T12:00:00")
    [attempt] = one.record["attempts"]
    assert (attempt["cause"], attempt["counts"]) == ("preempted", False)


def test_a_start_that_the_last_signal_cut_off_is_a_time_limit(job: Callable[..., Job]) -> None:
    one = job("survive.attempts=3", "resources.time=1")
    soon = [time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + s)) for s in (0, 50)]
    one.begin(TIMES=" ".join(soon))
    one.end(143, STEP)
    assert one.record["attempts"][0]["cause"] == "time-limit"


def test_what_slurm_ends_is_left_to_slurm(job: Callable[..., Job]) -> None:
    one = job("survive.attempts=3")
    one.begin()
    ended = one.end(143, TERM, SHOWN="JobState=CANCELLED")
    assert ended.returncode == 143
    assert "ended" not in one.record["attempts"][0]
    assert "requeue" not in one.calls and "sbatch" not in one.calls


def test_attempts_are_used_up(job: Callable[..., Job]) -> None:
    one = job("survive.attempts=2")
    for restart, reached in enumerate((5, 10)):
        one.begin(f"5-{restart}")
        one.reach(reached)
        ended = one.end(0, LEFT, f"5-{restart}")
    assert ended.returncode == 75
    assert "2 of 2" in one.record["stopped"]
    assert one.begin("5-2").returncode == 75


def test_a_job_that_waits_is_submitted_once_and_left_a_bad_node(job: Callable[..., Job]) -> None:
    one = job("survive.attempts=3", continue_by="dependency")
    one.begin()
    assert one.record["waiting"] == "77"
    one.reach(10)
    one.end(1, XID)
    assert "scontrol update JobId=77 ExcNodeList=node2" in one.calls
    assert one.calls.count("sbatch --parsable") == 1
    # The job that waited has its turn, the old one no more.
    assert one.begin("77-0").returncode == 0
    late = one.begin("5-1")
    assert (late.returncode, late.stdout) == (0, "") and "has gone on" in late.stderr


def test_a_job_whose_answer_was_lost_is_found_by_its_key(job: Callable[..., Job]) -> None:
    one = job("survive.attempts=3", continue_by="dependency")
    (one.bin / "queue").write_text("66|fp8launch:run.1\n65|fp8launch:other.1\n")
    one.begin()
    assert one.record["waiting"] == "66"
    assert "sbatch" not in one.calls


def test_a_run_that_was_cancelled_does_not_begin(job: Callable[..., Job]) -> None:
    one = job("survive.attempts=3")
    (one.run / "cancelled").write_text("")
    begun = one.begin()
    assert (begun.returncode, begun.stdout) == (75, "")


def test_a_job_that_slurm_started_again_goes_on_from_the_checkpoint(job: Callable[..., Job]) -> None:
    one = job("survive.attempts=2")
    one.begin()
    one.reach(10)
    begun = one.begin("5-1")
    assert "from iteration 10" in begun.stderr
    first, second = one.record["attempts"]
    assert (first["cause"], first["counts"], first["after"]) == ("interrupted", False, 10)
    assert second["before"] == 10


def test_a_job_that_never_gets_to_save_is_not_started_for_good(job: Callable[..., Job]) -> None:
    one = job("survive.attempts=2")
    for restart in range(50):
        assert one.begin(f"5-{restart}").returncode == 0
        if restart == 9:
            one.reach(10)  # what was saved once makes no difference later
    for restart in range(50, 60):
        assert one.begin(f"5-{restart}").returncode == 0
    assert one.begin("5-60").returncode == 75
    assert one.record["stopped"].startswith("interrupted: 50 attempts without a newer checkpoint; save more often")


def test_a_disk_that_takes_nothing_is_told_in_words(job: Callable[..., Job]) -> None:
    one = job("survive.attempts=2")
    (one.run / ".attempts.json.new").mkdir()  # stands for a disk that refuses: also root cannot write it
    begun = one.begin()
    assert (begun.returncode, begun.stdout) == (75, "")
    assert "the run stops here" in begun.stderr and "Traceback" not in begun.stderr


def test_only_the_newest_checkpoints_are_kept(job: Callable[..., Job]) -> None:
    one = job("checkpoint.keep=2", "survive.attempts=2")
    one.begin()
    for iteration in (5, 10, 15):
        one.reach(iteration)
    ended = one.end(0, LEFT)
    assert saved.iterations(one.run / "ckpt") == [10, 15]
    assert "removed checkpoints 5" in ended.stderr


def test_older_ones_go_while_the_training_runs(job: Callable[..., Job]) -> None:
    one = job("checkpoint.keep=2", "survive.hang_after=3")
    checkpoints = one.run / "ckpt"
    for iteration in (2, 3, 5):
        one.reach(iteration)
    watch = subprocess.Popen(**one.call("watch"))
    try:
        time.sleep(2)
        assert saved.iterations(checkpoints) == [2, 3, 5], "the training may be reading one of them"
        for iteration, left in ((10, [5, 10]), (15, [10, 15])):
            one.reach(iteration)
            saved.place(checkpoints, 20).mkdir(exist_ok=True)  # is being written
            until = time.monotonic() + 30
            while saved.iterations(checkpoints) != [*left, 20] and time.monotonic() < until:
                time.sleep(0.1)
            assert saved.iterations(checkpoints) == [*left, 20]
    finally:
        watch.terminate()
        said = watch.communicate(timeout=30)[1]
    assert "removed checkpoints 2, 3: 2 are kept" in said

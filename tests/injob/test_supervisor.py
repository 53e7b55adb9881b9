"""The supervisor alone: its decisions, records and calls of Slurm, with real files.

Slurm is a folder of small scripts on PATH that write down how they were called: what its answers lead to is tried on
a real one in tests/slurm.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import wait_for

from fp8launch.cluster.profile import Cluster
from fp8launch.injob.supervisor import checkpoints, hang_watchdog
from fp8launch.injob.supervisor.failures import ALL_WRITTEN, ending_of_attempt
from fp8launch.injob.supervisor.health_watch import Actions
from fp8launch.injob.supervisor.job_scheduler import JobScheduler
from fp8launch.injob.supervisor.slow_node import SlowNode, record_of, recorded_in
from fp8launch.job.prepared import prepare
from fp8launch.schedulers.slurm.slurm_scheduler import SlurmScheduler
from fp8launch.submit.new_run import plan_run
from fp8launch.submit.supervisor_plan import survival_text

SUPERVISOR = Path(checkpoints.__file__).with_name("supervisor.py")
SLURM = {
    "squeue": 'case "$*" in *%S*) echo "$TIMES" ;; *) cat "$FAKE_DIR/queue" ;; esac',
    "scontrol": 'case "$*" in *hostnames*) printf "node%s\\n" 1 2 ;; *) echo "${SHOWN-JobState=RUNNING}" ;; esac',
    "sbatch": """case "$* " in
        *--exclude=$IMPOSSIBLE*) echo "sbatch: error: $REFUSAL" >&2; exit 1 ;;
        *) echo 77 ;;
    esac""",
    "sinfo": 'printf "%b" "$NODES"',
    "srun": 'echo "oom_kill $MEMORY_KILLS"',
    "scancel": "true",
}


class Job:
    """A run folder, and the supervisor called in it as a job's batch script calls it."""

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
        job = plan_run(prepared, cluster, self.run, SlurmScheduler())
        text = survival_text(prepared, cluster, job, SlurmScheduler())
        assert text
        (self.run / "survive.json").write_text(text)

    def supervisor(self, what: str, name: str = "5-0", *rest: str, **env: str) -> subprocess.CompletedProcess[str]:
        call = self.call(what, name, *rest, **env)
        return subprocess.run(**call, stdout=subprocess.PIPE, timeout=180, check=False)

    def call(self, what: str, name: str = "5-0", *rest: str, **env: str) -> dict[str, Any]:
        """How a process of the supervisor is started."""
        hour = [time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + s)) for s in (0, 3600)]
        slurm = {"FAKE_DIR": str(self.bin), "TIMES": " ".join(hour), "SLURM_JOB_NODELIST": "node[1-2]"}
        slurm |= {"SLURM_NTASKS": "4", "SLURM_TASKS_PER_NODE": "2(x2)", "MEMORY_KILLS": "3"}
        slurm |= {"NODES": "", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_PARTITION": "main"}
        slurm |= {"IMPOSSIBLE": "nothing", "REFUSAL": "Requested node configuration is not available"}
        return {
            "args": [sys.executable, str(SUPERVISOR), what, str(self.run), str(self.run / "logs" / name), *rest],
            "env": {"PATH": f"{self.bin}:{os.environ['PATH']}", **slurm, **env},
            "stderr": subprocess.PIPE,
            "text": True,
        }

    def begin(self, name: str = "5-0", **env: str) -> subprocess.CompletedProcess[str]:
        return self.supervisor("begin", name, **env)

    def end(
        self, status: int, log: str = "", name: str = "5-0", srun: str = "", **env: str
    ) -> subprocess.CompletedProcess[str]:
        """End with that status; the training wrote `log`, and srun wrote `srun` among the batch script's words."""
        (self.run / "logs" / f"{name}.log").write_text(log)
        with (self.run / "logs" / "slurm-5.out").open("a") as file:
            file.write(srun)
        return self.supervisor("end", name, str(status), **env)

    def reach(self, iteration: int) -> None:
        """A checkpoint of one file, in the format of one file a rank."""
        folder = checkpoints.place(self.run / "ckpt", iteration)
        (folder / "mp_rank_00").mkdir(parents=True)
        empty_zip = b"PK\x05\x06" + bytes(18)
        (folder / "mp_rank_00" / "model_optim_rng.pt").write_bytes(empty_zip)
        checkpoints.point_at(self.run / "ckpt", iteration)

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
    """Slurm's times come from a controller whose clock differs by half an hour."""
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


GLOO = "0: RuntimeError: [gloo/x.cc:1] Connection closed by peer\n"
KILLED = "srun: error: node2: task 2: Killed\n"
TORCHRUN = "2: E1122 15:19:19.2 13 torch/distributed/elastic/x.py:1] failed (exitcode: -9) local_rank: 1 (pid: 15)\n"
PEER_FIRST = "srun: error: node1: tasks 0-1: Exited with exit code 1\n"
BY_SRUN = "srun: launch/slurm: _step_signal: Terminating StepId=5.0\n"
NODE = '{}: fp8launch-node: {{"node": "node{}", "rank": {}, "gpus": {{}}, "driver": null, "memory_kills": 2}}\n'
NODES = NODE.format(0, 1, 0) + NODE.format(2, 2, 2)


@pytest.mark.parametrize(
    ("log", "srun", "kills", "cause", "node"),
    [
        # A rank that was killed is the cause of what its peers report, and its node is not to blame.
        (GLOO, KILLED + BY_SRUN, 2, "killed", "node2"),
        (NODES + GLOO, KILLED + BY_SRUN, 2, "killed", "node2"),
        (NODES + GLOO, KILLED + BY_SRUN, 3, "host-out-of-memory", "node2"),
        # srun ends the step in the words of a cancellation, whichever file they reach first.
        (NODES + STEP_ENDED, KILLED + BY_SRUN, 3, "host-out-of-memory", "node2"),
        (STEP_ENDED + GLOO, KILLED + BY_SRUN, 2, "killed", "node2"),
        # torchrun's own line, where srun misses the torchrun of a peer first.
        (GLOO + TORCHRUN, "srun: error: node1: task 0: Exited with exit code 1\n" + BY_SRUN, 2, "killed", "node2"),
        (
            NODES + GLOO + TORCHRUN,
            "srun: error: node1: task 0: Exited with exit code 1\n" + BY_SRUN,
            3,
            "host-out-of-memory",
            "node2",
        ),
        (GLOO, "srun: error: node2: task 2: Exited with exit code 137\n", 2, "killed", "node2"),
        # srun reports the peer first, and ends the step before it reports the rank.
        (GLOO, PEER_FIRST + KILLED, 2, "killed", "node2"),
        (NODES + GLOO, PEER_FIRST + BY_SRUN + KILLED, 3, "host-out-of-memory", "node2"),
        (GLOO, PEER_FIRST + BY_SRUN + "srun: error: node2: tasks 2-3: Segmentation fault\n", 2, "segfault", "node2"),
        # A rank that was silent lived on, until srun ended the step. (The killed rank of a lost node does too.)
        (MISSED, PEER_FIRST + BY_SRUN + "srun: error: node2: task 3: Killed\n", 2, "network", "node2"),
        (GLOO, "srun: error: node2: task 2: Segmentation fault (core dumped)\n", 2, "segfault", "node2"),
        # Somebody who cancels the step makes srun wait, and kill what stays.
        (STEP_ENDED, "srun: Job step aborted: Waiting up to 32 seconds\n" + KILLED, 2, "cancelled", "node1"),
        # What is known of the training's own failure says more than how its process ended.
        (OOM, KILLED, 2, "out-of-memory", "node1"),
    ],
)
def test_a_rank_that_was_killed(
    job: Callable[..., Job], log: str, srun: str, kills: int, cause: str, node: str
) -> None:
    one = job("survive.attempts=3")
    one.begin()
    one.reach(10)
    ended = one.end(137, log, srun=srun, MEMORY_KILLS=str(kills))
    [attempt] = one.record["attempts"]
    assert (attempt["cause"], attempt["node"]) == (cause, node), ended.stderr
    if cause in ("killed", "host-out-of-memory", "segfault"):
        assert ended.returncode == 0 and "scontrol requeue 5" in one.calls
        assert one.record["excluded"] == []
    # `parse` reads the same files with the same classifier.
    log_file, batch = one.run / "logs" / "5-0.log", one.run / "logs" / "slurm-5.out"
    failure = ending_of_attempt(log_file.read_text(), batch.read_text()).failure
    assert failure and failure.code == cause


EXISTS = (
    "0: slurmstepd: error: pyxis: child 1436 failed with error code: 1\n"
    "0: slurmstepd: error: pyxis: failed to create container filesystem\n"
    "0: slurmstepd: error: pyxis: printing enroot log file:\n"
    "0: slurmstepd: error: pyxis:     [ERROR] File already exists: /var/lib/enroot/pyxis_336.0\n"
    "0: slurmstepd: error: pyxis: couldn't start container\n"
    "0: slurmstepd: error: spank: required plugin spank_pyxis.so: task_init() failed with rc=-1\n"
)


@pytest.mark.parametrize(
    ("enroot", "cause", "follows"),
    [
        ("[ERROR] File already exists: /var/lib/enroot/pyxis_336.0", "container-left", "new job"),
        ("[ERROR] No such file or directory: /images/gone.sqsh", "container", "stop"),
        ("[ERROR] Invalid image format: /images/text.sqsh", "container", "stop"),
        ("mkdir: cannot create directory: No space left on device", "container-disk-full", "exclude"),
        ("mkdir: cannot create directory '/local/run-1001': Permission denied", "container-unwritable", "exclude"),
        ("unsquashfs: Write on output file failed because No space left on device", "container-disk-full", "exclude"),
    ],
)
def test_a_container_that_does_not_start(job: Callable[..., Job], enroot: str, cause: str, follows: str) -> None:
    one = job("survive.attempts=3")
    one.begin()
    log = EXISTS.replace("[ERROR] File already exists: /var/lib/enroot/pyxis_336.0", enroot)
    ended = one.end(1, log, srun="srun: error: node1: task 0: Exited with exit code 1\n")
    [attempt] = one.record["attempts"]
    assert attempt["cause"] == cause, ended.stderr
    assert enroot in attempt["line"]
    assert "requeue" not in one.calls
    assert ("sbatch --parsable" in one.calls) == (follows != "stop")
    assert ("--exclude=node1" in one.calls) == (follows == "exclude")
    if follows == "new job":
        assert attempt["counts"] is False


@pytest.mark.parametrize("way", ["requeue", "dependency"])
def test_without_enough_other_nodes_the_bad_one_is_used_again(job: Callable[..., Job], way: str) -> None:
    one = job("survive.attempts=3", continue_by=way)
    one.begin()
    one.reach(10)
    ended = one.end(1, XID, IMPOSSIBLE="node2")
    assert ended.returncode == 0
    assert "node2 may be used again, because too few other nodes are left" in ended.stderr
    assert one.record["excluded"] == []
    assert one.record["stopped"] is None
    [attempt] = one.record["attempts"]
    assert "may be used again" in attempt["then"]
    if way == "requeue":
        assert "scontrol requeue 5" in one.calls
    else:
        assert "ExcNodeList=node2" not in one.calls and one.record["waiting"] == "77"


@pytest.mark.parametrize(
    ("nodes", "req", "waits"),
    [
        ("node1 idle\\nnode2 idle\\nnode3 drained\\n", "(null)", True),
        ("node1 idle\\nnode2 idle\\nnode3 draining\\n", "(null)", True),
        ("node1 idle\\nnode2 idle\\nnode3 down\\n", "(null)", False),
        ("node1 idle\\nnode2 idle\\nnode3 drained*\\n", "(null)", False),
        ("node1 drained\\nnode2 idle\\n", "(null)", False),
        # The job names its nodes: no other one can replace the bad one.
        ("node1 idle\\nnode2 idle\\nnode3 drained\\n", "node[1-2]", False),
    ],
)
def test_nodes_that_are_drained_for_a_while_are_waited_for(
    job: Callable[..., Job], nodes: str, req: str, waits: bool
) -> None:
    """`--test-only` refuses a job for drained nodes, sbatch accepts it."""
    one = job("survive.attempts=3", continue_by="dependency")
    one.begin()
    one.reach(10)
    ended = one.end(1, XID, IMPOSSIBLE="node2", NODES=nodes, SHOWN=f"JobState=RUNNING ReqNodeList={req}")
    assert ended.returncode == 0
    assert one.record["excluded"] == (["node2"] if waits else [])
    assert ("ExcNodeList=node2" in one.calls) == waits
    assert ("may wait for node3 rather than use node2" in ended.stderr) == waits


def test_the_newest_bad_node_stays_excluded_where_that_is_possible(job: Callable[..., Job]) -> None:
    one = job("survive.attempts=5")
    one.begin()
    one.reach(10)
    one.end(1, XID.replace("2: ", "0: "))
    assert one.record["excluded"] == ["node1"]
    one.begin("77-0")
    one.reach(15)
    ended = one.end(1, XID, "77-0", IMPOSSIBLE="node1,node2")
    assert "node1 may be used again" in ended.stderr
    assert one.record["excluded"] == ["node2"]


def test_slurms_other_refusals_are_no_reason_to_use_a_bad_node_again(job: Callable[..., Job]) -> None:
    one = job("survive.attempts=3")
    one.begin()
    one.reach(10)
    ended = one.end(1, XID, IMPOSSIBLE="node2", REFUSAL="Batch job submission failed: Invalid account")
    assert ended.returncode == 1
    assert one.record["excluded"] == ["node2"]
    assert "no further attempt could be submitted" in one.record["stopped"]


def test_a_run_that_trained_to_its_end_is_done_however_its_processes_ended(job: Callable[..., Job]) -> None:
    """No checkpoint of the last iteration is where the supervisor looks; the worker's own word is enough."""
    one = job("survive.attempts=3")
    one.begin()
    ended = one.end(137, f"[after training is done]\n0: {ALL_WRITTEN}\n{HANG}", srun=KILLED)
    assert ended.returncode == 0, ended.stderr
    assert one.record["finished"]


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
    assert (late.returncode, late.stdout) == (0, "") and "has continued" in late.stderr


@pytest.mark.parametrize("shown", ["fp8launch:run.1 FP8|/run/job.sbatch", "the site's|/run/job.sbatch fp8launch:run.1"])
def test_a_job_whose_answer_was_lost_is_found_by_its_key(job: Callable[..., Job], shown: str) -> None:
    one = job("survive.attempts=3", continue_by="dependency")
    (one.bin / "queue").write_text(f"66|{shown}\n65|fp8launch:other.1|/run/job.sbatch fp8launch:run.10\n")
    one.begin()
    assert one.record["waiting"] == "66"
    assert "sbatch" not in one.calls


def test_bytes_that_are_no_text_in_the_queue_do_not_end_the_run(job: Callable[..., Job]) -> None:
    one = job("survive.attempts=3", continue_by="dependency")
    (one.bin / "queue").write_bytes(b"65||/home/jos\xe9/job.sbatch\n")
    begun = one.begin()
    assert begun.returncode == 0, begun.stderr
    assert one.record["waiting"] == "77"


@pytest.mark.parametrize(
    ("words", "waiting"),
    [("Resource temporarily unavailable", "77"), ("Invalid account or account/partition combination specified", None)],
)
def test_a_slurm_without_room_for_one_more_job_is_asked_again(
    job: Callable[..., Job], words: str, waiting: str | None
) -> None:
    one = job("survive.attempts=3", continue_by="dependency")
    refuses_once = (
        f'[ -e "$FAKE_DIR/asked" ] || {{ touch "$FAKE_DIR/asked"; echo "sbatch: error: {words}" >&2; exit 1; }}'
    )
    script = one.bin / "sbatch"
    script.write_text(script.read_text().replace("case", f"{refuses_once}\ncase", 1))
    one.begin()
    assert one.record["waiting"] == waiting


def test_a_run_that_was_cancelled_does_not_begin(job: Callable[..., Job]) -> None:
    one = job("survive.attempts=3")
    (one.run / "cancelled").write_text("")
    begun = one.begin()
    assert (begun.returncode, begun.stdout) == (75, "")


def test_a_job_that_slurm_requeued_continues_from_the_checkpoint(job: Callable[..., Job]) -> None:
    one = job("survive.attempts=2")
    one.begin()
    one.reach(10)
    begun = one.begin("5-1")
    assert "from iteration 10" in begun.stderr
    first, second = one.record["attempts"]
    assert (first["cause"], first["counts"], first["after"]) == ("interrupted", False, 10)
    assert second["before"] == 10


def test_an_attempt_that_was_cut_off_ended_with_its_log_and_not_when_the_next_one_began(
    job: Callable[..., Job],
) -> None:
    one = job("survive.attempts=2")
    one.begin()
    log = one.run / "logs" / "5-0.log"
    log.write_text(" iteration 3/ 10 |")
    os.utime(log, (1_700_000_000, 1_700_000_000))
    one.begin("5-1")
    assert one.record["attempts"][0]["ended"] == 1_700_000_000


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        (
            "slurmstepd: error: *** STEP 5.0 ON n1 CANCELLED AT 2026-01-01T00:00:00 DUE TO NODE FAILURE ***",
            "node-lost",
        ),
        ("slurmstepd: error: *** JOB 5 ON n1 CANCELLED AT 2026-01-01T00:00:00 DUE TO PREEMPTION ***", "preempted"),
        ("", "interrupted"),
    ],
)
def test_why_slurm_started_a_job_again_is_in_its_own_words(job: Callable[..., Job], words: str, cause: str) -> None:
    one = job("survive.attempts=2")
    output = one.run / "logs" / "slurm-5.out"
    output.write_text("from an earlier time: DUE TO PREEMPTION\n")
    one.begin()
    with output.open("a") as file:
        file.write(words + "\n")
    one.begin("5-1")
    first = one.record["attempts"][0]
    assert (first["cause"], first["counts"]) == (cause, False)


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


def test_a_disk_that_refuses_writes_is_reported(job: Callable[..., Job]) -> None:
    one = job("survive.attempts=2")
    (one.run / ".attempts.json.new").mkdir()  # like a full disk: root cannot write it either
    begun = one.begin()
    assert (begun.returncode, begun.stdout) == (75, "")
    assert "the run stops here" in begun.stderr and "Traceback" not in begun.stderr


def test_a_run_that_trained_to_its_end_is_done_even_if_the_disk_refuses_writes(job: Callable[..., Job]) -> None:
    one = job("survive.attempts=2")
    one.begin()
    one.reach(20)
    (one.run / ".attempts.json.new").mkdir()
    ended = one.end(137, f"[after training is done]\n{HANG}")
    assert ended.returncode == 0 and "the training is done, but" in ended.stderr


NOT_LOADED = """0: torch.distributed.checkpoint.api.CheckpointException: CheckpointException ranks:dict_keys([0])
0: Traceback (most recent call last): (RANK 0)
0:   File "/opt/torch/distributed/checkpoint/filesystem.py", line 700, in read_data
0: {}
"""


@pytest.mark.parametrize(
    ("error", "cause", "newest"),
    [
        ("OSError: [Errno 5] Input/output error: '/scratch/ckpt/iter_0000010/__0_0.distcp'", "storage", 10),
        ("OSError: [Errno 116] Stale file handle", "storage", 10),
        ("PytorchStreamReader failed reading zip archive: failed finding central directory", "damaged-checkpoint", 5),
    ],
)
def test_a_checkpoint_is_not_set_aside_for_an_error_of_the_file_system(
    job: Callable[..., Job], error: str, cause: str, newest: int
) -> None:
    one = job("survive.attempts=3")
    began(one, 5, 10)
    one.end(0, LEFT)
    one.begin("5-1")
    ended = one.end(1, NOT_LOADED.format(error), "5-1")
    assert one.record["attempts"][-1]["cause"] == cause, ended.stderr
    assert checkpoints.latest(one.run / "ckpt") == newest


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace injects the errors")
def test_an_error_of_the_file_system_does_not_end_the_watch(job: Callable[..., Job]) -> None:
    """The tracker cannot be read for a while, which the training does not notice."""
    one = job("checkpoint.keep=2", "survive.hang_after=3")
    folder = one.run / "ckpt"
    for iteration in (2, 3, 5):
        one.reach(iteration)
    call = one.call("watch")
    script, rest = call["args"][1], call["args"][2:]
    # The pauses of minutes are shortened; all else is the supervisor's.
    code = (
        "import runpy, sys, time; pause = time.sleep; time.sleep = lambda seconds: pause(min(seconds, 0.2)); "
        f"sys.argv = {[script, *rest]!r}; runpy.run_path({script!r}, run_name='__main__')"
    )
    errors = ["-P", str(folder / checkpoints.TRACKER), "-e", "inject=openat:error=ESTALE:when=1..10"]
    call["args"] = ["strace", "-f", "-o", "/dev/null", *errors, sys.executable, "-c", code]
    watch = subprocess.Popen(**call, start_new_session=True)
    try:
        time.sleep(5)
        assert watch.poll() is None
        one.reach(10)
        wait_until(lambda: checkpoints.iterations(folder) == [5, 10])
    finally:
        os.killpg(watch.pid, signal.SIGTERM)
        said = watch.communicate(timeout=30)[1]
    assert "the watch over the training starts again" in said and "Traceback" not in said


def test_only_the_newest_checkpoints_are_kept(job: Callable[..., Job]) -> None:
    one = job("checkpoint.keep=2", "survive.attempts=2")
    one.begin()
    for iteration in (5, 10, 15):
        one.reach(iteration)
    ended = one.end(0, LEFT)
    assert checkpoints.iterations(one.run / "ckpt") == [10, 15]
    assert "removed checkpoints 5" in ended.stderr


def wait_until(condition: Callable[[], bool], seconds: float = 120) -> None:
    """However busy the machine is: only the condition counts."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def sleeps(pid: int) -> bool:
    """The process has set itself up (it catches SIGTERM), and waits."""
    status = Path(f"/proc/{pid}/status").read_text()
    caught = int(status.partition("SigCgt:")[2].split()[0], 16)
    return bool(caught >> (signal.SIGTERM - 1) & 1) and "State:\tS" in status


class Looked(Exception):
    """The hang watchdog has looked as often as the test lets it."""


def test_what_was_there_at_the_start_stays_until_a_newer_one_is_whole(
    job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The training may be reading one of them. Between two looks the test changes what there is."""
    one = job("checkpoint.keep=2")
    folder = one.run / "ckpt"
    for iteration in (2, 3, 5):
        one.reach(iteration)
    seen: list[list[int]] = []

    def between_looks(seconds: float) -> None:
        seen.append(checkpoints.iterations(folder))
        if len(seen) == 3:
            one.reach(10)
        if len(seen) == 5:
            raise Looked

    monkeypatch.setattr(hang_watchdog.time, "sleep", between_looks)
    with pytest.raises(Looked):
        scheduler = JobScheduler("5", one.run, {}, {})
        hang_watchdog.watch(one.run / "logs" / "5-0.log", folder, scheduler, None, 2, Actions.of_plan({}))
    assert seen == [[2, 3, 5], [2, 3, 5], [2, 3, 5], [5, 10], [5, 10]]


def test_older_ones_go_while_the_training_runs(job: Callable[..., Job]) -> None:
    one = job("checkpoint.keep=2", "survive.hang_after=3")
    folder = one.run / "ckpt"
    for iteration in (2, 3, 5):
        one.reach(iteration)
    watch = subprocess.Popen(**one.call("watch"))
    try:
        for iteration, left in ((10, [5, 10]), (15, [10, 15])):
            wait_until(lambda: sleeps(watch.pid))
            one.reach(iteration)
            checkpoints.place(folder, 20).mkdir(exist_ok=True)  # is being written
            wait_until(lambda left=left: checkpoints.iterations(folder) == [*left, 20])
    finally:
        watch.terminate()
        said = watch.communicate(timeout=30)[1]
    assert "removed checkpoints 2, 3: 2 are kept" in said


def test_a_plan_of_an_earlier_version_is_still_read(job: Callable[..., Job]) -> None:
    """Patterns travelled in it, and it knew fewer causes."""
    one = job("survive.attempts=3")
    plan = json.loads((one.run / "survive.json").read_text())
    plan.update(patterns=[["Traceback", "exception", 1]], needles=["Traceback"], harmless="x")
    plan["rules"] = {cause: rule for cause, rule in plan["rules"].items() if "container" not in cause}
    (one.run / "survive.json").write_text(json.dumps(plan))
    one.begin()
    one.reach(10)
    one.end(1, XID)
    assert one.record["attempts"][0]["cause"] == "gpu-failure"
    one.begin("77-0")
    one.end(1, EXISTS, "77-0")
    assert one.record["attempts"][1]["cause"] == "container-left"
    assert one.record["stopped"].startswith("container-left")  # as for any cause that the plan does not know


def test_a_way_to_continue_that_nobody_knows_starts_nothing(job: Callable[..., Job]) -> None:
    one = job("survive.attempts=3")
    plan = json.loads((one.run / "survive.json").read_text())
    (one.run / "survive.json").write_text(json.dumps({**plan, "continue_by": "carrier-pigeon"}))
    one.begin()
    one.reach(10)
    ended = one.end(0, LEFT)
    assert ended.returncode == 75 and "carrier-pigeon" in ended.stderr
    assert "sbatch" not in one.calls and "requeue" not in one.calls


@pytest.mark.parametrize("content", ["", "[]", "{"])
def test_damaged_records_end_in_a_sentence(job: Callable[..., Job], content: str) -> None:
    """A power cut leaves empty files; the job ended with a traceback."""
    one = job("survive.attempts=3")
    (one.run / "attempts.json").write_text(content)
    begun = one.begin()
    assert begun.returncode == 0 and "attempts.json is damaged" in begun.stderr
    (one.run / "survive.json").write_text(content)
    for done in (one.begin(), one.supervisor("unpickle", "5-0"), one.end(1)):
        assert done.returncode and "survive.json is damaged" in done.stderr and "Traceback" not in done.stderr
        assert f"`fp8launch submit {one.run} --set checkpoint.load=FOLDER`" in done.stderr


# As Megatron's rerun_state_machine.py words it.
NAN_STOP = "ERROR: Unexpected result nan on rank 0 at iteration #13 invocation #1 (message='NaN in the loss')\n"
REWIND = ("health.actions={nan: {rewind: 1}}", "health.max_rewinds=2")


def unhealthy(good: int | str, until: int, code: str = "nan") -> str:
    return f"fp8launch: unhealthy: {code}: good until {good}, suspect until {until}: the loss is NaN\n"


def began(one: Job, *saved: int) -> None:
    """Begin as the owner of the checkpoint folder, and save."""
    plan = json.loads((one.run / "survive.json").read_text())
    owner = {"run": "run", "recipe": "0" * 64, "created": "2026-11-24T00:00:00+00:00"}
    (one.run / "survive.json").write_text(json.dumps({**plan, "owner": owner}))
    one.begin()
    for iteration in saved:
        one.reach(iteration)


def folders(one: Job) -> list[str]:
    return sorted(folder.name for folder in (one.run / "ckpt").glob("iter_*"))


def test_a_rewind_goes_back_skips_batches_and_sets_newer_checkpoints_aside(job: Callable[..., Job]) -> None:
    one = job(*REWIND, "megatron.iterations_to_skip=[2, 13]")
    began(one, 5, 10, 15)
    done = one.end(137, unhealthy(12, 14))
    assert done.returncode == 0, done.stderr
    [first] = one.record["attempts"]
    assert (first["cause"], first["counts"], first["after"]) == ("rewind", False, 10)
    assert first["health"] == {
        "code": "nan", "message": "the loss is NaN", "good": 12, "until": 14, "rewound_to": 10, "skipped": [11, 14],
    }  # fmt: skip
    assert "back to checkpoint 10, the batches of iterations 11 to 14 are skipped" in first["then"]
    assert folders(one) == ["iter_0000005", "iter_0000010", "iter_0000015.unhealthy"]
    assert "scontrol requeue" in one.calls
    one.begin("5-1")
    assert one.record["attempts"][1]["before"] == 10
    assert one.supervisor("skip", "5-1").stdout == "--iterations-to-skip 11 12 13 14\n"


def test_two_checkpoints_back(job: Callable[..., Job]) -> None:
    one = job("health.actions={nan: {rewind: 2}}")
    began(one, 5, 10)
    one.end(137, unhealthy(12, 14))
    assert one.record["attempts"][0]["health"]["rewound_to"] == 5


def test_rewinds_are_used_up(job: Callable[..., Job]) -> None:
    one = job(*REWIND)
    began(one, 5)
    for restart in (1, 2):
        # Broken from the first line on.
        one.begin(f"5-{restart}")
        assert one.end(137, unhealthy("unknown", 5 + restart), f"5-{restart}").returncode == 0
    one.begin("5-3")
    assert one.end(137, unhealthy("unknown", 8), "5-3").returncode == 137
    causes = [attempt["cause"] for attempt in one.record["attempts"]]
    assert causes == ["interrupted", "rewind", "rewind", "unhealthy-training"]
    assert "health.max_rewinds 2 is used up" in one.record["stopped"]


def test_without_an_earlier_checkpoint_the_run_stops(job: Callable[..., Job]) -> None:
    one = job(*REWIND)
    began(one, 10)
    assert one.end(137, unhealthy(7, 8)).returncode == 137
    assert "there is no checkpoint of this run before it" in one.record["stopped"]
    assert folders(one) == ["iter_0000010"]


def test_a_stop_says_why_and_leaves_the_last_good_checkpoint(job: Callable[..., Job]) -> None:
    one = job("health.actions={nan: stop}", "survive.attempts=5")
    began(one, 5, 10)
    assert one.end(137, unhealthy(9, 10)).returncode == 137
    assert one.record["stopped"].startswith("unhealthy-training (the loss is NaN): `health.actions` stop the run")
    assert folders(one) == ["iter_0000005", "iter_0000010.unhealthy"]
    assert checkpoints.latest(one.run / "ckpt") == 5


def test_checkpoints_that_were_there_before_the_run_are_never_renamed(job: Callable[..., Job]) -> None:
    one = job(*REWIND)
    one.reach(5)
    one.reach(10)
    began(one)
    assert one.end(137, unhealthy(7, 8)).returncode == 137
    assert folders(one) == ["iter_0000005", "iter_0000010"]


def test_megatrons_own_check_for_nan_also_rewinds(job: Callable[..., Job]) -> None:
    one = job(*REWIND)
    began(one, 10)
    log = " iteration       12/      20 | lm loss: 1.0 |\n" + NAN_STOP
    assert one.end(1, log).returncode == 0
    assert one.record["attempts"][0]["health"]["skipped"] == [11, 13]
    assert one.record["attempts"][0]["cause"] == "rewind"


def test_without_actions_nothing_is_skipped(job: Callable[..., Job]) -> None:
    one = job()
    began(one, 10)
    assert one.supervisor("skip").stdout == ""
    assert one.end(1, NAN_STOP).returncode == 1
    assert one.record["attempts"][0]["cause"] == "nan"


SLOW = SlowNode("node2", 250.0, 2.5, 2.5, 1, 1.0, 101, 200, (12, 30))
ASKED = "0: [exiting program after receiving SIGTERM.] datetime: now\n"


def slowed(begin: int = 101, count: int = 60) -> str:
    """The log of 160 iterations that node2 slows from `begin` on."""
    lines = []
    for i in range(1, begin + count):
        late = i >= begin
        lines.append(f"0:  iteration {i:8d}/     500 | elapsed time per iteration (ms): {250.0 if late else 100.0} |")
        if i % 5 == 0:
            times = {"node1": 12.0 + i % 3 / 10, "node2": 30.0 if late else 12.5}
            lines.append("0: fp8launch-nodes: " + json.dumps({"v": 1, "first": i - 4, "last": i, "forward_ms": times}))
    return "\n".join(lines) + "\n"


def test_a_training_that_left_a_slow_node_continues_without_it(job: Callable[..., Job]) -> None:
    one = job("health.actions={slow-node: exclude}", "resources.nodes=2")
    one.begin()
    one.reach(10)
    done = one.end(0, slowed() + record_of(SLOW) + "\n" + ASKED)
    assert done.returncode == 0, done.stderr
    [first] = one.record["attempts"]
    assert (first["cause"], first["counts"], first["node"]) == ("slow-node", False, "node2")
    assert first["slow_node"] == {**SLOW.as_json(), "excluded": True}
    assert SLOW.sentence in first["then"] and "without node2, and this one does not count" in first["then"]
    assert "--comment=fp8launch:run.1 --exclude=node2" in one.calls
    # It is in use again, because there are no others.
    one.begin("77-0")
    one.reach(15)
    one.end(0, slowed() + LEFT, "77-0")
    assert "excluded" not in one.record["attempts"][1]["slow_node"]


@pytest.mark.parametrize("action", ["exclude", "exclude-later"])
def test_an_attempt_that_ended_for_another_reason_is_followed_by_one_without_the_slow_node(
    job: Callable[..., Job], action: str
) -> None:
    one = job(f"health.actions={{slow-node: {action}}}", "resources.nodes=2", "survive.attempts=3")
    one.begin()
    one.reach(10)
    one.end(0, slowed() + LEFT)
    [first] = one.record["attempts"]
    assert (first["cause"], first["counts"], first["slow_node"]["node"]) == ("time-limit", True, "node2")
    assert first["then"] == "time-limit: another attempt follows, 1 of 3 used; without node2, which was slow"
    assert one.record["excluded"] == ["node2"] and "--exclude=node2" in one.calls


def test_without_an_action_a_slow_node_is_only_recorded(job: Callable[..., Job]) -> None:
    one = job("resources.nodes=2", "survive.attempts=3")
    one.begin()
    one.reach(10)
    done = one.end(0, slowed() + LEFT)
    assert one.record["attempts"][0]["slow_node"]["node"] == "node2" and one.record["excluded"] == []
    assert "node2 slows the run from iteration 101 on" in done.stderr and "scontrol requeue 5" in one.calls


def test_a_node_that_is_not_of_this_job_is_not_blamed(job: Callable[..., Job]) -> None:
    one = job("health.actions={slow-node: exclude}", "resources.nodes=2", "survive.attempts=3")
    one.begin()
    one.reach(10)
    one.end(0, slowed().replace("node2", "node7") + LEFT)
    assert "slow_node" not in one.record["attempts"][0] and one.record["excluded"] == []


@pytest.mark.parametrize(
    ("nodes", "leaves"),
    [("node1 allocated\nnode3 idle\n", True), ("node1 allocated\nnode3 allocated\nnode4 idle~\n", False), ("", False)],
)
def test_a_training_leaves_a_slow_node_only_for_an_idle_one(job: Callable[..., Job], nodes: str, leaves: bool) -> None:
    one = job("health.actions={slow-node: exclude}", "resources.nodes=2")
    one.begin()
    (one.bin / "squeue").write_text("#!/bin/sh\necho 5.batch 5.0\n")
    log = one.run / "logs" / "5-0.log"
    log.write_text(slowed(count=200))
    watch = subprocess.Popen(**one.call("watch", NODES=nodes), stdout=subprocess.PIPE)
    try:
        wait_for(lambda: ("scancel --signal=TERM 5.0" if leaves else "sinfo -h") in one.calls)
        recorded = recorded_in(log.read_text())
        assert (recorded is not None and recorded.node == "node2") == leaves
        assert ("scancel" in one.calls) == leaves
    finally:
        watch.kill()
        watch.communicate()

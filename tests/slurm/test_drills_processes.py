"""Drills on the processes of a run: one that hangs, one that is killed, a save that is cut off, clocks that differ."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from cluster.processes import until
from drilling import ITERATIONS, Chain, row
from launching import sets

from fp8launch.injob.supervisor import checkpoints

pytestmark = [pytest.mark.train, pytest.mark.slow, pytest.mark.drill]

MEMORY = Path("/sys/fs/cgroup/memory")

SLOW = """
import os, time
from fp8launch.injob.rank import pretrain
from megatron.training import training

save = training.save_checkpoint_and_time

def slowly(iteration, *rest, **named):
    folder = f"ckpt/iter_{iteration:07d}"
    for part in range(25 if iteration == 20 else 0):
        os.makedirs(folder, exist_ok=True)
        with open(f"{folder}/part", "a") as file:
            file.write("x" * 1000)
        time.sleep(2)
    return save(iteration, *rest, **named)

if __name__ == "__main__":  # the checkpoint's helpers import this file too
    time.sleep(40)
    training.save_checkpoint_and_time = slowly
    pretrain.main(time.time())
"""


def finished(one: Chain, seconds: float = 240) -> None:
    assert one.over(seconds)["state"] == "completed"
    report = one.site.json("parse", one.run)
    assert (report["status"], report["iterations"]) == ("ok", ITERATIONS)


@pytest.mark.parametrize("mode", ["srun", "torchrun"])
def test_a_rank_that_hangs(chain: Callable[..., Chain], mode: str) -> None:
    hang = sets("survive.hang_after=30", f"launch.mode={mode}", "resources.gpus_per_node=1")
    one = chain("--attempts", "3", "--nodes", "2", *hang)
    one.trained(40)
    bad = int(one.record["attempts"][0]["nodes"][-2])  # node[1-2]
    [rank] = one.ranks(bad)
    os.kill(rank.pid, signal.SIGSTOP)
    one.reaches(lambda: "ended" in one.record["attempts"][0], 150)
    first = one.record["attempts"][0]
    assert (first["cause"], first["node"]) == ("hang", f"node{bad}")
    told = rf"has not grown for \d+ s since iteration \d+; rank 0 in \w+ \(.*; no stack from rank 1 on node{bad}"
    assert re.search(told, first["line"])
    assert "0: Stack (most recent call first)" in one.logs()[0].read_text().replace("[rank0]: ", "")
    finished(one)
    assert f"node{bad}" not in one.site.slurm.run("sacct", "-X", "-n", "-P", "-o", "NodeList").stdout.splitlines()[-1]
    row(f"a rank stopped by SIGSTOP, {mode}, `hang_after: 30`", one, first["line"].partition("fp8launch: ")[2])


def test_a_bad_node_that_no_other_one_can_replace(chain: Callable[..., Chain]) -> None:
    """The profile names the only node: Slurm takes no job without it, so the run continues there, and says so."""
    one = chain(
        "--attempts", "3", *sets("survive.hang_after=30", "resources.gpus_per_node=2"), profile="nodelist: node1\n"
    )
    one.trained(40)
    os.kill(one.ranks(1)[-1].pid, signal.SIGSTOP)
    one.reaches(lambda: "ended" in one.record["attempts"][0], 150)
    first = one.record["attempts"][0]
    assert (first["cause"], first["node"]) == ("hang", "node1")
    assert "node1 may be used again, because too few other nodes are left" in first["then"]
    finished(one)
    assert one.record["excluded"] == []
    row("a rank stopped by SIGSTOP on the only node", one, first["then"])


def test_a_slow_start_and_a_slow_save_are_no_hang(chain: Callable[..., Chain], tmp_path: Path) -> None:
    """A start of 40 s and a save of 50 s, where 30 s of silence are a hang; the save still writes."""
    script = tmp_path / "slow.py"
    script.write_text(SLOW)
    one = chain("--attempts", "2", *sets("survive.hang_after=30", f"launch.script={script}"))
    state = one.over(240)
    assert (state["state"], len(one.record["attempts"])) == ("completed", 1), one.said
    row("start-up of 40 s and a save of 50 s, `hang_after: 30`", one, "nothing: neither is a hang")


def test_a_rank_that_the_kernel_kills_for_its_memory(chain: Callable[..., Chain]) -> None:
    one = chain("--attempts", "2", profile="nodelist: node1\n")
    one.trained(40)
    [rank] = one.ranks(1)
    real = _kill_for_memory(rank.pid)
    finished(one)
    first = one.record["attempts"][0]
    assert first["cause"] == ("host-out-of-memory" if real else "killed")
    how = "killed by the kernel for its memory (cgroup)" if real else "killed with SIGKILL, as for its memory"
    row(f"a rank {how}", one, first["then"])


def _kill_for_memory(pid: int) -> bool:
    """A real kill for memory where this machine has the cgroup for it, else its signal. True for a real one."""
    group = MEMORY / f"fp8drill-{pid}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text("1M")  # of what it takes from now on
        (group / "cgroup.procs").write_text(str(pid))
    except OSError:
        pass
    until(lambda: not Path(f"/proc/{pid}").exists(), 15)
    kills = group / "memory.oom_control"
    real = kills.is_file() and "oom_kill 0" not in kills.read_text() and not Path(f"/proc/{pid}").exists()
    if Path(f"/proc/{pid}").exists():
        os.kill(pid, signal.SIGKILL)
        time.sleep(1)
    if group.is_dir():
        group.rmdir()
    return real


def test_power_cut_in_the_middle_of_a_save(chain: Callable[..., Chain]) -> None:
    """The node's processes stop at the moment when the checkpoint's folder appears, and are gone a moment later."""
    one = chain("--attempts", "3")
    one.trained(40)
    node = int(one.record["attempts"][0]["nodes"][-1])
    [rank] = one.ranks(node)
    folder, end = checkpoints.place(one.saves, _next_save(one)), time.monotonic() + 60
    while not any(folder.glob("*")):
        assert time.monotonic() < end
        if folder.parent.stat().st_mtime and one.checkpoint >= int(folder.name[5:]):  # too late: the one after
            folder = checkpoints.place(one.saves, _next_save(one))
    os.killpg(os.getpgid(rank.pid), signal.SIGSTOP)
    one.site.slurm.kill_node(node)
    cut = int(folder.name[5:])
    torn, tracked = checkpoints.torn(folder), one.checkpoint
    assert tracked == cut - 20 and torn is not None
    finished(one)
    later = one.record["attempts"][1:]
    assert later and later[0]["before"] == tracked
    row("power cut during a save", one, f"{one.record['attempts'][0]['then']}; from iteration {tracked}")


def _next_save(one: Chain) -> int:
    return one.checkpoint + 20


@pytest.mark.parametrize("ahead", [1800, -1800])
def test_clock_skew(chain: Callable[..., Chain], ahead: int) -> None:
    """The node's clock is half an hour off Slurm's, the time limit is two minutes: the run reaches it, and goes on.

    Python's sleep does not work under Debian's libfaketime, so Slurm's times are moved instead, as the variables in
    which Slurm 23 gives them to a job.
    """
    times = f"SLURM_JOB_START_TIME=$(($(date +%s) - {ahead})) SLURM_JOB_END_TIME=$(($(date +%s) - {ahead} + 120))"
    limit = sets("resources.time=2", "survive.stop_before=30", "train.iterations=100000")
    one = chain("--attempts", "2", *limit, profile=f"setup: ['export {times}']\n")
    one.reaches(lambda: one.record["attempts"] and "ended" in one.record["attempts"][0], 240)
    first = one.record["attempts"][0]
    assert first["cause"] == "time-limit"
    assert 45 < first["ended"] - first["began"] < 120
    words = next(line for line in one.said.splitlines() if "clock is" in line).partition("fp8launch: ")[2]
    assert one.site.run("cancel", one.run).returncode == 0
    row(f"a node's clock 30 minutes {'ahead of' if ahead > 0 else 'behind'} Slurm's", one, words)


def test_a_peer_that_all_others_miss(chain: Callable[..., Chain]) -> None:
    """Collectives time out after a minute, long before silence is a hang; the peers' nodes are not to blame."""
    one = chain("--attempts", "3", "--nodes", "3", *sets("megatron.distributed_timeout_minutes=1", "batch.global=12"))
    one.trained(40)
    node = int(one.record["attempts"][0]["nodes"][-2])
    [rank] = one.ranks(node)
    os.kill(rank.pid, signal.SIGSTOP)
    one.reaches(lambda: "ended" in one.record["attempts"][0], 150)
    first = one.record["attempts"][0]
    assert first["cause"] == "network", first
    # Slurm wakes the stopped rank before it kills it, and it may then say the same as the others.
    assert first["node"] in (None, f"node{node}")
    one.site.run("cancel", one.run)
    row("a rank that all others wait for until gloo's timeout", one, first["then"])


def test_a_killed_rank_whose_peer_is_reported_first(chain: Callable[..., Chain]) -> None:
    """A slow slurmstepd: srun has reported the peer and ended the step when it hears of the rank that was killed."""
    one = chain("--attempts", "3", "--nodes", "2", *sets("resources.gpus_per_node=1"))
    one.trained(40)
    node = int(one.record["attempts"][0]["nodes"][-2])  # node[1-2]
    [rank] = one.ranks(node)
    steps = [
        process
        for process in one.site.slurm.processes(f"node{node}")
        if Path(f"/proc/{process.pid}/cmdline").read_bytes().startswith(f"slurmstepd: [{one.job}.0]".encode())
    ]
    assert steps
    for step in steps:
        os.kill(step.pid, signal.SIGSTOP)
    os.kill(rank.pid, signal.SIGKILL)
    try:
        one.reaches(lambda: "Terminating StepId" in one.said, 60)
    finally:
        for step in steps:
            os.kill(step.pid, signal.SIGCONT)
    finished(one)
    first = one.record["attempts"][0]
    assert (first["cause"], first["node"]) == ("killed", f"node{node}"), first
    assert one.record["excluded"] == []
    row("a rank killed with SIGKILL, srun reports its peer first", one, first["then"])

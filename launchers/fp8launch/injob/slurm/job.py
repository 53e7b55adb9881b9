"""A Slurm job, seen from inside: its state, from Slurm's commands and the job's variables, and changes to it."""
# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from pathlib import Path

from fp8launch.injob.slurm.commands import ask, slurm, will_pass
from fp8launch.injob.supervisor.job_scheduler import JobScheduler, State, Submitted, Training
from fp8launch.injob.supervisor.log_lines import say

CLOCKS_AGREE, SLOW_START = 5, 600  # seconds; a prolog may delay the batch script
# sbatch's errors for a job that no nodes can run. If the nodes are only busy or down, it accepts the job, which waits.
_IMPOSSIBLE = (
    "Requested node configuration is not available",
    "Invalid node name specified",
    "Node count specification invalid",
    "Requested nodes are unavailable",
    "More nodes requested than",
)
# States in which sinfo shows nodes that an administrator took out of service for a while.
_COME_BACK = ("drain", "maint", "reboot", "reserved")
_STATE_CAUSES = {
    "CANCELLED": "cancelled",
    "TIMEOUT": "time-limit",
    "PREEMPTED": "preempted",
    "NODE_FAIL": "node-lost",
    "OUT_OF_MEMORY": "host-out-of-memory",
}
_STEP_DAEMON = re.compile(r"slurmstepd-([\w.-]{1,255}): ")
# srun's own errors, in the output of the batch script, name the node of the first process that failed.
_NODE_FAILED = re.compile(r"srun: error: ([\w.-]{1,255}): tasks? [\d,-]{1,200}: (?!Terminated)")


def is_impossible(complaint: str) -> bool:
    """Return whether Slurm says that no nodes of this cluster, free or not, can run the job."""
    return any(words in complaint for words in _IMPOSSIBLE)


class SlurmTraining(Training):
    def __init__(self, steps: Sequence[str]) -> None:
        self.steps = steps

    def ask_for_stacks(self) -> None:
        slurm("scancel", "--signal=USR1", *self.steps)

    def ask_to_save(self) -> bool:
        return slurm("scancel", "--signal=TERM", *self.steps) is not None

    def end(self, at_once: bool = False) -> bool:
        options = ("--signal=KILL",) if at_once else ()
        return slurm("scancel", *options, *self.steps) is not None


class SlurmJob(JobScheduler):
    def state(self) -> State:
        shown = self._show(self.job)
        # If Slurm, not the training, ends the job, nothing may be started from here: that could bring back a job that
        # somebody cancelled. In the grace time of a preemption the job still runs.
        word = _state_word(shown)
        return State(word not in (None, "RUNNING"), re.search(r"PreemptTime=\d", shown) is not None)

    def end_time(self) -> float | None:
        # Slurm's times come from the controller's clock, and this node's may differ.
        now = time.time()
        times = self._start_and_end()
        if times is None:
            return None
        began, ends = times
        if began - CLOCKS_AGREE < now < began + SLOW_START:
            return ends
        say(f"this node's clock is {now - began:+.0f} s from Slurm's: the time limit is counted from now")
        return now + ends - began

    def _start_and_end(self) -> tuple[float, float] | None:
        """Return Slurm's times for this job; None for an unlimited one, or if Slurm does not answer."""
        start, end = self.env.get("SLURM_JOB_START_TIME", ""), self.env.get("SLURM_JOB_END_TIME", "")  # since Slurm 23
        if start.isdigit() and end.isdigit():
            return float(start), float(end)
        answer = (slurm("squeue", "-h", "-j", self.job, "-o", "%S %e") or "").split()
        try:
            began, ends = (time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S")) for text in answer)
        except ValueError:
            return None
        return began, ends

    def node_list(self) -> str:
        return self.env.get("SLURM_JOB_NODELIST", "")

    def hosts(self) -> list[str]:
        return (slurm("scontrol", "show", "hostnames", self.node_list(), tries=1) or "").split()

    def tasks(self) -> int:
        return int(self.env.get("SLURM_NTASKS") or 0)

    def nodes_of(self, tasks: Sequence[int]) -> list[str]:
        if not tasks:
            return []
        hosts = (slurm("scontrol", "show", "hostnames", self.node_list()) or "").split()
        each = re.match(r"\d{1,9}", self.env.get("SLURM_TASKS_PER_NODE", ""))
        if not hosts or not each:
            return []
        # The tasks of the training step fill the nodes in order.
        numbers = sorted({task // int(each.group(0)) for task in tasks})
        return [hosts[number] for number in numbers if number < len(hosts)]

    def training(self) -> SlurmTraining | None:
        answer = slurm("squeue", "-h", "-s", "-j", self.job, "-o", "%i") or ""
        # Slurm's own steps, such as the batch script, have names instead of numbers.
        steps = tuple(step for step in answer.split() if step.split(".")[-1].isdigit())
        return SlurmTraining(steps) if steps else None

    def read_on(self, node: str, file: str) -> str:
        step = ("srun", f"--jobid={self.env.get('SLURM_JOB_ID', self.job)}", "--overlap", "--nodes=1", "--ntasks=1")
        return slurm(*step, f"--nodelist={node}", "cat", file, tries=1) or ""

    def how_ended(self, job: str) -> str | None:
        return _STATE_CAUSES.get(_state_word(self._show(job)) or "")

    def node_in_message(self, line: str) -> str | None:
        daemon = _STEP_DAEMON.search(line)
        return daemon.group(1) if daemon else None

    def node_that_failed(self, output: str) -> str | None:
        missed = _NODE_FAILED.search(output)
        return missed.group(1) if missed else None

    def restart(self) -> bool:
        # From here on Slurm may end this script at any moment.
        if slurm("scontrol", "requeue", self.job) is not None:
            return True
        say("this site does not requeue jobs; submitting another job")
        return False

    def submit_next(self, key: str, exclude: Sequence[str]) -> Submitted:
        key = f"fp8launch:{key}"
        queue = slurm("squeue", "-h", "-o", "%i|%k|%o", "-u", str(os.getuid()))
        if queue is None:
            return Submitted(None)  # the job may have been submitted, so it is not submitted again
        job = _job_with_key(queue, key)
        if job is not None:
            return Submitted(job)
        comment = f"{key} {self.plan.get('comment', '')}".rstrip()
        options = ["--parsable", f"--dependency=afterany:{self.job}", f"--comment={comment}"]
        answer = ask("sbatch", *options, *_exclude(exclude), self._script, key, tries=1)
        if answer.output is not None:
            return Submitted(answer.output.strip().partition(";")[0])
        return Submitted(None, is_impossible(answer.complaint), will_pass(answer.complaint))

    def exclude(self, job: str, nodes: Sequence[str]) -> None:
        slurm("scontrol", "update", f"JobId={job}", f"ExcNodeList={','.join(nodes)}")

    def can_run_without(self, nodes: Sequence[str]) -> bool:
        answer = ask("sbatch", "--test-only", *_exclude(nodes), self._script, tries=1)
        return not is_impossible(answer.complaint) or self._can_wait_without(nodes)

    def _can_wait_without(self, nodes: Sequence[str]) -> bool:
        """Return whether enough other nodes are left, counting nodes that are only drained, reserved or rebooting.

        `sbatch --test-only` does not count these, but sbatch accepts a job that has to wait for them.
        """
        needed = self.env.get("SLURM_JOB_NUM_NODES", "")
        if not needed.isdigit() or "ReqNodeList=(null)" not in self._show(self.job, tries=1):
            return False
        partition = self.env.get("SLURM_JOB_PARTITION", "")
        shown = slurm("sinfo", "-h", "-N", "-p", partition, "-o", "%N %T", tries=1) or ""
        others = dict(line.split(" ", 1) for line in shown.splitlines() if line.split(" ", 1)[0] not in nodes)
        # A trailing * marks a node that does not respond, and a down node may never come back.
        usable = [node for node, state in others.items() if not state.startswith(("down", "fail")) and "*" not in state]
        away = [node for node in usable if others[node].startswith(_COME_BACK)]
        if not away or len(usable) < int(needed):
            return False
        say(f"the next attempt may wait for {', '.join(away)} rather than use {', '.join(nodes)} again")
        return True

    def has_free_node(self, excluded: Sequence[str]) -> bool:
        partition = self.env.get("SLURM_JOB_PARTITION", "")
        shown = slurm("sinfo", "-h", "-N", "-p", partition, "-t", "idle", "-o", "%N %T", tries=1) or ""
        idle = {line.split(" ", 1)[0] for line in shown.splitlines() if line.endswith(" idle")}
        return bool(idle.difference(excluded))

    def cancel(self, job: str) -> None:
        slurm("scancel", job)

    def release(self, folder: Path, job: str | None) -> bool:
        return job is not None and slurm("scontrol", "release", job) is not None

    def _show(self, job: str, **options: int) -> str:
        return slurm("scontrol", "show", "job", job, **options) or ""

    @property
    def _script(self) -> str:
        return str(self.folder / "job.sbatch")


def _state_word(shown: str) -> str | None:
    state = re.search(r"JobState=(\w+)", shown)
    return state.group(1) if state else None


def _exclude(nodes: Sequence[str]) -> list[str]:
    return [f"--exclude={','.join(nodes)}"] if nodes else []


def _job_with_key(queue: str, key: str) -> str | None:
    """Return the job whose comment or command has this key; sites may replace comments."""
    for line in queue.splitlines():
        job, _, rest = line.partition("|")
        if key in rest.replace("|", " ").split():
            return job
    return None

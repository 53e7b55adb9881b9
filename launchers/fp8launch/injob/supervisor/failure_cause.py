"""Why an attempt ended: from the training's words, its exit status, and what Slurm says of the job.

Standard library only, on any Python from 3.7: this runs on a compute node's own Python, outside the image.
"""
# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from fp8launch.injob.supervisor import hang_watchdog
from fp8launch.injob.supervisor.attempt_log import Run
from fp8launch.injob.supervisor.failure_pattern import STEP_CANCELLED
from fp8launch.injob.supervisor.failures import Failure, ending_of_attempt, failures_of
from fp8launch.injob.supervisor.slurm_cli import slurm, tail

REPORTED_BY_PEERS = ("nccl", "network")
_UNHEALTHY = re.compile(r"^([\w.-]{1,255}): bad: ", re.M)
# As rank/node_info.py prints it: the node, and how often its kernel had killed a process for memory by then.
_NODE_LINE = re.compile(r'fp8launch-node: {"node": "([\w.-]{1,255})"[^\n]{0,2000}?"memory_kills": (\d{1,18})')
_TASK_LABEL = re.compile(r"\s{0,20}(\d{1,9}): ?")
_STEP_DAEMON = re.compile(r"slurmstepd-([\w.-]{1,255}): ")
# srun's own lines (its errors are those of the batch script) name the node of the first process that failed.
_NODE_FAILED = re.compile(r"srun: error: ([\w.-]{1,255}): tasks? [\d,-]{1,200}: (?!Terminated)")
_STATE_CAUSES = {
    "CANCELLED": "cancelled",
    "TIMEOUT": "time-limit",
    "PREEMPTED": "preempted",
    "NODE_FAIL": "node-lost",
    "OUT_OF_MEMORY": "host-out-of-memory",
}


class Cause(NamedTuple):
    """Why an attempt ended: the cause's code, the node where it was seen, and the line that reported it.

    `whole` says that the training came to its end and has written everything.
    """

    code: str
    node: str | None = None
    line: str | None = None
    whole: bool = False


def cause_of_cut_off(run: Run, attempt: Mapping[str, Any]) -> str:
    """The cause of an end that the attempt's own script did not see."""
    said = tail(run.batch_output(attempt["job"]), attempt.get("said", 0))
    text = said + tail(run.folder / "logs" / f"{attempt['name']}.log")
    if attempt["job"] == run.job:
        # Slurm itself started this job again.
        if "DUE TO PREEMPTION" in text:
            return "preempted"
        if "DUE TO NODE FAIL" in text:
            return "node-lost"
        return "interrupted"
    shown = slurm("scontrol", "show", "job", attempt["job"]) or ""
    state = re.search(r"JobState=(\w+)", shown)
    if state is None:
        return "interrupted"
    return _STATE_CAUSES.get(state.group(1), "interrupted")


def cause_of_end(run: Run, status: int, shown: str) -> Cause:
    """Why the training left before it was done; `shown` is what Slurm says of the job."""
    log = tail(run.log)
    # Slurm appends the words of a job that it starts again.
    batch_output = tail(run.batch_output(run.job), run.attempts[-1].get("said", 0))
    ending = ending_of_attempt(log, batch_output)
    failure = ending.failure
    if failure is not None and failure.code == "hang":
        return Cause("hang", hang_watchdog.hung_nodes(failure.source), failure.source)
    if ending.exit_line is not None:
        # It has saved by then. A last SIGTERM may still hit it on its way out, and the exit status says nothing.
        return Cause(_asked_to_leave(ending.exit_line, run, shown))
    if ending.whole or (ending.finished and status == 0):
        return Cause("finished", whole=ending.whole)
    if status == 0 or failure is None:
        return Cause("unknown")
    if failure.code in ("cancelled", STEP_CANCELLED):
        return _cancelled(failure, batch_output, run, shown)
    node = _node_to_blame(failure, log, batch_output, run)
    if failure.code == "killed" and node is not None:
        line = memory_kill_on(node, log, run)
        if line is not None:
            return Cause("host-out-of-memory", node, line)
    return Cause(failure.code, node, failure.source)


def _asked_to_leave(exit_line: str, run: Run, shown: str) -> str:
    """Megatron's reason for leaving: its last iteration for now, a signal, or the time."""
    if "at iteration" in exit_line:
        return "finished"  # as far as it was asked to train
    if "after receiving" in exit_line:
        return who_asked(run, shown)
    return "time-limit"


def _cancelled(failure: Failure, batch_output: str, run: Run, shown: str) -> Cause:
    """The step was cancelled, before the training could answer, while the job runs."""
    asked = who_asked(run, shown)
    if asked != "signal":
        return Cause(asked, None, failure.source)
    return Cause("cancelled", node_of(failure.source, batch_output, run.env), failure.source)


def memory_kill_on(node: str, log: str, run: Run) -> str | None:
    """A line for the log where the kernel of a node has killed processes for memory since the training began there.

    The kernel reports it only in its own log, which users may not read; its counters are readable by all.
    """
    before = None
    for found in _NODE_LINE.finditer(log):
        if found.group(1) == node:
            before = int(found.group(2))
    if before is None:
        return None
    step = ("srun", f"--jobid={run.env.get('SLURM_JOB_ID', run.job)}", "--overlap", "--nodes=1", "--ntasks=1")
    counters = slurm(*step, f"--nodelist={node}", "cat", "/proc/vmstat", tries=1) or ""
    now = re.search(r"^oom_kill (\d{1,18})$", counters, re.M)
    if now is None or int(now.group(1)) <= before:
        return None
    count = int(now.group(1)) - before
    words = f"{count} processes were"
    if count == 1:
        words = "1 process was"
    line = f"fp8launch: host-out-of-memory: {words} killed by the kernel of {node}, for its memory"
    with contextlib.suppress(OSError), run.log.open("a") as file:
        file.write(line + "\n")
    return line


def _node_to_blame(failure: Failure, log: str, batch_output: str, run: Run) -> str | None:
    if failure.code == "unhealthy-node":
        return ",".join(_UNHEALTHY.findall(log)) or None
    if failure.code in REPORTED_BY_PEERS:
        return node_of_silence(log, run)
    return node_of(failure.source, batch_output, run.env)


def who_asked(run: Run, shown: str) -> str:
    """Why Slurm has sent SIGTERM to the training while the job runs on."""
    # In the grace time of a preemption the job still runs, and its end has moved to where that ends.
    if re.search(r"PreemptTime=\d", shown):
        return "preempted"
    time_is_up = time.time() > run.attempts[-1].get("until", 0) - run.plan["stop_before"] - 60
    return "time-limit" if time_is_up else "signal"


def node_of(line: str, batch_output: str, env: Mapping[str, str]) -> str | None:
    """The node of the process that printed a line, else the one whose process srun missed first."""
    daemon = _STEP_DAEMON.search(line)
    if daemon:
        return daemon.group(1)
    label = _TASK_LABEL.match(line)
    if label:
        nodes = hang_watchdog.nodes_of([int(label.group(1))], env)
        if nodes:
            return nodes[0]
    missed = _NODE_FAILED.search(line) or _NODE_FAILED.search(batch_output)
    return missed.group(1) if missed else None


def node_of_silence(log: str, run: Run) -> str | None:
    """The node whose processes alone did not miss a peer: the peer that all others miss is there."""
    reported = set()
    for code, source in failures_of(log):
        label = _TASK_LABEL.match(source)
        if code in REPORTED_BY_PEERS and label:
            reported.add(int(label.group(1)))
    everybody = set(range(int(run.env.get("SLURM_NTASKS") or 0)))
    nodes = hang_watchdog.nodes_of(sorted(everybody - reported), run.env)
    return nodes[0] if len(nodes) == 1 else None

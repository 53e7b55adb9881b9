"""Find out why an attempt ended, from its log, its exit status, and the scheduler's report on the job."""
# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from fp8launch.injob.supervisor import hang_watchdog
from fp8launch.injob.supervisor.attempt_log import Run, batch_output
from fp8launch.injob.supervisor.failure_patterns import STEP_CANCELLED
from fp8launch.injob.supervisor.failures import Failure, ending_of_attempt, failures_of
from fp8launch.injob.supervisor.log_lines import tail

REPORTED_BY_PEERS = ("nccl", "network")
_UNHEALTHY = re.compile(r"^([\w.-]{1,255}): bad: ", re.M)
# As rank/node_info.py prints it: the node, and how often its kernel had killed a process for memory by then.
_NODE_LINE = re.compile(r'fp8launch-node: {"node": "([\w.-]{1,255})"[^\n]{0,2000}?"memory_kills": (\d{1,18})')
_TASK_LABEL = re.compile(r"\s{0,20}(\d{1,9}): ?")


class Cause(NamedTuple):
    """Why an attempt ended: the cause's code, the node where it was seen, and the line that reported it.

    `whole`: the training reached its end and has written everything.
    """

    code: str
    node: str | None = None
    line: str | None = None
    whole: bool = False


def cause_of_cut_off(run: Run, attempt: Mapping[str, Any]) -> str:
    """Return why an attempt ended whose own script did not see the end."""
    said = tail(batch_output(run.folder, attempt["job"]), attempt.get("said", 0))
    text = said + tail(run.folder / "logs" / f"{attempt['name']}.log")
    if attempt["job"] == run.job:
        # The scheduler itself started this job again.
        if "DUE TO PREEMPTION" in text:
            return "preempted"
        if "DUE TO NODE FAIL" in text:
            return "node-lost"
        return "interrupted"
    return run.scheduler.how_ended(attempt["job"]) or "interrupted"


def cause_of_end(run: Run, status: int, preempted: bool) -> Cause:
    """Return why the training ended before it was done. `preempted`: the scheduler reports a preemption."""
    log = tail(run.log)
    # A job that starts again appends to its output.
    output = tail(batch_output(run.folder, run.job), run.attempts[-1].get("said", 0))
    ending = ending_of_attempt(log, output)
    failure = ending.failure
    if failure is not None and failure.code == "hang":
        return Cause("hang", hang_watchdog.hung_nodes(failure.source), failure.source)
    if ending.exit_line is not None:
        # It has saved by then. A last SIGTERM may still hit it as it exits, so the exit status says nothing.
        return Cause(_asked_to_leave(ending.exit_line, run, preempted))
    if ending.whole or (ending.finished and status == 0):
        return Cause("finished", whole=ending.whole)
    if status == 0 or failure is None:
        return Cause("unknown")
    if failure.code in ("cancelled", STEP_CANCELLED):
        # The step was cancelled while the job runs, before the training could react.
        asked = who_asked(run, preempted)
        if asked != "signal":
            return Cause(asked, None, failure.source)
        return Cause("cancelled", node_of(failure.source, output, run), failure.source)
    node = _node_to_blame(failure, log, output, run)
    if failure.code == "killed" and node is not None:
        line = memory_kill_on(node, log, run)
        if line is not None:
            return Cause("host-out-of-memory", node, line)
    return Cause(failure.code, node, failure.source)


def _asked_to_leave(exit_line: str, run: Run, preempted: bool) -> str:
    """Return the cause for Megatron's stated exit reason: a requested iteration, a signal, or the time limit."""
    if "at iteration" in exit_line:
        return "finished"  # it reached the requested iteration
    if "after receiving" in exit_line:
        return who_asked(run, preempted)
    return "time-limit"


def memory_kill_on(node: str, log: str, run: Run) -> str | None:
    """Return a line, and append it to the log, if a node's kernel has killed processes for memory during the training.

    The kernel reports it only in its own log, which users may not read, but everybody can read its counters.
    """
    before = None
    for found in _NODE_LINE.finditer(log):
        if found.group(1) == node:
            before = int(found.group(2))
    if before is None:
        return None
    now = re.search(r"^oom_kill (\d{1,18})$", run.scheduler.read_on(node, "/proc/vmstat"), re.M)
    if now is None or int(now.group(1)) <= before:
        return None
    count = int(now.group(1)) - before
    words = "1 process was" if count == 1 else f"{count} processes were"
    line = f"fp8launch: host-out-of-memory: {words} killed by the kernel of {node}, for its memory"
    with contextlib.suppress(OSError), run.log.open("a") as file:
        file.write(line + "\n")
    return line


def _node_to_blame(failure: Failure, log: str, output: str, run: Run) -> str | None:
    if failure.code == "unhealthy-node":
        return ",".join(_UNHEALTHY.findall(log)) or None
    if failure.code in REPORTED_BY_PEERS:
        return node_of_silence(log, run)
    return node_of(failure.source, output, run)


def who_asked(run: Run, preempted: bool) -> str:
    """Return why the scheduler sent SIGTERM to the training while the job keeps running."""
    # In the grace time of a preemption the job still runs, and its end time is the end of the grace time.
    if preempted:
        return "preempted"
    time_is_up = time.time() > run.attempts[-1].get("until", 0) - run.plan["stop_before"] - 60
    return "time-limit" if time_is_up else "signal"


def node_of(line: str, output: str, run: Run) -> str | None:
    """Return the node of the process that printed a line, else the first failed node according to the scheduler."""
    node = run.scheduler.node_in_message(line)
    if node:
        return node
    label = _TASK_LABEL.match(line)
    if label:
        nodes = run.scheduler.nodes_of([int(label.group(1))])
        if nodes:
            return nodes[0]
    return run.scheduler.node_that_failed(line) or run.scheduler.node_that_failed(output)


def node_of_silence(log: str, run: Run) -> str | None:
    """Return the only node whose processes miss no peer: the peer that all others miss runs there."""
    reported = set()
    for code, source in failures_of(log):
        label = _TASK_LABEL.match(source)
        if code in REPORTED_BY_PEERS and label:
            reported.add(int(label.group(1)))
    everybody = set(range(run.scheduler.tasks()))
    nodes = run.scheduler.nodes_of(sorted(everybody - reported))
    return nodes[0] if len(nodes) == 1 else None

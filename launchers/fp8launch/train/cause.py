"""Why an attempt ended: from the training's words, its exit status, and what Slurm says of the job.

Standard library only, on any Python from 3.7: this runs on a compute node's own Python, outside the image.
"""
# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import watch
from commands import slurm, tail
from record import Run

OF_PEERS = ("nccl", "network")  # told by those that miss somebody
_EXITING = re.compile(r"\[exiting program (after receiving|after [\d.]+ minutes|at iteration)")
_UNHEALTHY = re.compile(r"^([\w.-]+): bad: ", re.M)
_LABEL = re.compile(r"^\s*(\d+): ?")
# srun ends the other tasks of a step that failed in the words of a cancellation.
_STEP_ENDED = re.compile(r"\*\*\* STEP .*CANCELLED AT (?!.*DUE TO)")
# srun's own lines (its errors are those of the batch script) name the node of the first process that failed.
_NODE_FAILED = re.compile(r"srun: error: ([\w.-]+): tasks? [\d,-]+: (?!Terminated)")


def how_it_was_cut_off(run: Run, one: Mapping[str, Any]) -> str:
    """The cause of an end that the attempt's own script did not see."""
    text = "".join(tail(path) for path in (run.folder / "logs").glob(f"slurm-{one['job']}.out"))
    text += tail(run.folder / "logs" / f"{one['name']}.log")
    if one["job"] == run.job:
        # Slurm itself started this job again.
        return "preempted" if "DUE TO PREEMPTION" in text else "interrupted"
    shown = slurm("scontrol", "show", "job", one["job"]) or ""
    state = re.search(r"JobState=(\w+)", shown)
    causes = {"CANCELLED": "cancelled", "TIMEOUT": "time-limit", "PREEMPTED": "preempted", "NODE_FAIL": "interrupted"}
    return causes.get(state.group(1) if state else "", "interrupted")


class Cause(NamedTuple):
    """Why an attempt ended: the cause's code, the node where it was seen, and the line that told it."""

    code: str
    node: str | None = None
    line: str | None = None


def cause_of_end(run: Run, status: int, shown: str) -> Cause:
    """Why the training left before it was done; `shown` is what Slurm says of the job."""
    log = tail(run.attempt.with_suffix(".log"))
    hung = watch.HUNG.search(log)
    if hung is not None:
        return Cause("hang", hung.group(1), hung.group(0))
    left = _EXITING.search(log)
    if left is not None:
        # It has saved by then. A last SIGTERM may still hit it on its way out, and the exit status says nothing.
        if left.group(1) == "at iteration":
            return Cause("finished")  # as far as it was asked to go
        return Cause(who_asked(run, shown) if left.group(1) == "after receiving" else "time-limit")
    if status == 0:
        return Cause("unknown")
    # Slurm appends the words of a job that it starts again.
    batch = tail(run.batch_output, run.attempts[-1].get("said", 0))
    found = find_cause(log, run.plan) or find_cause(batch, run.plan)
    if found is None:
        return Cause("unknown")
    cause, line = found
    if cause == "cancelled" and who_asked(run, shown) != "signal":
        return Cause(who_asked(run, shown), None, line)  # the step was, before it could answer; the job runs
    if cause == "unhealthy-node":
        return Cause(cause, ",".join(_UNHEALTHY.findall(log)) or None, line)
    return Cause(cause, node_of_silence(log, run) if cause in OF_PEERS else node_of(line, batch, run.env), line)


def who_asked(run: Run, shown: str) -> str:
    """Why Slurm has sent SIGTERM to the training while the job runs on."""
    # In the grace time of a preemption the job still runs, and its end has moved to where that ends.
    if re.search(r"PreemptTime=\d", shown):
        return "preempted"
    near = time.time() > run.attempts[-1].get("until", 0) - run.plan["stop_before"] - 60
    return "time-limit" if near else "signal"


def find_cause(text: str, plan: Mapping[str, Any]) -> tuple[str, str] | None:
    """Code and line of the deepest cause: the earliest line of the lowest depth, as for `fp8launch parse`."""
    best: tuple[int, str, str] | None = None
    for depth, code, line in meanings(text, plan):
        if best is not None and _STEP_ENDED.search(line):
            continue
        if best is None or depth < best[0]:
            best = (depth, code, line)
    return (best[1], best[2]) if best else None


def meanings(text: str, plan: Mapping[str, Any]) -> Iterator[tuple[int, str, str]]:
    """Depth, code and text of each line that means a failure."""
    patterns = [(re.compile(expression), code, depth) for expression, code, depth in plan["patterns"]]
    needles, harmless = plan["needles"], re.compile(plan["harmless"])
    for line in text.splitlines():
        if any(needle in line for needle in needles):
            words = _LABEL.sub("", line)
            found = next(((depth, code) for expression, code, depth in patterns if expression.search(words)), None)
            if found and not harmless.search(words):
                yield (*found, line)


def node_of(line: str, batch: str, env: Mapping[str, str]) -> str | None:
    """The node of the process that printed a line, else the one whose process srun missed first."""
    label = _LABEL.match(line)
    nodes = watch.nodes_of([int(label.group(1))], env) if label else []
    missed = _NODE_FAILED.search(batch)
    return nodes[0] if nodes else missed.group(1) if missed else None


def node_of_silence(log: str, run: Run) -> str | None:
    """The node whose processes alone did not miss a peer: the peer that all others miss is there."""
    said = {_LABEL.match(line) for _, code, line in meanings(log, run.plan) if code in OF_PEERS}
    missed = {int(label.group(1)) for label in said if label}
    nodes = watch.nodes_of(sorted(set(range(int(run.env.get("SLURM_NTASKS") or 0))) - missed), run.env)
    return nodes[0] if len(nodes) == 1 else None

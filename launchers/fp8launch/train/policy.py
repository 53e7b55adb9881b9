"""What to do when an attempt at a run has ended: one table of rules, one pure function.

Standard library only, on any Python from 3.7: this also runs on a compute node's own Python, outside the image.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# go-on: another attempt, which counts. free: another, which does not count, for the user can do nothing about it.
# exclude: another, which counts, without the node that failed. stop: it would only fail again.
ACTIONS = ("go-on", "free", "exclude", "stop")

# Cause to action. Causes are those of `fp8launch parse`, and these of the attempt's own: `time-limit` (Megatron saved
# and left, or Slurm ended it), `interrupted` (Slurm started the job again by itself: preemption, `scontrol requeue`, a
# lost node or a restarted controller), `signal` (the processes were asked to leave, and saved), `phase-end` (a phase is
# done and another follows), `unknown`.
RULES: Mapping[str, str] = {
    "phase-end": "free",
    "time-limit": "go-on",
    "interrupted": "free",
    "preempted": "free",
    "signal": "free",
    "node-failure": "exclude",
    "gpu-failure": "exclude",
    "cuda-error": "exclude",
    "nccl": "exclude",
    "network": "exclude",
    "unhealthy-node": "exclude",
    "killed": "go-on",
    "segfault": "go-on",
    "aborted": "go-on",
    "terminated": "go-on",
    "port-in-use": "go-on",
    "storage": "go-on",
    "slurm": "go-on",
    "hang": "exclude",
    "cancelled": "stop",
    "out-of-memory": "stop",
    "host-out-of-memory": "stop",
    "nan": "stop",
    "bad-arguments": "stop",
    "missing-data": "stop",
    "missing-checkpoint": "stop",
    "checkpoint-mismatch": "stop",
    "shared-memory": "stop",
    "missing-module": "stop",
    "missing-file": "stop",
    "permission": "stop",
    "disk-full": "stop",
    "unsupported-hardware": "stop",
    "container": "stop",
    "command-not-found": "stop",
    "exception": "stop",
    "crash": "stop",
    "unknown": "stop",
}

WHY_STOP = {
    "cancelled": "somebody cancelled the job; `fp8launch resume` goes on",
    "disk-full": "another attempt would find the disk full again; make room, then `fp8launch resume`",
    "phase-end": "stopped there, as the rules say",
}


@dataclass(frozen=True)
class Ended:
    """How an attempt ended: its cause, and the newest checkpoint before and after it (iterations, 0 for none)."""

    cause: str
    before: int
    after: int
    node: str | None = None  # where the cause was seen


@dataclass(frozen=True)
class Limits:
    """`attempts` that count may be used in all, `stuck` of them one after the other without a newer checkpoint.

    So may `in_vain` of any kind: who is always preempted before the first save would go on for good.
    """

    attempts: int
    stuck: int
    in_vain: int = 50


@dataclass(frozen=True)
class Decision:
    """Whether the run goes on, whether the attempt counts, which node to do without, and why, in words."""

    go_on: bool
    counts: bool
    reason: str
    exclude: str | None = None


def decide(
    ended: Ended, counted: int, stuck: int, limits: Limits, rules: Mapping[str, str] = RULES, in_vain: int = 0
) -> Decision:
    """What follows an attempt that did not finish the training.

    `counted` attempts were used before this one, the last `stuck` of them without a newer checkpoint; so were the last
    `in_vain` of all attempts.
    """
    in_vain = in_vain + 1 if ended.after <= ended.before else 0
    action = rules.get(ended.cause, rules["unknown"])
    if action == "stop":
        return Decision(False, True, f"{ended.cause}: {WHY_STOP.get(ended.cause, 'another attempt would fail again')}")
    if in_vain >= limits.in_vain:
        advice = "save more often (checkpoint.interval), then `fp8launch resume`"
        return Decision(False, True, f"{ended.cause}: {in_vain} attempts without a newer checkpoint; {advice}")
    if action == "free":
        return Decision(True, False, f"{ended.cause}: another attempt follows, and this one does not count")
    used = counted + 1
    stuck = stuck + 1 if ended.after <= ended.before else 0
    if used >= limits.attempts:
        return Decision(False, True, f"{ended.cause}: all attempts are used, {used} of {limits.attempts}")
    if stuck >= limits.stuck:
        times = f"{stuck} attempts" if stuck > 1 else "an attempt"
        return Decision(False, True, f"{ended.cause}: {times} without a newer checkpoint than {ended.after}")
    exclude = ended.node if action == "exclude" else None
    without = f" without {exclude}" if exclude else " (the bad node is not known)" if action == "exclude" else ""
    reason = f"{ended.cause}: another attempt follows{without}, {used} of {limits.attempts} used"
    return Decision(True, True, reason, exclude)


def merged(overrides: Mapping[str, str]) -> dict[str, str]:
    """The rules with a site's and a recipe's own."""
    return {**RULES, **overrides}

"""The action after the end of an attempt: one table of rules, one pure function.

Standard library only, on any Python from 3.7: this also runs on a compute node's own Python, outside the image.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# go-on: another attempt, which counts. free: another, which does not count, because the user can do nothing about it.
# exclude: another, which counts, without the node that failed. stop: another would fail again.
ACTIONS = ("go-on", "free", "exclude", "stop")

# Cause to action. Causes are those of `fp8launch parse` (failure_patterns.py), and these of the attempt's own:
# `time-limit` (Megatron saved and left, or Slurm ended it), `interrupted` (Slurm started the job again by itself:
# `scontrol requeue` or a restarted controller), `damaged-checkpoint` (it could not be loaded, and was set aside),
# `rewind` (the training was broken, and `health.actions` let the run go back to an earlier checkpoint),
# `preempted` and `node-lost` (Slurm says that this is why), `signal`
# (the processes were asked to leave, and saved), `phase-end` (a phase is done and another follows), `unknown`.
RULES: Mapping[str, str] = {
    "phase-end": "free",
    "time-limit": "go-on",
    "interrupted": "free",
    "node-lost": "free",
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
    "pmix": "go-on",
    "hang": "exclude",
    "cancelled": "stop",
    "step-cancelled": "stop",
    "out-of-memory": "stop",
    "host-out-of-memory": "go-on",
    "nan": "stop",
    "unhealthy-training": "stop",
    "rewind": "free",
    "bad-arguments": "stop",
    "missing-data": "stop",
    "missing-checkpoint": "stop",
    "damaged-checkpoint": "free",
    "checkpoint-mismatch": "stop",
    "pickled-state": "stop",
    "fp8-state-missing": "stop",
    "scheduler-mismatch": "stop",
    "parameter-groups": "stop",
    "optimizer-mismatch": "stop",
    "missing-optimizer": "stop",
    "gated-repository": "stop",
    "hub-rate-limit": "stop",
    "hub-unreachable": "stop",
    "damaged-data": "stop",
    "stream-capture": "stop",
    "triton-kernel": "stop",
    "library-mismatch": "stop",
    "version-mismatch": "stop",
    "max-connections": "stop",
    "fp8-shape": "stop",
    "no-pyxis": "stop",
    "nvls": "stop",
    "shared-memory": "stop",
    "missing-module": "stop",
    "missing-file": "stop",
    "permission": "stop",
    "disk-full": "stop",
    "unsupported-hardware": "stop",
    "container": "stop",
    "user-namespaces": "stop",
    "container-left": "free",
    "container-disk-full": "exclude",
    "container-unwritable": "exclude",
    "command-not-found": "stop",
    "exception": "stop",
    "crash": "stop",
    "unknown": "stop",
}

# What stands in the way has the number of the job that ended: a job with another number does not meet it.
NEEDS_NEW_JOB = ("container-left",)

# What a code alone does not say.
MEANS = {
    "killed": " (most often by the kernel, for the node's memory)",
    "host-out-of-memory": " (the memory of the node, or of the job on it, ran out)",
    "damaged-checkpoint": " (it is set aside, and an older one is next)",
    "container-left": " (an earlier attempt left its container on the node)",
    "container-disk-full": " (the node's disk for containers is full)",
    "container-unwritable": " (enroot cannot write to its folders on the node)",
}

WHY_STOP = {
    "cancelled": "somebody cancelled the job; `fp8launch resume` continues it",
    "disk-full": "the disk would be full again; free disk space, then `fp8launch resume`",
    "pickled-state": "Transformer Engine does not trust the checkpoint; `fp8launch parse` says how to continue",
    "unhealthy-training": "`health.actions` stop the run; `fp8launch resume` continues it",
    "phase-end": "the run stops between phases, as its rules say",
}


@dataclass(frozen=True)
class Ended:
    """How an attempt ended: its cause, and the newest checkpoint before and after it (iterations, 0 for none)."""

    cause: str
    before: int
    after: int
    node: str | None = None  # where the cause was seen
    detail: str = ""  # what a code alone does not say


@dataclass(frozen=True)
class Limits:
    """`attempts` that count may be used in all, `without_progress` of them in a row without a newer checkpoint.

    So may `ended_without_progress` of any kind: a run that is always preempted before its first checkpoint would
    continue forever.
    """

    attempts: int
    without_progress: int
    ended_without_progress: int = 50


@dataclass(frozen=True)
class Decision:
    """Whether the run continues, whether the attempt counts, and why, in words.

    `exclude` is the node that the next attempt must not use. `new_job` says that the next attempt must be another job
    than this one, because something on the nodes has this job's number.
    """

    continues: bool
    counts: bool
    reason: str
    exclude: str | None = None
    new_job: bool = False


def decide(
    ended: Ended,
    used: int,
    used_without_progress: int,
    limits: Limits,
    rules: Mapping[str, str] = RULES,
    ended_without_progress: int = 0,
) -> Decision:
    """Decide what follows an attempt that did not finish the training.

    `used` attempts counted before this one, the last `used_without_progress` of them without a newer checkpoint; so
    did the last `ended_without_progress` of all attempts, counted or not.
    """
    cause = ended.cause + MEANS.get(ended.cause, "")
    if ended.detail:
        cause += f" ({ended.detail})"
    used += 1
    used_without_progress += 1
    ended_without_progress += 1
    if ended.after > ended.before:
        used_without_progress = ended_without_progress = 0
    action = rules.get(ended.cause, rules["unknown"])
    if action == "stop":
        return _stop(f"{cause}: {WHY_STOP.get(ended.cause, 'another attempt would fail again')}")
    if ended_without_progress >= limits.ended_without_progress:
        advice = "save more often (checkpoint.interval), then `fp8launch resume`"
        return _stop(f"{cause}: {ended_without_progress} attempts without a newer checkpoint; {advice}")
    new_job = ended.cause in NEEDS_NEW_JOB
    if action == "free":
        reason = f"{cause}: another attempt follows, and this one does not count"
        return Decision(True, False, reason, new_job=new_job)
    if used >= limits.attempts:
        return _stop(f"{cause}: all attempts are used, {used} of {limits.attempts}")
    if used_without_progress >= limits.without_progress:
        times = f"{used_without_progress} attempts"
        if used_without_progress == 1:
            times = "an attempt"
        return _stop(f"{cause}: {times} without a newer checkpoint than {ended.after}")
    exclude, without = None, ""
    if action == "exclude":
        exclude = ended.node
        without = " (the bad node is not known)"
        if exclude:
            without = f" without {exclude}"
    reason = f"{cause}: another attempt follows{without}, {used} of {limits.attempts} used"
    return Decision(True, True, reason, exclude, new_job)


def _stop(reason: str) -> Decision:
    return Decision(False, True, reason)


def with_overrides(overrides: Mapping[str, str]) -> dict[str, str]:
    """The rules with a site's and a recipe's own."""
    return {**RULES, **overrides}

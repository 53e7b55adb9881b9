"""Decide what happens after an attempt, with one table of rules and one pure function."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fp8launch.injob.supervisor.failure_patterns import PATTERNS

# go-on: start another attempt; the ended one counts. free: start another attempt; the ended one does not count, because
# the user cannot prevent the cause. exclude: start another attempt without the failed node; the ended one counts. stop:
# end the run, because another attempt would fail the same way.
ACTIONS = ("go-on", "free", "exclude", "stop")

# Causes that do not come from a line in a log.
_OF_ATTEMPTS = {
    "phase-end": "free",  # the phase is complete, and another one follows
    "interrupted": "free",  # the scheduler restarted the job: `scontrol requeue` or a controller restart
    "node-lost": "free",  # the scheduler reports it
    "signal": "free",  # the processes received a signal, saved and exited
    "rewind": "free",  # the training broke, and `health.actions` rewinds the run to an earlier checkpoint
    "slow-node": "exclude",  # a node slowed the training, and `health.actions` made it save and exit
    "damaged-checkpoint": "free",  # the checkpoint did not load and was set aside
    "exception": "stop",  # a traceback that no pattern explains
    "unknown": "stop",
}
# Actions by cause: a code of `fp8launch parse` (failure_patterns.ini), or a cause of attempts only.
RULES: Mapping[str, str] = {**{p.code: p.retry for p in PATTERNS if p.retry is not None}, **_OF_ATTEMPTS}

# The obstacle is tied to the job id, so a new job is not affected.
NEEDS_NEW_JOB = ("container-left",)

# The user cannot prevent a slow node, and no work is lost because the training saved: such an attempt does not count.
NOT_COUNTED = ("slow-node",)

# Explanations of codes that are not self-explanatory.
MEANS = {
    "killed": " (most often by the kernel, for the node's memory)",
    "host-out-of-memory": " (the memory of the node, or of the job on it, ran out)",
    "damaged-checkpoint": " (it is set aside, and an older one is next)",
    "container-left": " (an earlier attempt left its container on the node)",
    "container-disk-full": " (the node's disk for containers is full)",
    "container-unwritable": " (enroot cannot write to its folders on the node)",
}

WHY_STOP = {
    "cancelled": "someone cancelled the job; `fp8launch resume` continues it",
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
    detail: str = ""  # explains the cause


@dataclass(frozen=True)
class Limits:
    """How many attempts a run may use.

    `attempts` limits the attempts that count, and `without_progress` those in a row without a newer checkpoint.
    `ended_without_progress` also limits attempts that do not count. Without it, a run that is always preempted before
    its first checkpoint would continue forever.
    """

    attempts: int
    without_progress: int
    ended_without_progress: int = 50


@dataclass(frozen=True)
class Decision:
    """Whether the run continues, whether the ended attempt counts, and why.

    The next attempt must avoid the node `exclude`, unless it is None. With `new_job` it must run under a new job id,
    because something on the nodes is tied to the current one.
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
    """Decide what happens after an attempt that did not complete the training.

    Before this attempt, `used` attempts counted, the last `used_without_progress` of them without a newer checkpoint.
    `ended_without_progress` is the number of latest attempts, counted or not, without a newer checkpoint.
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
    exclude = ended.node if action == "exclude" else None
    without = f" without {exclude}" if exclude else ""
    new_job = ended.cause in NEEDS_NEW_JOB
    if action == "free" or (action == "exclude" and ended.cause in NOT_COUNTED):
        reason = f"{cause}: another attempt follows{without}, and this one does not count"
        return Decision(True, False, reason, exclude, new_job)
    if used >= limits.attempts:
        return _stop(f"{cause}: all attempts are used, {used} of {limits.attempts}")
    if used_without_progress >= limits.without_progress:
        times = "an attempt" if used_without_progress == 1 else f"{used_without_progress} attempts"
        return _stop(f"{cause}: {times} without a newer checkpoint than {ended.after}")
    if action == "exclude" and not exclude:
        without = " (the bad node is not known)"
    reason = f"{cause}: another attempt follows{without}, {used} of {limits.attempts} used"
    return Decision(True, True, reason, exclude, new_job)


def _stop(reason: str) -> Decision:
    return Decision(False, True, reason)

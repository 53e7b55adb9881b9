"""What follows the end of an attempt: one table of rules, one pure function."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fp8launch.injob.supervisor.failure_patterns import PATTERNS

# go-on: start another attempt; this one counts. free: start another attempt; this one does not count, because the user
# cannot prevent the cause. exclude: start another attempt without the failed node; this one counts. stop: another
# attempt would fail again.
ACTIONS = ("go-on", "free", "exclude", "stop")

# Causes that no line of a log shows.
_OF_ATTEMPTS = {
    "phase-end": "free",  # a phase is done, and another follows
    "interrupted": "free",  # the scheduler started the job again: `scontrol requeue` or a restarted controller
    "node-lost": "free",  # the scheduler reports it
    "signal": "free",  # the processes were asked to exit, and saved
    "rewind": "free",  # the training was broken, and `health.actions` let the run go back to an earlier checkpoint
    "slow-node": "exclude",  # a node slowed the training, and `health.actions` let it save and exit
    "damaged-checkpoint": "free",  # it could not be loaded, and was set aside
    "exception": "stop",  # a traceback that no pattern explains
    "unknown": "stop",
}
# Actions by cause: a code of `fp8launch parse` (failure_patterns.ini), or a cause of attempts only.
RULES: Mapping[str, str] = {**{p.code: p.retry for p in PATTERNS if p.retry is not None}, **_OF_ATTEMPTS}

# The obstacle is tied to the ended job's number, so a job with another number is not affected.
NEEDS_NEW_JOB = ("container-left",)

# The user can do nothing about a slow node, and the training has saved: such an attempt does not count.
NOT_COUNTED = ("slow-node",)

# Explanations of codes that are not clear on their own.
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
    detail: str = ""  # explains the cause


@dataclass(frozen=True)
class Limits:
    """`attempts` is the number of attempts that count, `without_progress` of them in a row without a newer checkpoint.

    `ended_without_progress` is the number of attempts of any kind in a row without a newer checkpoint: a run that is
    always preempted before its first checkpoint would continue forever.
    """

    attempts: int
    without_progress: int
    ended_without_progress: int = 50


@dataclass(frozen=True)
class Decision:
    """Return whether the run continues, whether the attempt counts, and the reason.

    The next attempt must not use the node `exclude` (None: no restriction). With `new_job` it must be another job,
    because something on the nodes has this job's number.
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

    `used` attempts counted before this one, the last `used_without_progress` of them without a newer checkpoint. The
    last `ended_without_progress` attempts, counted or not, produced no newer checkpoint either.
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

"""How a run ended, as the exit of its job's script shows it: for programs that act on the end of a run."""
# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from fp8launch.injob.supervisor.attempt_log import ATTEMPTS, CANCELLED, PLAN, batch_output
from fp8launch.injob.supervisor.log_lines import tail
from fp8launch.injob.supervisor.run_records import MANIFEST, json_mapping

# The status of a shell that SIGTERM ended. In its EXIT trap, bash shows the status of the last command instead: 0.
_TERMINATED = (0, 143)
# What Slurm writes into the script's output before it ends the script; output of a requeued job is appended.
_SLURM_ENDS = re.compile(r"\*\*\* JOB \S{1,60} ON \S{1,255} CANCELLED AT \S{1,40}(.{0,80}?)\*\*\*")


@dataclass(frozen=True)
class End:
    """How a run ended. `attempt` is the name of its last attempt."""

    attempt: str
    state: str
    detail: str = ""


def end_of(folder: Path, attempt: str, status: int) -> End | None:
    """Return how the run ended, or None if it continues, or if its next start decides that."""
    if (folder / PLAN).is_file():
        return _end_of_supervised(folder, attempt, status)
    if (folder / "logs" / f"{attempt}.exit").is_file() or status not in _TERMINATED:
        if status == 0:
            return End(attempt, "completed")
        return End(attempt, "failed", f"exit status {status}")
    if json_mapping(folder / MANIFEST).get("cancelled"):
        return End(attempt, "cancelled", "by fp8launch cancel")
    reasons = _SLURM_ENDS.findall(tail(batch_output(folder, attempt.rpartition("-")[0])))
    if reasons and "REQUEUE" in reasons[-1]:
        return None  # Slurm starts the job again
    return End(attempt, "interrupted", "the job was ended: cancelled, preempted or at its time limit")


def _end_of_supervised(folder: Path, attempt: str, status: int) -> End | None:
    state = json_mapping(folder / ATTEMPTS)
    attempts = state.get("attempts") or []
    if attempts:
        attempt = str(attempts[-1]["name"])
    if state.get("finished"):
        return End(attempt, "completed")
    if (folder / CANCELLED).exists():
        return End(attempt, "cancelled", "by fp8launch cancel")
    if state.get("stopped"):
        return End(attempt, "failed", str(state["stopped"]))
    # Without an end of its attempt, the scheduler is ending the job, and may start it again.
    closed = not attempts or "ended" in attempts[-1]
    if closed and not state.get("waiting") and status not in _TERMINATED:
        return End(attempt, "failed", f"exit status {status}")
    return None

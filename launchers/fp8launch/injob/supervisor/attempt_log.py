"""The run folder as a job sees it: the plan of submission (survive.json), and the log of attempts (attempts.json)."""
# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import dataclasses
import glob
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fp8launch.injob.supervisor import checkpoints, job_scheduler, retry_policy
from fp8launch.injob.supervisor.run_records import read_json, write_json

PLAN = "survive.json"
ATTEMPTS = "attempts.json"
CANCELLED = "cancelled"  # a file that prevents further attempts


def _new() -> dict[str, Any]:
    return {"attempts": [], "waiting": None, "excluded": [], "stopped": None, "finished": False}


def _mapping(file: Path) -> dict[str, Any]:
    """Return the JSON mapping in a file. Raises OSError, and ValueError for anything else in it."""
    try:
        found = read_json(file)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ValueError(f"{file.name} is damaged")
    return found


def batch_output(folder: Path, job: str) -> Path:
    """Return the file with the script's own output: in the run folder, or for an array in the study's folder."""
    for place in (folder, folder.parent):
        for file in (place / "logs").glob(f"*-{glob.escape(job)}.out"):
            return file
    return folder / "logs" / f"batch-{job}.out"  # it does not exist yet


class Run:
    """The run folder as this job sees it, and the scheduler that runs the job.

    `plan` was made at submission. `state` is the content of attempts.json: the attempts so far, the current job
    (`owner`), the job that waits, excluded nodes, and how the run ended, if it did.
    """

    def __init__(self, folder: Path, attempt: Path, env: Mapping[str, str]) -> None:
        self.folder, self.attempt, self.env = folder, attempt, env
        self.plan = _mapping(folder / PLAN)
        self.damage = ""
        try:
            self.state = {**_new(), **_mapping(folder / ATTEMPTS)}
        except FileNotFoundError:
            self.state = _new()
        except ValueError as problem:
            # A power cut can leave an empty file. The checkpoints show how far the run is.
            self.state = _new()
            self.damage = f"{problem}: the count of attempts starts again"
        self.checkpoint = folder / self.plan["checkpoint"]
        self.job = attempt.name.rpartition("-")[0]  # as the scheduler's commands take it
        self.scheduler = job_scheduler.load(self.job, folder, env, self.plan)

    @property
    def name(self) -> str:
        return self.attempt.name

    @property
    def log(self) -> Path:
        return self.attempt.with_name(f"{self.name}.log")  # a job id may contain dots

    @property
    def attempts(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.state["attempts"]
        return found

    @property
    def _since_resumed(self) -> list[dict[str, Any]]:
        return self.attempts[self.state.get("from", 0) :]

    @property
    def used(self) -> int:
        """The number of attempts that count since the user last resumed the run."""
        return sum(1 for attempt in self._since_resumed if attempt.get("counts"))

    @property
    def used_without_progress(self) -> int:
        """The number of attempts that count since the last attempt that wrote a newer checkpoint."""
        return _without_progress([attempt for attempt in self._since_resumed if attempt.get("counts")])

    @property
    def ended_without_progress(self) -> int:
        """The number of attempts, counted or not, since the last attempt that wrote a newer checkpoint."""
        return _without_progress([attempt for attempt in self._since_resumed if "after" in attempt])

    @property
    def rewinds(self) -> int:
        """The number of returns to an earlier checkpoint since the user last resumed the run."""
        return sum(1 for attempt in self._since_resumed if attempt.get("cause") == "rewind")

    @property
    def trained(self) -> bool:
        """Return whether the newest checkpoint belongs to the last iteration."""
        planned = self.plan["iterations"]
        return planned is not None and checkpoints.latest(self.checkpoint) >= planned

    @property
    def phase(self) -> dict[str, Any] | None:
        """The phase to continue with, by the newest checkpoint; None for a run without phases, or at its end."""
        reached = checkpoints.latest(self.checkpoint)
        for phase in self.plan.get("phases", []):
            if phase["end"] > reached:
                return dict(phase)
        return None

    @property
    def in_last_phase(self) -> bool:
        return self.phase is None or self.phase == self.plan["phases"][-1]

    @property
    def phase_is_over(self) -> bool:
        """Return whether the newest attempt has trained its phase to the end, and another phase follows."""
        own = self.attempts[-1].get("phase")
        reached = checkpoints.latest(self.checkpoint)
        for phase in self.plan.get("phases", []):
            if phase["name"] == own:
                return reached >= phase["end"] and self.phase is not None
        return False

    def save(self) -> None:
        write_json(self.folder / ATTEMPTS, self.state)

    def close_attempt(
        self,
        cause: str,
        node: str | None = None,
        ended: float | None = None,
        detail: str = "",
        slow: str | None = None,
    ) -> retry_policy.Decision:
        """Record how the newest attempt ended, by default just now, and decide what follows.

        The next attempt excludes the node `slow`, regardless of the cause.
        """
        attempt = self.attempts[-1]
        after = checkpoints.latest(self.checkpoint)
        end = retry_policy.Ended(cause, attempt["before"], after, node, detail)
        limits = retry_policy.Limits(self.plan["attempts"], self.plan["stuck"])
        decision = retry_policy.decide(
            end, self.used, self.used_without_progress, limits, self.plan["rules"], self.ended_without_progress
        )
        excluded = decision.exclude.split(",") if decision.exclude else []
        if slow is not None and decision.continues and slow not in excluded:
            reason = f"{decision.reason}; without {slow}, which was slow"
            decision = dataclasses.replace(decision, exclude=",".join([*excluded, slow]), reason=reason)
        attempt.update(
            ended=ended or time.time(),
            after=after,
            cause=cause,
            counts=decision.counts,
            node=node,
            then=decision.reason,
        )
        if not decision.continues:
            self.state["stopped"] = decision.reason
        if decision.exclude:
            self.state["excluded"] = sorted({*self.state["excluded"], *decision.exclude.split(",")})
        return decision


def _without_progress(attempts: list[dict[str, Any]]) -> int:
    count = 0
    for attempt in reversed(attempts):
        if attempt["after"] > attempt["before"]:
            break
        count += 1
    return count

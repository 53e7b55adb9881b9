"""The run folder as a job sees it: the plan of submission, and the record of the run's attempts.

Standard library only, on any Python from 3.7: this runs on a compute node's own Python, outside the image.
"""
# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import policy
import saved


class Run:
    """The run folder as this job sees it."""

    def __init__(self, folder: Path, attempt: Path, env: Mapping[str, str]) -> None:
        self.folder, self.attempt, self.env = folder, attempt, env
        self.plan: dict[str, Any] = json.loads((folder / "survive.json").read_text())
        try:
            self.record: dict[str, Any] = json.loads((folder / "attempts.json").read_text())
        except OSError:
            self.record = {"attempts": [], "waiting": None, "excluded": [], "stopped": None, "finished": False}
        self.checkpoint = folder / self.plan["checkpoint"]
        self.job = attempt.name.rpartition("-")[0]  # as Slurm's commands take it, a task of an array too

    @property
    def name(self) -> str:
        return self.attempt.name

    @property
    def batch_output(self) -> Path:
        return self.folder / "logs" / f"slurm-{self.job}.out"

    @property
    def attempts(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.record["attempts"]
        return found

    @property
    def _since_asked(self) -> list[dict[str, Any]]:
        return self.attempts[self.record.get("from", 0) :]

    @property
    def counted(self) -> int:
        """Attempts that were used up, since the user last asked for the run to go on."""
        return sum(bool(one.get("counts")) for one in self._since_asked)

    @property
    def stuck(self) -> int:
        """Attempts without a newer checkpoint, at the end of those that counted."""
        return self._without_progress([one for one in self._since_asked if one.get("counts")])

    @property
    def in_vain(self) -> int:
        """The same of all attempts that have ended."""
        return self._without_progress([one for one in self._since_asked if "after" in one])

    @staticmethod
    def _without_progress(attempts: list[dict[str, Any]]) -> int:
        moved = (i for i, one in enumerate(reversed(attempts)) if one["after"] > one["before"])
        return next(moved, len(attempts))

    @property
    def limits(self) -> policy.Limits:
        return policy.Limits(self.plan["attempts"], self.plan["stuck"])

    @property
    def done(self) -> bool:
        planned = self.plan["iterations"]
        return planned is not None and saved.latest(self.checkpoint) >= planned

    @property
    def phase(self) -> dict[str, Any] | None:
        """The phase to go on with, that of the newest checkpoint; None for a run without phases, or at its end."""
        there = saved.latest(self.checkpoint)
        return next((one for one in self.plan.get("phases", []) if one["end"] > there), None)

    @property
    def phase_over(self) -> bool:
        """The newest attempt has trained its phase to the end, and another one follows."""
        its = self.attempts[-1].get("phase")
        ends = [one["end"] for one in self.plan.get("phases", []) if one["name"] == its]
        return bool(ends) and saved.latest(self.checkpoint) >= ends[0] and self.phase is not None

    def save(self) -> None:
        """All of it or nothing: a job may be killed at any moment."""
        new = self.folder / ".attempts.json.new"
        with new.open("w") as file:
            json.dump(self.record, file, indent=2)
            file.flush()
            os.fsync(file.fileno())
        new.replace(self.folder / "attempts.json")

    def close(self, cause: str, node: str | None = None) -> policy.Decision:
        """Write down how the newest attempt ended, and decide what follows."""
        one = self.attempts[-1]
        after = saved.latest(self.checkpoint)
        ended = policy.Ended(cause, one["before"], after, node)
        verdict = policy.decide(ended, self.counted, self.stuck, self.limits, self.plan["rules"], self.in_vain)
        one.update(ended=time.time(), after=after, cause=cause, counts=verdict.counts, node=node, then=verdict.reason)
        if not verdict.go_on:
            self.record["stopped"] = verdict.reason
        if verdict.exclude:
            self.record["excluded"] = sorted({*self.record["excluded"], *verdict.exclude.split(",")})
        return verdict

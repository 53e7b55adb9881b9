"""The report of a rehearsal in the results of `check`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fp8launch.wording import counted


@dataclass(frozen=True)
class RehearsedRole:
    """The rehearsal of one role. `result` is "passed", "refused" or "no verdict"; `reason` says why it did not pass."""

    role: str
    rank: int
    result: str
    seconds: float
    memory_gib: float
    phase: str | None = None
    reason: str | None = None
    traceback: str | None = None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class RehearsalReport:
    """The results of every rehearsed role.

    `not_rehearsed` names the features of the recipe that no rehearsal runs. `program` names the engine's own code if it
    ran instead of Megatron-LM's.
    """

    roles: tuple[RehearsedRole, ...] = ()
    not_rehearsed: tuple[str, ...] = ()
    program: str | None = None

    def as_json(self) -> dict[str, Any]:
        roles = [role.as_json() for role in self.roles]
        return {"roles": roles, "not_rehearsed": list(self.not_rehearsed), "program": self.program}

    @property
    def details(self) -> str:
        """Return each traceback once, with the roles that failed with it."""
        roles: dict[str, list[str]] = {}
        for role in self.roles:
            if role.traceback:
                roles.setdefault(role.traceback, []).append(f"{role.role} (rank {role.rank})")
        return "\n".join(f"{', '.join(names)}:\n{text.rstrip()}" for text, names in roles.items())

    @property
    def passed(self) -> int:
        return sum(role.result == "passed" for role in self.roles)


def notes(reports: Sequence[RehearsalReport]) -> list[str]:
    """Name the programs that ran instead of Megatron-LM's, and the recipes' features that no rehearsal runs."""
    programs = dict.fromkeys(report.program for report in reports if report.program)
    found = [f"rehearsed: {program}'s own code" for program in programs]
    left_out = dict.fromkeys(name for report in reports for name in report.not_rehearsed)
    if left_out:
        found.append(f"not rehearsed: {', '.join(left_out)}")
    return found


def verdict(reports: Sequence[RehearsalReport]) -> str:
    """Say how many roles passed."""
    roles = sum(len(report.roles) for report in reports)
    if not roles:
        return ""
    return f"{sum(report.passed for report in reports)} of {counted(roles, 'role')} rehearsed without an error"

"""The outcome of a rehearsal, as `check` reports it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fp8launch.rehearsal.counting import Counts


@dataclass(frozen=True)
class RehearsedRole:
    """How one role of ranks fared: `result` is passed, refused or "no verdict", `reason` why it did not pass."""

    role: str
    rank: int
    result: str
    seconds: float
    memory_gib: float
    phase: str | None = None
    reason: str | None = None
    traceback: str | None = None
    counts: Counts | None = None
    uncounted: str | None = None

    def as_json(self) -> dict[str, Any]:
        """The role, with `traffic` and `gemms` of a step where they were counted."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        counts, uncounted = found.pop("counts"), found.pop("uncounted")
        if counts is not None:
            found |= {"traffic": counts.traffic, "gemms": counts.gemms, "counts_exact": counts.exact}
            found["counts_without"] = counts.without
        elif uncounted:
            found["not_counted"] = uncounted
        return found


@dataclass(frozen=True)
class RehearsalReport:
    """Every rehearsed role, and by name what the recipe asks for that no rehearsal runs.

    `program` is the engine's own code that ran, None where Megatron-LM's did.
    """

    roles: tuple[RehearsedRole, ...] = ()
    not_rehearsed: tuple[str, ...] = ()
    program: str | None = None

    def as_json(self) -> dict[str, Any]:
        roles = [role.as_json() for role in self.roles]
        return {"roles": roles, "not_rehearsed": list(self.not_rehearsed), "program": self.program}

"""The attempts of a run as its keeper recorded them, read from any shell."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from fp8launch.runs.disk import read_json
from fp8launch.runs.folder import RunFolder, write_atomically

SURVIVE = "survive.json"  # how the run goes on; written when it is submitted
RECORD = "attempts.json"  # written by train/keeper.py, by the job that has its turn
_JOB = re.compile(r"[0-9]+(_[0-9]+)?")
_NODE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.,\[\]-]*")
CANCELLED = "cancelled"  # a file that keeps every further attempt from beginning


@dataclass(frozen=True)
class Attempts:
    """`jobs` that have begun, oldest first; `waiting` is the job that follows the newest; `used` attempts count.

    `stopped` says why the run does not go on by itself, `then` what followed the newest attempt that has ended, `phase`
    which phase the newest attempt is in.
    """

    jobs: tuple[str, ...] = ()
    waiting: str | None = None
    used: int = 0
    excluded: tuple[str, ...] = ()
    stopped: str | None = None
    finished: bool = False
    then: str | None = None
    phase: str | None = None

    @property
    def words(self) -> str:
        """In a few words for a table; empty for a run of a single attempt that says nothing else."""
        told = [f"phase {self.phase}"] if self.phase and not self.finished else []
        told += [f"{self.used} attempts"] if self.used > 1 else []
        told += ["stopped: " + self.stopped] if self.stopped and not self.finished else []
        told += ["without " + ", ".join(self.excluded)] if self.excluded else []
        return "; ".join(told)


def attempts_of(run: RunFolder) -> Attempts:
    """What is recorded of a run's attempts; empty for a run that has no keeper, or whose first job has not begun."""
    record = read_record(run)
    every = record.get("attempts", [])
    ended = [str(one["then"]) for one in every if one.get("then")]
    return Attempts(
        jobs=tuple(dict.fromkeys(str(one["job"]) for one in every)),
        waiting=record.get("waiting"),
        used=sum(bool(one.get("counts")) for one in every),
        excluded=tuple(record.get("excluded", [])),
        stopped=record.get("stopped"),
        finished=bool(record.get("finished")),
        then=ended[-1] if ended else None,
        phase=every[-1].get("phase") if every else None,
    )


def read_record(run: RunFolder) -> dict[str, Any]:
    """The keeper's record; empty when there is none, or when it holds what no keeper writes."""
    try:
        record = read_json(run.path / RECORD)
    except (OSError, ValueError):
        return {}
    return record if _is_record(record) else {}


def _is_record(record: object) -> bool:
    """Its words become arguments of Slurm's commands: jobs are numbers, and nodes are names."""
    if not isinstance(record, dict):
        return False
    every, excluded = record.get("attempts", []), record.get("excluded", [])
    if not isinstance(every, list) or not isinstance(excluded, list):
        return False
    return (
        all(isinstance(one, dict) and _JOB.fullmatch(str(one.get("job"))) for one in every)
        and all(isinstance(node, str) and _NODE.fullmatch(node) for node in excluded)
        and (record.get("waiting") is None or bool(_JOB.fullmatch(str(record["waiting"]))))
        and all(isinstance(record.get(key), (str, type(None))) for key in ("stopped", "owner"))
        and all(isinstance(one.get(key), (str, type(None))) for one in every for key in ("then", "phase"))
    )


def write_record(run: RunFolder, record: dict[str, Any]) -> None:
    write_atomically(run.path / RECORD, json.dumps(record, indent=2) + "\n")


def forbid_more(run: RunFolder) -> None:
    """Keep further attempts from beginning, before the job that runs is ended."""
    if not (run.path / SURVIVE).is_file():
        return
    write_atomically(run.path / CANCELLED, "by fp8launch cancel\n")


def allow_more(run: RunFolder) -> None:
    (run.path / CANCELLED).unlink(missing_ok=True)

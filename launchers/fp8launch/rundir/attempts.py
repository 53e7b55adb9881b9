"""The attempts of a run as its supervisor wrote them down, read from any shell."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from fp8launch.injob.supervisor.attempt_log import ATTEMPTS, PLAN
from fp8launch.rundir.atomic_io import read_json
from fp8launch.rundir.run_dir import RunFolder, write_atomically
from fp8launch.untyped import as_int, as_mapping
from fp8launch.wording import counted

SURVIVE = PLAN  # how the run continues; written when it is submitted
LOCAL_JOB = "local"  # the name of every job of a run on this machine
_JOB = re.compile(rf"[0-9]+(_[0-9]+)?|{LOCAL_JOB}")
_NODE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.,\[\]-]*")
CANCELLED = "cancelled"  # a file that keeps every further attempt from beginning


@dataclass(frozen=True)
class Attempts:
    """`jobs` that have begun, oldest first; `waiting` is the job that follows the newest; `used` attempts count.

    `stopped` says why the run does not continue by itself, `then` what followed the newest attempt that has ended,
    `phase` which phase the newest attempt is in. `rewinds` counts how often the run went back to an earlier checkpoint.
    """

    jobs: tuple[str, ...] = ()
    waiting: str | None = None
    used: int = 0
    excluded: tuple[str, ...] = ()
    stopped: str | None = None
    finished: bool = False
    then: str | None = None
    phase: str | None = None
    rewinds: int = 0

    @property
    def words(self) -> str:
        """In a few words for a table; empty for a run of a single attempt that says nothing else."""
        words = []
        if self.phase and not self.finished:
            words.append(f"phase {self.phase}")
        if self.used > 1:
            words.append(f"{self.used} attempts")
        if self.rewinds:
            words.append(counted(self.rewinds, "rewind"))
        if self.stopped and not self.finished:
            words.append(f"stopped: {self.stopped}")
        if self.excluded:
            words.append(f"without {', '.join(self.excluded)}")
        return "; ".join(words)


def attempts_of(run: RunFolder) -> Attempts:
    """The recorded attempts of a run; empty for a run without a supervisor, or whose first job has not started."""
    state = read_attempt_log(run)
    jobs: list[str] = []
    used = 0
    then = phase = None
    for attempt in state.get("attempts", []):
        if attempt["job"] not in jobs:
            jobs.append(attempt["job"])
        if attempt.get("counts"):
            used += 1
        then = attempt.get("then") or then
        phase = attempt.get("phase")
    return Attempts(
        jobs=tuple(jobs),
        waiting=state.get("waiting"),
        used=used,
        excluded=tuple(state.get("excluded", [])),
        stopped=state.get("stopped"),
        finished=bool(state.get("finished")),
        then=then,
        phase=phase,
        rewinds=sum(attempt.get("cause") == "rewind" for attempt in state.get("attempts", [])),
    )


@dataclass(frozen=True)
class HealthAction:
    """What the job did about broken training in one attempt.

    Iterations `first` to `last` are concerned. `rewound_to` is the checkpoint that the run went back to: the
    attempt's iterations after it do not count. None if the run stopped.
    """

    attempt: str
    code: str
    message: str
    first: int
    last: int
    rewound_to: int | None

    @property
    def sentence(self) -> str:
        if self.rewound_to is None:
            return f"{self.message}: the job stopped the run"
        return (
            f"{self.message}: the job went back to iteration {self.rewound_to} and skipped the batches of iterations "
            f"{self.rewound_to + 1} to {self.last}"
        )


def health_actions(run: RunFolder) -> list[HealthAction]:
    """Return what the jobs of a run did about its health, oldest first."""
    found = []
    for attempt in read_attempt_log(run).get("attempts", []):
        health, name = as_mapping(attempt.get("health")), attempt.get("name")
        code, message = health.get("code"), health.get("message")
        good, until, target = (as_int(health.get(key)) for key in ("good", "until", "rewound_to"))
        if isinstance(name, str) and isinstance(code, str) and isinstance(message, str) and good is not None:
            last = max(good + 1, until or 0)
            found.append(HealthAction(name, code, message, good + 1, last, target))
    return found


def read_attempt_log(run: RunFolder) -> dict[str, Any]:
    """The supervisor's attempts.json; empty when there is none, or when it holds what no supervisor writes."""
    try:
        state = read_json(run.path / ATTEMPTS)
    except (OSError, ValueError):
        return {}
    if not _is_attempt_log(state):
        return {}
    return dict(state)


def _is_attempt_log(state: object) -> bool:
    """Its words become arguments of Slurm's commands: jobs are numbers, and nodes are names."""
    if not isinstance(state, dict):
        return False
    attempts, excluded = state.get("attempts", []), state.get("excluded", [])
    if not isinstance(attempts, list) or not all(map(_is_attempt, attempts)):
        return False
    if not isinstance(excluded, list) or not all(map(_is_node, excluded)):
        return False
    waiting = state.get("waiting")
    return (waiting is None or _is_job(waiting)) and _is_text_or_null(state, "stopped", "owner")


def _is_attempt(attempt: object) -> bool:
    return isinstance(attempt, dict) and _is_job(attempt.get("job")) and _is_text_or_null(attempt, "then", "phase")


def _is_job(value: object) -> bool:
    return isinstance(value, str) and _JOB.fullmatch(value) is not None


def _is_node(value: object) -> bool:
    return isinstance(value, str) and _NODE.fullmatch(value) is not None


def _is_text_or_null(mapping: dict[str, Any], *keys: str) -> bool:
    return all(isinstance(mapping.get(key), (str, type(None))) for key in keys)


def write_attempt_log(run: RunFolder, state: dict[str, Any]) -> None:
    """Write attempts.json whole or not at all; an empty state is that of a run without one."""
    if not state:
        (run.path / ATTEMPTS).unlink(missing_ok=True)
        return
    write_atomically(run.path / ATTEMPTS, json.dumps(state, indent=2) + "\n")


def forbid_more(run: RunFolder) -> None:
    """Keep further attempts from beginning, before the job that runs is ended."""
    if not (run.path / SURVIVE).is_file():
        return
    write_atomically(run.path / CANCELLED, "by fp8launch cancel\n")


def allow_more(run: RunFolder) -> None:
    (run.path / CANCELLED).unlink(missing_ok=True)

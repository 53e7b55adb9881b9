"""The attempts of a run, as its supervisor recorded them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fp8launch.injob.supervisor.attempt_log import ATTEMPTS, CANCELLED, PLAN
from fp8launch.injob.supervisor.health_rules import SLOW_NODE, HealthProblem
from fp8launch.injob.supervisor.run_records import read_json
from fp8launch.injob.supervisor.slow_node import SlowNode
from fp8launch.rundir.run_dir import RunFolder, is_job_id, write_atomically
from fp8launch.untyped import as_int, as_mapping
from fp8launch.wording import counted

SURVIVE = PLAN  # how the run continues; written at submission
LOCAL_JOB = "local"  # the name of every job of a run on this machine
_NODE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.,\[\]-]*")


@dataclass(frozen=True)
class Attempts:
    """`jobs` that have begun, oldest first; `waiting` is the job that follows the newest; `used` attempts count.

    `stopped` says why the run does not continue automatically, `then` what followed the newest attempt that has ended,
    `phase` which phase the newest attempt is in. `rewinds` counts how often the run went back to an earlier checkpoint.
    `slow_nodes` are the records of nodes that slowed an attempt (`injob/supervisor/slow_node.py`), oldest first.
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
    slow_nodes: tuple[Mapping[str, Any], ...] = ()

    @property
    def words(self) -> str:
        """Describe the attempts in a few words for a table; empty for a single attempt without events."""
        words = []
        if self.phase and not self.finished:
            words.append(f"phase {self.phase}")
        if self.used > 1:
            words.append(f"{self.used} attempts")
        if self.rewinds:
            words.append(counted(self.rewinds, "rewind"))
        for slow in self.slow_nodes:
            words.append(f"slow: {slow['node']} ({slow['factor']:.2f}x)")
        if self.stopped and not self.finished:
            words.append(f"stopped: {self.stopped}")
        if self.excluded:
            words.append(f"without {', '.join(self.excluded)}")
        return "; ".join(words)


def attempts_of(run: RunFolder) -> Attempts:
    """Return the recorded attempts of a run; empty without a supervisor, or before the first job starts."""
    state = read_attempt_log(run)
    attempts = state.get("attempts", [])
    slow_nodes: list[Mapping[str, Any]] = []
    for attempt in attempts:
        if slow := SlowNode.of_json(attempt.get("slow_node")):
            slow_nodes.append({"attempt": attempt.get("name"), **slow.as_json()})
    return Attempts(
        jobs=tuple(dict.fromkeys(attempt["job"] for attempt in attempts)),
        waiting=state.get("waiting"),
        used=sum(bool(attempt.get("counts")) for attempt in attempts),
        excluded=tuple(state.get("excluded", [])),
        stopped=state.get("stopped"),
        finished=bool(state.get("finished")),
        then=next((attempt["then"] for attempt in reversed(attempts) if attempt.get("then")), None),
        phase=attempts[-1].get("phase") if attempts else None,
        rewinds=sum(attempt.get("cause") == "rewind" for attempt in attempts),
        slow_nodes=tuple(slow_nodes),
    )


@dataclass(frozen=True)
class HealthAction:
    """What the job found in one attempt: broken training, on which it acted, or a slow node.

    `rewound_to` is the checkpoint that the run went back to: the attempt's iterations after it do not count. None if
    the run stopped, or a node is slow.
    """

    attempt: str
    problem: HealthProblem
    rewound_to: int | None = None


def health_actions(run: RunFolder) -> list[HealthAction]:
    """Return what a run's jobs found and acted upon, oldest first."""
    found = []
    for attempt in read_attempt_log(run).get("attempts", []):
        health, name = as_mapping(attempt.get("health")), attempt.get("name")
        slow = SlowNode.of_json(attempt.get("slow_node"))
        if slow and isinstance(name, str):
            problem = HealthProblem(SLOW_NODE, "warning", slow.sentence, slow.first, slow.last, slow.as_json())
            found.append(HealthAction(name, problem))
        code, message = health.get("code"), health.get("message")
        good, until, target = (as_int(health.get(key)) for key in ("good", "until", "rewound_to"))
        if isinstance(name, str) and isinstance(code, str) and isinstance(message, str) and good is not None:
            last = max(good + 1, until or 0)
            answer = "stopped the run"
            if target is not None:
                answer = f"went back to iteration {target} and skipped the batches of iterations {target + 1} to {last}"
            problem = HealthProblem(code, "warning", f"{message}: the job {answer}", good + 1, last)
            found.append(HealthAction(name, problem, target))
    return found


def read_attempt_log(run: RunFolder) -> dict[str, Any]:
    """Return the supervisor's attempts.json; empty if there is none, or if no supervisor wrote it."""
    try:
        state = read_json(run.path / ATTEMPTS)
    except (OSError, ValueError):
        return {}
    return dict(state) if _is_attempt_log(state) else {}


def _is_attempt_log(state: object) -> bool:
    """Return whether it is well formed. Its job ids and node names become arguments of the scheduler's commands."""
    if not isinstance(state, dict):
        return False
    attempts, excluded, waiting = state.get("attempts", []), state.get("excluded", []), state.get("waiting")
    if not isinstance(attempts, list) or not isinstance(excluded, list):
        return False
    for attempt in attempts:
        if not (isinstance(attempt, dict) and is_job_id(attempt.get("job"))):
            return False
        if not _is_text_or_null(attempt, "then", "phase"):
            return False
    if not all(isinstance(node, str) and _NODE.fullmatch(node) for node in excluded):
        return False
    return (waiting is None or is_job_id(waiting)) and _is_text_or_null(state, "stopped", "owner")


def _is_text_or_null(mapping: dict[str, Any], *keys: str) -> bool:
    return all(isinstance(mapping.get(key), (str, type(None))) for key in keys)


def write_attempt_log(run: RunFolder, state: dict[str, Any]) -> None:
    """Write attempts.json atomically; remove it for an empty state."""
    if not state:
        (run.path / ATTEMPTS).unlink(missing_ok=True)
        return
    write_atomically(run.path / ATTEMPTS, json.dumps(state, indent=2) + "\n")


def forbid_more(run: RunFolder) -> None:
    """Prevent further attempts. Called before the running job is ended."""
    if not (run.path / SURVIVE).is_file():
        return
    # An empty file: a full disk must not keep a run from being cancelled.
    os.close(os.open(run.path / CANCELLED, os.O_CREAT | os.O_WRONLY | os.O_NOFOLLOW, 0o644))


def allow_more(run: RunFolder) -> None:
    (run.path / CANCELLED).unlink(missing_ok=True)

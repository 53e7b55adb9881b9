"""Rehearse many recipes with the imports of Megatron and Transformer Engine done once per environment.

Used by rehearse_pack.py and rehearse_random.py. A result is one JSON object per recipe.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter, OrderedDict
from typing import Any

from fp8launch.check.checker import check_all
from fp8launch.check.resolved_run import resolve_run
from fp8launch.cluster.profile import Cluster
from fp8launch.diagnostics import UserError
from fp8launch.engines.base import NotRehearsable
from fp8launch.job.prepared import Prepared
from fp8launch.plugins.rehearse.layer import plan_of
from fp8launch.plugins.rehearse.rehearse import Plan, Role, request_of, roles_of
from fp8launch.plugins.rehearse.server import Server
from fp8launch.plugins.rehearse.shrink import Shrunk, shrink
from fp8launch.plugins.rehearse.workers import LIMITS, Request

SERVERS = 3
POLL_SECONDS = 0.05
# Parts of a request that do not affect what is imported.
VARYING = ("argv", "rank", "world", "local_world", "env", "saves")


# Building a section's validator sets a variable of the process.
PREPARING = threading.Lock()

_servers: OrderedDict[str, Server] = OrderedDict()
_busy: Counter[str] = Counter()
_lock = threading.Lock()


def _server(key: str, setup: dict[str, Any], paths: list[str]) -> Server:
    """The server of this setup; the lock is held. Those used least recently are closed."""
    if key not in _servers:
        _servers[key] = Server(setup, paths, LIMITS.memory_gib)
    _servers.move_to_end(key)
    for idle in [each for each in _servers if not _busy[each] and each != key][: max(len(_servers) - SERVERS, 0)]:
        _servers.pop(idle).close()
    return _servers[key]


def close_servers() -> None:
    """End all processes."""
    with _lock:
        while _servers:
            _servers.popitem()[1].close()


def _setup(asked: Request) -> tuple[str, dict[str, Any]]:
    """What of a request is imported, also as one text."""
    setup = {name: value for name, value in asked.content.items() if name not in VARYING}
    # Transformer Engine reads some of its variables while it is imported.
    setup["env"] = {name: value for name, value in asked.content["env"].items() if name.startswith("NVTE_")}
    return json.dumps([setup, list(asked.python_path)], sort_keys=True), setup


def imports(run: Prepared) -> str:
    """Return a key that runs with the same imports share; empty if the run cannot be rehearsed."""
    try:
        plan = plan_of(run.parts[0], resolve_run(run.parts[0]), Cluster())
        return _setup(request_of(plan, roles_of(plan.layout)[0], shrink(plan.args.values, plan.layout)))[0]
    except (UserError, NotRehearsable):
        return ""


def rehearse_role(plan: Plan, role: Role, small: Shrunk, cpu_seconds: int) -> dict[str, Any]:
    asked = request_of(plan, role, small)
    key, setup = _setup(asked)
    varying = {name: asked.content[name] for name in VARYING}
    with _lock:
        server = _server(key, setup, list(asked.python_path))
        number = server.submit({**varying, "cpu_seconds": cpu_seconds})
        _busy[key] += 1
    while True:
        with _lock:
            server.listen()
            if server.has_ended(number):
                _busy[key] -= 1
                break
        time.sleep(POLL_SECONDS)
    result = server.answer(number)
    if result is None:
        words = server.last_words(number)
        result = {"ok": False, "unknown": True, "exception": "Ended", "message": f"no result: {words}", "at": ""}
    return {"role": role.name, "rank": role.rank, **result}


def rehearse_run(run: Prepared, roles: int = 9, cpu_seconds: int = 120) -> list[dict[str, Any]]:
    """Results of the first `roles` roles of a run, without repeats at real sizes."""
    found = []
    for part in run.parts:
        plan = plan_of(part, resolve_run(part), Cluster())
        small = shrink(plan.args.values, plan.layout)
        chosen = roles_of(plan.layout)
        if roles == 2 and plan.layout.pp == 1:
            chosen = chosen[:1]
        chosen = [chosen[0], *chosen[::-1]][:roles] if roles < len(chosen) else chosen
        for role in chosen:
            result = rehearse_role(plan, role, small, cpu_seconds)
            found.append(result)
    return found


def checked(runs: list[Prepared]) -> list[list[str]]:
    """Codes of the errors that `check` finds in each run."""
    results = check_all(runs)
    return [[problem.code for problem in result.problems if problem.severity == "error"] for result in results]


def one(run: Prepared, roles: int = 9) -> dict[str, Any]:
    try:
        outcomes = rehearse_run(run, roles)
    except (UserError, NotRehearsable) as exc:
        return {"verdict": "unknown", "message": str(exc)[:500]}
    refused = [o for o in outcomes if not o["ok"] and not o.get("unknown")]
    unknown = [o for o in outcomes if not o["ok"] and o.get("unknown")]
    worst = (refused or unknown or outcomes)[0]
    verdict = "refused" if refused else "unknown" if unknown else "passed"
    answer = {
        "verdict": verdict,
        "processor_seconds": round(sum(o.get("processor_seconds", 0) for o in outcomes), 1),
        "memory_mib": max(o.get("memory_mib", 0) for o in outcomes),
        "roles": len(outcomes),
    }
    left_out = sorted({name for o in outcomes for name in o.get("not_rehearsed", ())})
    if left_out:
        answer["not_rehearsed"] = left_out
    if verdict != "passed":
        answer |= {key: worst.get(key) for key in ("role", "exception", "message", "at", "reasons", "traceback")}
    return answer

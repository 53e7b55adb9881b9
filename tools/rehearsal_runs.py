"""Rehearse many recipes with the imports of Megatron and Transformer Engine done once per environment.

Used by rehearse_pack.py and rehearse_random.py. A result is one JSON object per recipe.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections import OrderedDict
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

from fp8launch.check.checker import check_all
from fp8launch.check.rehearsal import plan_of
from fp8launch.check.resolved_run import resolve_run
from fp8launch.cluster.profile import Cluster
from fp8launch.diagnostics import UserError
from fp8launch.job.prepared import Prepared
from fp8launch.rehearsal.rehearse import Plan, request_of
from fp8launch.rehearsal.roles import Role, roles_of
from fp8launch.rehearsal.shrink import Shrunk, shrink

SERVERS = 3
# What rank and arguments say; the rest of a request decides what is imported.
VARYING = ("argv", "rank", "world", "local_world", "env")


class Server:
    """A process of `fp8launch.rehearsal.forked`."""

    def __init__(self, setup: dict[str, Any], paths: list[str]) -> None:
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "NVTE_", "NCCL_"))}
        launchers = Path(__file__).resolve().parents[1] / "launchers"
        environment["PYTHONPATH"] = os.pathsep.join([str(launchers), *paths])
        self.folder = Path(tempfile.mkdtemp(prefix="rehearsals-"))
        self.log = (self.folder / "log").open("w")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "fp8launch.rehearsal.forked"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True, env=environment,
        )  # fmt: skip
        self.waiting: dict[int, Future[dict[str, Any]]] = {}
        self.number = 0
        self.lock = threading.Lock()
        self._write(setup)
        threading.Thread(target=self._listen, daemon=True).start()

    def _write(self, line: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(line) + "\n")
        self.process.stdin.flush()

    def submit(self, request: dict[str, Any]) -> Future[dict[str, Any]]:
        future: Future[dict[str, Any]] = Future()
        with self.lock:
            self.number += 1
            self.waiting[self.number] = future
            line = {**request, "id": self.number, "result": str(self.folder / f"{self.number}.json")}
            try:
                self._write(line)
            except OSError:
                self.waiting.pop(self.number).set_result(self._lost())
        return future

    def _lost(self) -> dict[str, Any]:
        last = (self.folder / "log").read_text(errors="replace")[-3000:]
        return {"ok": False, "unknown": True, "exception": "Lost", "message": f"no result: {last}", "at": ""}

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            ended = json.loads(line)
            place = self.folder / f"{ended['id']}.json"
            if place.exists():
                result = json.loads(place.read_text())
                place.unlink()
            else:
                result = {
                    "ok": False, "unknown": True, "exception": "Ended", "at": "",
                    "message": f"wait status {ended['status']} (9: its processor time is used up)",
                }  # fmt: skip
            self.waiting.pop(ended["id"]).set_result(result)
        for future in self.waiting.values():
            future.set_result(self._lost())

    def close(self) -> None:
        with suppress(OSError):
            assert self.process.stdin is not None
            self.process.stdin.close()
        self.process.wait()


_servers: OrderedDict[str, Server] = OrderedDict()
_lock = threading.Lock()


def _server(setup: dict[str, Any], paths: list[str]) -> Server:
    key = json.dumps([setup, paths], sort_keys=True)
    with _lock:
        if key not in _servers:
            _servers[key] = Server(setup, paths)
        _servers.move_to_end(key)
        while len(_servers) > SERVERS:
            idle = next((k for k, server in _servers.items() if not server.waiting and k != key), None)
            if idle is None:
                break
            _servers.pop(idle).close()
        return _servers[key]


def rehearse_role(plan: Plan, role: Role, small: Shrunk, cpu_seconds: int) -> dict[str, Any]:
    asked = request_of(plan, role, small)
    request = asked.content
    setup = {name: value for name, value in request.items() if name not in VARYING}
    # Transformer Engine reads some of its variables while it is imported.
    setup["env"] = {name: value for name, value in request["env"].items() if name.startswith("NVTE_")}
    varying = {name: request[name] for name in VARYING}
    server = _server(setup, list(asked.python_path))
    result = server.submit({**varying, "cpu_seconds": cpu_seconds}).result()
    return {"role": role.name, "rank": role.rank, **result}


def rehearse_run(run: Prepared, roles: int = 9, cpu_seconds: int = 120) -> list[dict[str, Any]]:
    """Results of the first `roles` roles of a run, without repeats at real sizes."""
    found = []
    for part in run.parts:
        plan = plan_of(part, resolve_run(part, {}), Cluster())
        small = shrink(plan.args.values, plan.layout)
        chosen = roles_of(plan.layout)
        if roles == 2 and plan.layout.pp == 1:
            chosen = chosen[:1]
        chosen = [chosen[0], *chosen[::-1]][:roles] if roles < len(chosen) else chosen
        for role in chosen:
            result = rehearse_role(plan, role, small, cpu_seconds)
            result["traffic"] = None
            found.append(result)
    return found


def checked(runs: list[Prepared]) -> list[list[str]]:
    """Codes of the errors that `check` finds in each run."""
    results = check_all(runs)
    return [[problem.code for problem in result.problems if problem.severity == "error"] for result in results]


def one(run: Prepared, roles: int = 9) -> dict[str, Any]:
    try:
        outcomes = rehearse_run(run, roles)
    except UserError as exc:
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
        answer |= {key: worst.get(key) for key in ("role", "exception", "message", "at", "traceback")}
    return answer

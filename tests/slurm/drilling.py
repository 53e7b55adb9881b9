"""Helpers of the drills: a run with checkpoints on the test cluster, and its outcome.

`FP8LAUNCH_DRILLS=FILE` adds each drill's row to a table there (benchmarks/resume/drills.md has a complete one).
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cluster.processes import Process, until
from launching import Site, losses, sets

from fp8launch.injob.supervisor import checkpoints

# About 12 iterations a second on a free machine: slow by what they compute, so that a drill has time to strike.
ITERATIONS = 400
LONG = 2000
MODEL = sets(f"train.iterations={ITERATIONS}", "model.hidden_size=128", "batch.sequence=64", "megatron.num_workers=1")
SAVE = sets("checkpoint.dir=ckpt", "checkpoint.interval=20")


@dataclass
class Chain:
    """A run under drill."""

    site: Site
    run: str

    @property
    def folder(self) -> Path:
        return self.site.runs / self.run

    @property
    def record(self) -> dict[str, Any]:
        try:
            record: dict[str, Any] = json.loads((self.folder / "attempts.json").read_text())
        except OSError:
            return {"attempts": []}
        return record

    @property
    def job(self) -> str:
        return str(self.site.state(self.run)["jobs"][0])

    @property
    def saves(self) -> Path:
        return Path(json.loads((self.folder / "survive.json").read_text())["checkpoint"])

    @property
    def checkpoint(self) -> int:
        return checkpoints.latest(self.saves)

    def logs(self) -> list[Path]:
        return sorted((self.folder / "logs").glob("*-*.log"), key=lambda p: p.stat().st_mtime)

    def reaches(self, condition: Callable[[], object], seconds: float = 240) -> None:
        if not until(condition, seconds, 0.3):
            said = "".join(p.read_text() for p in (self.folder / "logs").glob("slurm-*.out"))
            raise AssertionError(f"{self.record}\n{said}")

    def trained(self, iterations: int) -> None:
        self.reaches(lambda: self.checkpoint >= iterations)

    def over(self, seconds: float = 180) -> dict[str, Any]:
        """Wait until the run is over by its own word, and return what `runs` says then."""
        self.reaches(lambda: self.record.get("finished") or self.record.get("stopped"), seconds)
        self.reaches(lambda: self.site.state(self.run)["state"] not in ("running", "pending"), 60)
        return self.site.state(self.run)

    def past_the_checkpoint(self) -> int:
        """Iterations printed by an attempt beyond the checkpoint from which the next one went on."""
        lost = 0
        for log, nxt in itertools.pairwise(self.logs()):
            before, after = losses(log), losses(nxt)
            if before and after:
                lost += max(0, max(before) - min(after) + 1)
        return lost

    def running_at_once(self) -> int:
        """Jobs of this run that Slurm ever ran at the same time, beyond one."""
        spans = []
        ids = self.site.state(self.run)["jobs"]
        rows = self.site.slurm.run("sacct", "-D", "-X", "-n", "-P", "-j", ",".join(ids), "-o", "Start,End").stdout
        for row in rows.splitlines():
            start, _, end = row.partition("|")
            if start[:1].isdigit() and end[:1].isdigit() and start != end:
                spans.append((start, end))
        spans.sort()
        return sum(later[0] < earlier[1] for earlier, later in itertools.pairwise(spans))

    @property
    def said(self) -> str:
        """What the batch script has printed so far."""
        return "".join(path.read_text() for path in sorted((self.folder / "logs").glob("slurm-*.out")))

    def ranks(self, node: int) -> list[Process]:
        """The ranks that run on a node, by their order, without what they have forked."""
        return self._started(node, b"/worker.py")

    def batch(self, node: int) -> list[Process]:
        return self._started(node, b"/supervisor.py")

    def _started(self, node: int, script: bytes) -> list[Process]:
        """Processes of a node's jobs whose second word ends so and whose parent is none of them."""
        found = []
        for one in self.site.slurm.processes(f"node{node}"):
            words = _read(f"/proc/{one.pid}/cmdline").split(b"\0")
            if any(word.endswith(script) for word in words[1:3]) and b"python" in words[0]:
                found.append(one)
        parents = {one.pid: int(_read(f"/proc/{one.pid}/stat").rpartition(b")")[2].split()[1]) for one in found}
        return [one for one in found if parents[one.pid] not in parents]


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError:
        return b") X 0"


def submitted(site: Site, *more: str, profile: str = "") -> Chain:
    file = site.folder / "site.yaml"
    file.write_text(profile or "{}\n")
    return Chain(site, site.submit("--backend", "sbatch", "--cluster", str(file), *MODEL, *SAVE, *more))


def row(what: str, one: Chain, seen: str) -> None:
    """Add a drill to the table; none may have had two jobs of a run at work."""
    lost, twice = one.past_the_checkpoint(), one.running_at_once()
    cells = [what, str(len(one.record["attempts"])), str(lost), str(twice), seen]
    if file := os.environ.get("FP8LAUNCH_DRILLS"):
        with Path(file).open("a") as table:
            table.write("| " + " | ".join(cells) + " |\n")
    assert twice == 0


def same_curve(one: Chain, undisturbed: dict[int, float], iterations: int = ITERATIONS) -> None:
    """The run did all iterations once in its report, with the losses of an uninterrupted one."""
    report = one.site.json("parse", one.run)
    assert (report["status"], report["iterations"], report["iteration_last"]) == ("ok", iterations, iterations)
    curve: dict[int, float] = {}
    for log in one.logs():
        # Megatron's second line after a start is a mean with the first.
        found = losses(log)
        for at, iteration in enumerate(sorted(found)):
            if at != 1:
                curve[iteration] = found[iteration]
    assert len(curve) > 0.95 * iterations
    for iteration, loss in curve.items():
        if undisturbed.get(iteration) is not None and iteration > 2:
            assert loss == pytest.approx(undisturbed[iteration], rel=1e-4), f"iteration {iteration}"

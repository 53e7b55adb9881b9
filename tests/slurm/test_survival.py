"""Drills: what a cluster does to a run, done to real training on a real Slurm, and what became of the run.

`FP8LAUNCH_DRILLS=FILE` adds each drill's row to a table there (docs/survival.md holds one of a whole session).
"""

from __future__ import annotations

import itertools
import json
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from launching import Site, losses, sets, train_here

from fp8launch.train import saved

pytestmark = [pytest.mark.train, pytest.mark.slow, pytest.mark.drill]

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
    def checkpoint(self) -> int:
        return saved.latest(self.folder / "ckpt")

    def logs(self) -> list[Path]:
        return sorted((self.folder / "logs").glob("*-*.log"), key=lambda p: p.stat().st_mtime)

    def reaches(self, condition: Callable[[], object], seconds: float = 120) -> None:
        end = time.monotonic() + seconds
        while not condition():
            said = "".join(p.read_text() for p in (self.folder / "logs").glob("slurm-*.out"))
            assert time.monotonic() < end, f"{self.record}\n{said}"
            time.sleep(0.3)

    def trained(self, iterations: int) -> None:
        self.reaches(lambda: self.checkpoint >= iterations)

    def over(self, seconds: float = 180) -> dict[str, Any]:
        """Wait until the run is over by its own word, and return what `runs` says then."""
        self.reaches(lambda: self.record.get("finished") or self.record.get("stopped"), seconds)
        self.reaches(lambda: self.site.state(self.run)["state"] not in ("running", "pending"), 30)
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


@pytest.fixture
def chain(site: Site) -> Callable[..., Chain]:
    def submit(*more: str, profile: str = "") -> Chain:
        file = site.folder / "site.yaml"
        file.write_text(profile or "{}\n")
        choices = ["--backend", "sbatch", "--cluster", str(file), *MODEL, *SAVE]
        return Chain(site, site.submit(*choices, *more))

    return submit


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of the same recipe without any interruption."""
    return losses(train_here(tmp_path_factory.mktemp("undisturbed"), *MODEL))


@pytest.fixture
def drill(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Adds a row to the table of drills."""

    def row(what: str, one: Chain, seen: str) -> None:
        lost, twice = one.past_the_checkpoint(), one.running_at_once()
        cells = [what, str(len(one.record["attempts"])), str(lost), str(twice), seen]
        if file := os.environ.get("FP8LAUNCH_DRILLS"):
            with Path(file).open("a") as table:
                table.write("| " + " | ".join(cells) + " |\n")
        assert twice == 0

    return row


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


@pytest.mark.parametrize("way", ["requeue", "dependency"])
def test_two_time_limits(chain: Callable[..., Chain], drill: Callable[..., None], way: str) -> None:
    """About a minute of training in each job: Slurm looks twice a minute, and Megatron counts whole minutes."""
    limit = sets("resources.time=2", "survive.stop_before=30", f"train.iterations={LONG}", "checkpoint.keep=2")
    one = chain("--attempts", "9", *limit, profile=f"continue_by: {way}\n")
    state = one.over(900)
    assert state["state"] == "completed"
    causes = [a["cause"] for a in one.record["attempts"]]
    assert causes[-1] == "finished" and set(causes[:-1]) == {"time-limit"} and len(causes) > 2
    assert one.past_the_checkpoint() == 0
    # Two are kept, and what the last attempt added before anybody could look again.
    assert len(saved.iterations(one.folder / "ckpt")) <= 2 + 1
    alone = train_here(one.site.folder / "alone", *MODEL, *sets(f"train.iterations={LONG}"), timeout=600)
    same_curve(one, losses(alone), LONG)
    drill(f"time limit reached {len(causes) - 1} times, by {way}", one, one.record["attempts"][0]["then"])


def test_requeue_by_an_operator(
    chain: Callable[..., Chain], undisturbed: dict[int, float], drill: Callable[..., None]
) -> None:
    one = chain("--attempts", "3")
    one.trained(40)
    one.site.slurm.run("scontrol", "requeue", one.job)
    state = one.over()
    assert state["state"] == "completed"
    assert len(one.record["attempts"]) == 2
    assert one.record["attempts"][0]["counts"] is False
    same_curve(one, undisturbed)
    drill("`scontrol requeue`", one, one.record["attempts"][0]["then"])


def test_preemption(chain: Callable[..., Chain], undisturbed: dict[int, float], drill: Callable[..., None]) -> None:
    one = chain("--attempts", "2", profile="partition: low\nexclusive: true\nnodelist: node1\n")
    one.trained(40)
    important = ["sbatch", "--parsable", "-p", "high", "-w", "node1", "--exclusive", "--wrap", "sleep 5"]
    one.site.slurm.run(*important, "-o", "/dev/null")
    state = one.over()
    assert state["state"] == "completed"
    assert len(one.record["attempts"]) == 2
    assert one.record["attempts"][0]["counts"] is False
    same_curve(one, undisturbed)
    drill("preempted by a higher partition", one, one.record["attempts"][0]["then"])


def test_power_cut_of_one_node_of_two(chain: Callable[..., Chain], drill: Callable[..., None]) -> None:
    one = chain("--attempts", "3", "--nodes", "2")
    one.trained(40)
    one.site.slurm.kill_node(2)
    state = one.over()
    assert state["state"] == "completed"
    first, *rest = one.record["attempts"]
    assert "2" in first["nodes"] and rest
    assert rest[-1]["nodes"] != first["nodes"]
    assert one.site.json("parse", one.run)["iterations"] == ITERATIONS
    drill("power cut of one node of two", one, first["then"])


def test_scancel_by_somebody_else(chain: Callable[..., Chain], drill: Callable[..., None]) -> None:
    """It ends the run: no rule may bring back what somebody wanted gone. `resume` does."""
    one = chain("--attempts", "3", profile="continue_by: dependency\n")
    one.trained(40)
    one.site.slurm.run("scancel", one.job)
    state = one.over()
    assert "cancelled" in state["survival"]["stopped"]
    assert one.site.slurm.run("squeue", "-h").stdout == ""
    resumed = one.site.run("resume", one.run, "--wait")
    assert resumed.returncode == 0, resumed.stderr
    assert one.site.json("parse", one.run)["iterations"] == ITERATIONS
    assert one.site.run("resume", one.run).returncode == 1
    drill("`scancel` by somebody else, then `resume`", one, state["survival"]["stopped"])


@pytest.mark.parametrize("way", ["requeue", "dependency"])
def test_cancel_ends_the_whole_chain(chain: Callable[..., Chain], drill: Callable[..., None], way: str) -> None:
    one = chain("--attempts", "5", profile=f"continue_by: {way}\n")
    one.trained(20)
    refused = one.site.run("resume", one.run)
    assert refused.returncode == 1 and "is running" in refused.stderr
    assert one.site.run("cancel", one.run).returncode == 0
    one.reaches(lambda: one.site.slurm.run("squeue", "-h").stdout == "", 40)
    time.sleep(3)
    assert one.site.slurm.run("squeue", "-h").stdout == ""
    state = one.site.state(one.run)
    assert state["state"] == "cancelled"
    drill(f"`fp8launch cancel`, {way}", one, state["detail"])


@pytest.mark.parametrize(
    ("cause", "request_"),
    [
        (
            "nan",
            [
                "train.lr=1.0e30",
                "train.min_lr=1.0e30",
                "megatron.no_check_for_nan_in_loss_and_grad=null",
                "megatron.rerun_mode=null",
            ],
        ),
        ("bad-arguments", ["launch.script=SCRIPT"]),
    ],
)
def test_what_would_fail_again_is_not_tried_again(
    chain: Callable[..., Chain], drill: Callable[..., None], tmp_path: Path, cause: str, request_: list[str]
) -> None:
    # A training script of one's own that does not know Megatron's arguments.
    script = tmp_path / "train.py"
    script.write_text("import argparse\nargparse.ArgumentParser().parse_args()\n")
    one = chain("--attempts", "5", *sets(*(word.replace("SCRIPT", str(script)) for word in request_)))
    state = one.over(90)
    assert state["state"] == "failed"
    assert len(one.record["attempts"]) == 1
    assert state["survival"]["stopped"].startswith(cause)
    drill(f"the training fails: {cause}", one, state["survival"]["stopped"])


def test_a_torn_checkpoint_is_not_the_one_to_go_on_from(
    chain: Callable[..., Chain], drill: Callable[..., None]
) -> None:
    """What a power cut during a save leaves where the disk had not written everything: short files, a newer tracker."""
    one = chain("--attempts", "3")
    one.trained(60)
    one.site.slurm.run("scancel", one.job)
    one.site.slurm.wait_state(one.job, "CANCELLED")
    one.reaches(lambda: one.site.slurm.run("squeue", "-h").stdout == "", 30)
    newest = one.checkpoint
    for part in saved.place(one.folder / "ckpt", newest).glob("*.distcp"):
        part.write_bytes(part.read_bytes()[:1000])
    done = one.site.run("resume", one.run, "--wait")
    assert done.returncode == 0, done.stderr
    start = int(re.search(r"from iteration (\d+)", done.stderr)[1])  # type: ignore[index]
    assert 0 < start < newest
    assert one.site.json("parse", one.run)["iterations"] == ITERATIONS
    drill("newest checkpoint torn, then `resume`", one, f"goes on from iteration {start}, not {newest}")

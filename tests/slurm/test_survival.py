"""Drills: what a cluster does to a run, done to real training on a real Slurm, and what became of the run."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from drilling import ITERATIONS, LONG, MODEL, Chain, row, same_curve
from launching import losses, sets, train_here

from fp8launch.injob.supervisor import checkpoints

pytestmark = [pytest.mark.train, pytest.mark.slow, pytest.mark.drill]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of the same recipe without any interruption."""
    return losses(train_here(tmp_path_factory.mktemp("undisturbed"), *MODEL, timeout=600))


@pytest.mark.parametrize("way", ["requeue", "dependency"])
def test_two_time_limits(chain: Callable[..., Chain], way: str) -> None:
    """About a minute of training in each job: Slurm looks twice a minute, and Megatron counts whole minutes."""
    limit = sets("resources.time=2", "survive.stop_before=30", f"train.iterations={LONG}", "checkpoint.keep=2")
    one = chain("--attempts", "40", *limit, profile=f"continue_by: {way}\n")
    state = one.over(1800)
    assert state["state"] == "completed"
    causes = [a["cause"] for a in one.record["attempts"]]
    assert causes[-1] == "finished" and set(causes[:-1]) == {"time-limit"} and len(causes) > 2
    assert one.past_the_checkpoint() == 0
    # Two are kept, and what the last attempt added before anybody could look again.
    assert len(checkpoints.iterations(one.folder / "ckpt")) <= 2 + 1
    alone = train_here(one.site.folder / "alone", *MODEL, *sets(f"train.iterations={LONG}"), timeout=600)
    same_curve(one, losses(alone), LONG)
    row(f"time limit reached {len(causes) - 1} times, by {way}", one, one.record["attempts"][0]["then"])


def test_requeue_by_an_operator(chain: Callable[..., Chain], undisturbed: dict[int, float]) -> None:
    one = chain("--attempts", "3")
    one.trained(40)
    one.site.slurm.run("scontrol", "requeue", one.job)
    state = one.over()
    assert state["state"] == "completed"
    assert len(one.record["attempts"]) == 2
    assert one.record["attempts"][0]["counts"] is False
    same_curve(one, undisturbed)
    row("`scontrol requeue`", one, one.record["attempts"][0]["then"])


def test_preemption(chain: Callable[..., Chain], undisturbed: dict[int, float]) -> None:
    one = chain("--attempts", "2", profile="partition: low\nexclusive: true\nnodelist: node1\n")
    one.trained(40)
    important = ["sbatch", "--parsable", "-p", "high", "-w", "node1", "--exclusive", "--wrap", "sleep 5"]
    one.site.slurm.run(*important, "-o", "/dev/null")
    state = one.over()
    assert state["state"] == "completed"
    assert len(one.record["attempts"]) == 2
    assert one.record["attempts"][0]["counts"] is False
    same_curve(one, undisturbed)
    row("preempted by a partition of higher priority", one, one.record["attempts"][0]["then"])


def test_power_cut_of_one_node_of_two(chain: Callable[..., Chain]) -> None:
    one = chain("--attempts", "3", "--nodes", "2")
    one.trained(40)
    one.site.slurm.kill_node(2)
    state = one.over()
    assert state["state"] == "completed"
    first, *rest = one.record["attempts"]
    assert "2" in first["nodes"] and rest
    assert rest[-1]["nodes"] != first["nodes"]
    assert one.site.json("parse", one.run)["iterations"] == ITERATIONS
    row("power cut on one of two nodes", one, first["then"])


def test_scancel_by_somebody_else(chain: Callable[..., Chain]) -> None:
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
    row("`scancel` by someone else, then `resume`", one, state["survival"]["stopped"])


@pytest.mark.parametrize("way", ["requeue", "dependency"])
def test_cancel_ends_the_whole_chain(chain: Callable[..., Chain], way: str) -> None:
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
    row(f"`fp8launch cancel`, {way}", one, state["detail"])


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
    chain: Callable[..., Chain], tmp_path: Path, cause: str, request_: list[str]
) -> None:
    # A training script of one's own that does not know Megatron's arguments.
    script = tmp_path / "train.py"
    script.write_text("import argparse\nargparse.ArgumentParser().parse_args()\n")
    one = chain("--attempts", "5", *sets(*(word.replace("SCRIPT", str(script)) for word in request_)))
    state = one.over(90)
    assert state["state"] == "failed"
    assert len(one.record["attempts"]) == 1
    assert state["survival"]["stopped"].startswith(cause)
    row(f"the training fails: {cause}", one, state["survival"]["stopped"])


def test_a_torn_checkpoint_is_not_the_one_to_go_on_from(chain: Callable[..., Chain]) -> None:
    """What a power cut during a save leaves where the disk had not written everything: short files, a newer tracker."""
    one = chain("--attempts", "3")
    one.trained(60)
    one.site.slurm.run("scancel", one.job)
    one.site.slurm.wait_state(one.job, "CANCELLED")
    one.reaches(lambda: one.site.slurm.run("squeue", "-h").stdout == "", 30)
    newest = one.checkpoint
    for part in checkpoints.place(one.folder / "ckpt", newest).glob("*.distcp"):
        part.write_bytes(part.read_bytes()[:1000])
    done = one.site.run("resume", one.run, "--wait")
    assert done.returncode == 0, done.stderr
    start = int(re.search(r"from iteration (\d+)", done.stderr)[1])  # type: ignore[index]
    assert 0 < start < newest
    assert one.site.json("parse", one.run)["iterations"] == ITERATIONS
    row("newest checkpoint truncated, then `resume`", one, f"continues from iteration {start}, not {newest}")


def test_the_job_that_waits_is_cancelled(chain: Callable[..., Chain], undisturbed: dict[int, float]) -> None:
    """The run counted as completed in the middle, and neither `resume` nor `cancel` did anything about it."""
    one = chain("--attempts", "4", profile="continue_by: dependency\n")
    one.trained(40)
    waiting = one.record["waiting"]
    one.site.slurm.run("scancel", waiting)
    [rank] = one.ranks(int(one.record["attempts"][0]["nodes"][-1]))
    os.kill(rank.pid, signal.SIGKILL)
    one.reaches(lambda: "ended" in one.record["attempts"][0], 60)
    one.reaches(lambda: one.site.state(one.run)["state"] not in ("running", "pending"), 60)
    state = one.site.state(one.run)
    assert state["state"] == "interrupted" and f"job {waiting}" in state["detail"], state
    assert state["resumes_from"] >= 40
    # A resumed job that is cancelled before it begins is not the one that the next `resume` continues with.
    nodes = one.site.slurm.run("scontrol", "update", "nodename=node[1-4]", "state=drain", "reason=test")
    assert nodes.returncode == 0, nodes.stderr
    assert one.site.run("resume", one.run).returncode == 0
    cancelled = one.site.state(one.run)["jobs"][-1]
    one.site.slurm.run("scancel", cancelled)
    one.site.slurm.run("scontrol", "update", "nodename=node[1-4]", "state=resume")
    one.reaches(lambda: one.site.state(one.run)["state"] == "cancelled", 60)
    resumed = one.site.run("resume", one.run, "--wait")
    assert resumed.returncode == 0, resumed.stderr
    state = one.site.state(one.run)
    assert state["state"] == "completed" and state["jobs"][-1] != cancelled
    same_curve(one, undisturbed)
    row("the job that waits is cancelled, then `resume`", one, "interrupted")


def test_a_damaged_checkpoint_of_the_right_size_is_set_aside(chain: Callable[..., Chain]) -> None:
    """Bytes that rotted on the disk: only loading shows it. The run ended, and `resume` tried the same one again."""
    one = chain("--attempts", "3")
    one.trained(60)
    one.site.slurm.run("scancel", one.job)
    one.site.slurm.wait_state(one.job, "CANCELLED")
    one.reaches(lambda: one.site.slurm.run("squeue", "-h").stdout == "", 30)
    newest = one.checkpoint
    damaged = checkpoints.place(one.folder / "ckpt", newest)
    for part in damaged.glob("*.distcp"):
        part.write_bytes(bytes(len(part.read_bytes())))
    done = one.site.run("resume", one.run, "--wait")
    assert done.returncode == 0, done.stderr
    assert damaged.with_name(f"{damaged.name}.damaged").is_dir(), "nothing is deleted"
    causes = [attempt["cause"] for attempt in one.record["attempts"]]
    assert causes[1:] == ["damaged-checkpoint", "finished"], causes
    assert one.record["attempts"][2]["before"] < newest
    assert "is set aside as" in one.said
    assert one.site.json("parse", one.run)["iterations"] == ITERATIONS
    row("newest checkpoint damaged at its full size, then `resume`", one, one.record["attempts"][1]["then"])


def test_a_broken_batch_is_skipped(chain: Callable[..., Chain]) -> None:
    """Two nodes; the loss of iteration 50 is NaN wherever its batch is trained."""
    breaks = Path(__file__).parents[1] / "broken_loss.py"
    sets_ = sets("health.actions={nan: {rewind: 1}}", f"launch.script={breaks}", "env.BREAKS=nan,50,50")
    one = chain("--attempts", "2", "--nodes", "2", *sets_, *sets("megatron.log_interval=1"))
    assert one.over()["state"] == "completed"
    first, second = one.record["attempts"]
    assert (first["cause"], first["counts"], first["health"]["skipped"]) == ("rewind", False, [41, 50])
    assert (second["before"], second["cause"]) == (40, "finished")
    assert min(losses(one.logs()[1])) == 51
    report = one.site.json("parse", one.run)
    assert (report["status"], report["iterations"]) == ("ok", ITERATIONS - 10)
    row("a batch whose loss is NaN, with `nan: {rewind: 1}`", one, first["then"])

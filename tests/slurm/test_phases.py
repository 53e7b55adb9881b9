"""A training in phases on a real Slurm: a chain of attempts, each with its own arguments, over one checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cluster.processes import until
from launching import Site, losses, sets, train_here

pytestmark = [pytest.mark.train, pytest.mark.slow]

ITERATIONS = 60
MODEL = sets(f"train.iterations={ITERATIONS}", "batch.sequence=64", "checkpoint.dir=ckpt", "checkpoint.interval=10")
# The body is told to say more in its lines, which shows its arguments and changes nothing that is computed.
BODY = "{megatron: {log_num_zeros_in_grad: true}}"
PHASES = sets(f"phases={{warmup: {{iterations: 20}}, body: {BODY}, cooldown: {{iterations: 20}}}}")


def record(site: Site, run: str) -> dict[str, Any]:
    file = site.runs / run / "attempts.json"
    found: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {"attempts": []}
    return found


def reaches(site: Site, run: str, condition: Callable[[], object], seconds: float = 240) -> None:
    if not until(condition, seconds, 0.5):
        said = "".join(p.read_text() for p in (site.runs / run / "logs").glob("slurm-*.out"))
        raise AssertionError(f"{record(site, run)}\n{said}")


def over(site: Site, run: str) -> dict[str, Any]:
    reaches(site, run, lambda: record(site, run).get("finished") or record(site, run).get("stopped"))
    reaches(site, run, lambda: site.state(run)["state"] not in ("running", "pending"), 60)
    return site.state(run)


def logs(site: Site, run: str) -> list[Path]:
    """The attempts' logs in the order in which they began."""
    return [site.runs / run / "logs" / f"{one['name']}.log" for one in record(site, run)["attempts"]]


def is_body(log: Path) -> bool:
    return "num zeros:" in log.read_text()


def curve(found: list[Path]) -> dict[int, float]:
    """Loss by iteration over all attempts, without Megatron's second line of each: a mean with the first."""
    curves = [losses(log) for log in found]
    return {n: loss for one in curves for at, (n, loss) in enumerate(sorted(one.items())) if at != 1}


@pytest.fixture(scope="module")
def in_one(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of the same training in one piece."""
    return losses(train_here(tmp_path_factory.mktemp("in_one"), *MODEL, *sets("checkpoint.dir=null")))


def same_training(site: Site, run: str, in_one: dict[int, float]) -> None:
    found = curve(logs(site, run))
    assert len(found) > 0.8 * ITERATIONS
    for iteration, loss in found.items():
        if iteration > 2:
            assert loss == pytest.approx(in_one[iteration], rel=1e-6), f"iteration {iteration}"


@pytest.mark.parametrize("way", ["requeue", "dependency"])
def test_phases_go_on_by_themselves(site: Site, in_one: dict[int, float], way: str) -> None:
    """Without a single attempt more than one: the end of a phase is none that counts."""
    profile = site.folder / "site.yaml"
    profile.write_text(f"continue_by: {way}\n")
    run = site.submit("--backend", "sbatch", "--cluster", str(profile), *MODEL, *PHASES)
    assert over(site, run)["state"] == "completed"
    attempts = record(site, run)["attempts"]
    assert [(a["phase"], a["before"], a["after"], a["cause"], a["counts"]) for a in attempts] == [
        ("warmup", 0, 20, "phase-end", False),
        ("body", 20, 40, "phase-end", False),
        ("cooldown", 40, 60, "finished", True),
    ]
    assert [is_body(log) for log in logs(site, run)] == [False, True, False]
    assert len({a["job"] for a in attempts}) == (1 if way == "requeue" else 3)
    same_training(site, run, in_one)
    assert site.slurm.run("squeue", "-h").stdout == ""


def body_has_begun(site: Site, run: str) -> bool:
    found = logs(site, run)
    return len(found) > 1 and found[1].is_file() and bool(losses(found[1]))


# Long enough for a cancel to come within the body: 180 iterations of it after 20 of warm-up.
LONGER = 220
END_OF_BODY = LONGER - 20


def cut_in_the_body(site: Site) -> str:
    """A run cancelled in its body. On a busy machine the cancel may still come after it."""
    for _ in range(5):
        run = site.submit(
            "--backend", "sbatch", *MODEL, *PHASES, *sets(f"train.iterations={LONGER}", "checkpoint.interval=100")
        )
        reaches(
            site,
            run,
            lambda run=run: body_has_begun(site, run),
        )
        assert site.run("cancel", run).returncode == 0
        reaches(site, run, lambda: site.slurm.run("squeue", "-h").stdout == "", 60)
        saved = site.runs / run / "ckpt" / "latest_checkpointed_iteration.txt"
        if int(saved.read_text()) < END_OF_BODY:
            return run
    raise AssertionError("the body always ended before the cancel came")


def test_a_phase_that_was_cut_goes_on_in_the_same_phase(site: Site, tmp_path: Path) -> None:
    """Cancelled in the body, then resumed: the body's rest with the body's arguments, and the cool-down after it."""
    run = cut_in_the_body(site)
    assert site.state(run)["survival"]["phase"] == "body"
    resumed = site.run("resume", run, "--wait")
    assert resumed.returncode == 0, resumed.stderr
    attempts = record(site, run)["attempts"]
    assert [a["phase"] for a in attempts] == ["warmup", "body", "body", "cooldown"]
    assert [is_body(log) for log in logs(site, run)] == [False, True, True, False]
    assert [a["after"] for a in attempts][-2:] == [END_OF_BODY, LONGER]
    whole = train_here(tmp_path / "whole", *MODEL, *sets(f"train.iterations={LONGER}", "checkpoint.dir=null"))
    same_training(site, run, losses(whole))


@pytest.mark.drill
def test_time_limits_within_phases(site: Site) -> None:
    """A body longer than a job is cut at the limit, which counts, and gone on with; then comes the cool-down."""
    longer = sets("train.iterations=2000", "model.hidden_size=128", "checkpoint.keep=2", "checkpoint.interval=50")
    limit = sets("resources.time=2", "survive.stop_before=30")
    run = site.submit("--backend", "sbatch", "--attempts", "30", *MODEL, *PHASES, *longer, *limit)
    reaches(site, run, lambda: record(site, run).get("finished") or record(site, run).get("stopped"), 2400)
    attempts = record(site, run)["attempts"]
    causes = [(a["phase"], a["cause"], a["counts"]) for a in attempts]
    assert causes[0] == ("warmup", "phase-end", False)
    assert ("body", "time-limit", True) in causes
    assert causes[-2:] == [("body", "phase-end", False), ("cooldown", "finished", True)]
    report = site.json("parse", run)
    assert (report["status"], report["iterations"], report["iteration_last"]) == ("ok", 2000, 2000)
    assert [(p["name"], p["iterations"]) for p in report["phases"]] == [
        ("warmup", 20),
        ("body", 1960),
        ("cooldown", 20),
    ]


def test_a_run_may_wait_between_phases(site: Site) -> None:
    """`phase-end: stop` leaves the next phase to the user, who says `resume`."""
    one_pause = sets(
        "phases={first: {iterations: 20}, then: {}}", "train.iterations=40", "survive.rules={phase-end: stop}"
    )
    run = site.submit("--backend", "sbatch", *MODEL, *one_pause)
    state = over(site, run)
    assert "phase-end: the run stops between phases" in state["survival"]["stopped"]
    assert record(site, run)["attempts"][-1]["after"] == 20
    assert site.json("parse", run)["status"] == "incomplete"
    resumed = site.run("resume", run, "--wait")
    assert resumed.returncode == 0, resumed.stderr
    assert [(a["phase"], a["cause"]) for a in record(site, run)["attempts"]] == [
        ("first", "phase-end"), ("then", "finished"),
    ]  # fmt: skip

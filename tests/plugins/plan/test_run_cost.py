"""Cost and finish date of a whole run: the formula, what it needs, and what is refused."""

from __future__ import annotations

import json
import random
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from fp8launch.cli import run
from fp8launch.cluster.profile import Costs
from fp8launch.plugins.plan.run_cost import RunCost, Training, expected

HOUR = 3600.0


def cost_of(training: Training, **costs: Any) -> RunCost:
    found = expected(training, Costs(**costs))
    assert isinstance(found, RunCost), found
    return found


def simulated(training: Training, costs: Costs, seed: int) -> float:
    """Return the allocated seconds of one run whose failures are drawn at random."""
    random_times = random.Random(seed)
    assert costs.gpu_mtbf_hours is not None and training.checkpoint_s is not None
    mean = HOUR * costs.gpu_mtbf_hours / training.gpus
    piece, restart = training.checkpoint_s + costs.save_seconds, 60 * costs.restart_minutes
    allocated, to_failure = restart, random_times.expovariate(1 / mean)
    for _ in range(round(training.seconds / training.checkpoint_s)):
        need = piece
        while to_failure < need:
            allocated += to_failure
            need, to_failure = piece + restart, random_times.expovariate(1 / mean)
        allocated += need
        to_failure -= need
    return allocated


def test_the_expected_time_is_the_mean_of_simulated_runs() -> None:
    training = Training(gpus=1024, seconds=200 * HOUR, checkpoint_s=2 * HOUR, job_s=None)
    costs = Costs(gpu_mtbf_hours=10240, restart_minutes=30, save_seconds=120)
    found = cost_of(training, gpu_mtbf_hours=10240, restart_minutes=30, save_seconds=120)
    runs = [simulated(training, costs, seed) for seed in range(2000)]
    assert found.allocated == pytest.approx(sum(runs) / len(runs), rel=0.01)
    assert 0.75 < found.goodput < 0.95
    assert found.jobs == 1 + found.failures


def test_without_failures_only_checkpoints_restarts_and_queue_take_time() -> None:
    training = Training(gpus=8, seconds=10 * HOUR, checkpoint_s=HOUR, job_s=4 * HOUR)
    found = cost_of(training, save_seconds=36, restart_minutes=6, queue_hours=2)
    assert found.failures == 0
    assert found.jobs == 3
    assert found.allocated == pytest.approx(10.1 * HOUR + 3 * 360)
    assert found.waiting == pytest.approx(6 * HOUR)
    assert cost_of(training).goodput == 1


@pytest.mark.parametrize(
    ("training", "costs", "said"),
    [
        (Training(16384, 1000 * HOUR, None, None), {"gpu_mtbf_hours": 50000}, "because it saves no checkpoints"),
        (Training(16384, 1000 * HOUR, 90 * HOUR, None), {"gpu_mtbf_hours": 50000}, "between two checkpoints"),
        (Training(8, HOUR, HOUR, HOUR), {"restart_minutes": 60}, "whole time limit"),
    ],
)
def test_a_run_that_cannot_finish_has_no_date(training: Training, costs: dict[str, Any], said: str) -> None:
    found = expected(training, Costs(**costs))
    assert isinstance(found, str) and said in found


def profile(tmp_path: Path, costs: str) -> str:
    file = tmp_path / "site.yaml"
    file.write_text(f"costs: {{{costs}}}\n")
    return str(file)


def test_estimate_states_money_energy_and_finish(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    site = profile(tmp_path, "gpu_hour: 2, kwh: 0.1, gpu_watts: 1000, pue: 1.5, currency: EUR")
    words = ["estimate", "llama8b_fp8", "--cluster", site, "--tokens", "1e12", "--tokens-per-second-per-gpu", "10000"]
    assert run([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["run_cost"]
    hours = 1e12 / 10000 / 3600
    assert found["gpu_hours"] == pytest.approx(hours)
    assert found["energy_kwh"] == pytest.approx(1.5 * hours)
    assert found["money"] == pytest.approx(2.15 * hours)
    finish = datetime.strptime(found["finish"], "%Y-%m-%dT%H:%MZ").replace(tzinfo=timezone.utc)
    assert (finish - datetime.now(timezone.utc)).total_seconds() == pytest.approx(HOUR * hours / 8, rel=0.01)
    assert run(words) == 0
    shown = capsys.readouterr().out
    assert "money (EUR)" in shown and "finish (UTC)" in shown and "it needs about" in shown.lower()


def test_estimate_says_why_there_is_no_cost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["estimate", "llama8b_fp8", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["run_cost"] is None and "no `costs`" in found["run_cost_reason"]
    assert run(["estimate", "llama8b_fp8", "--tokens", "1e12"]) == 0
    shown = capsys.readouterr()
    assert "No cost and finish date: the cluster profile has no `costs`" in shown.err
    assert "953,675 steps" in shown.out


def test_the_tokens_asked_for_are_the_length_of_everything_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """Without `costs` in the profile, --tokens had no effect: GPU-hours covered only the recipe's 50 steps."""
    words = ["estimate", "llama8b_fp8", "--tokens-per-second-per-gpu", "10000", "--tokens", "1e12", "--json"]
    assert run(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["steps"] == 953675 and found["tokens"] == 953675 * 128 * 8192
    assert found["gpu_hours"] == pytest.approx(1e12 / 10000 / 3600)


@pytest.mark.parametrize(
    ("costs", "more", "said"),
    [
        ("kwh: 0.1", [], "costs.kwh"),
        ("gpu_hour: -1", [], "costs.gpu_hour"),
        ("pue: 0.5", [], "costs.pue"),
        ("gpu_mtbf_hours: 0", [], "costs.gpu_mtbf_hours"),
        ("gpu_hours: 2", [], "gpu_hour"),
        ("gpu_hour: 2", ["--tokens", "nan"], "--tokens"),
        ("gpu_hour: 2", ["--tokens", "inf"], "--tokens"),
    ],
)
def test_nonsense_is_refused_with_its_field(
    costs: str, more: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["estimate", "llama8b_fp8", "--cluster", profile(tmp_path, costs), *more]) != 0
    assert said in capsys.readouterr().err

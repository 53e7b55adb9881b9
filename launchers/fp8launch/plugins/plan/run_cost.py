"""Cost of a whole run and its finish date, with the prices, queue time and failures of a cluster profile.

A failure of any GPU ends the job, and the next job continues from the last checkpoint. For failures with exponentially
distributed times, J. T. Daly (A higher order estimate of the optimum checkpoint interval for restart dumps, Future
Generation Computer Systems 22, 2006, section 3) gives the exact expectation of the allocated time:

    M exp(R / M) (exp((tau + delta) / M) - 1) T / tau

with T seconds of training, a checkpoint every tau seconds that takes delta, a restart of R seconds, which may fail as
well, and M, the mean time between failures of the job: a GPU's divided by their number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from functools import partial
from typing import Any

from fp8launch.cli.output import echo, show_table
from fp8launch.cluster.profile import Cluster, Costs
from fp8launch.diagnostics import error
from fp8launch.megatron.model_arithmetic import whole
from fp8launch.plugins.estimate.estimates import Estimate, Prediction
from fp8launch.wording import counted

# Beyond this the run makes no progress worth a date: a piece of work would be tried e^20 times.
_MOST_EXPONENT = 20.0
_LATEST = datetime(9999, 1, 1, tzinfo=timezone.utc)


@dataclass(frozen=True)
class Training:
    """The training to be done: GPUs, seconds without any interruption, and seconds between checkpoints.

    `checkpoint_s` is None if the run saves none. `job_s` is the time limit of a job, None without one.
    """

    gpus: int
    seconds: float
    checkpoint_s: float | None
    job_s: float | None


@dataclass(frozen=True)
class RunCost:
    """Expected values of a whole run, in seconds. `allocated` includes lost work, checkpoints and restarts."""

    training: Training
    allocated: float
    waiting: float
    failures: float
    jobs: float

    @property
    def goodput(self) -> float:
        """Share of the allocated time that trains."""
        return self.training.seconds / self.allocated

    @property
    def gpu_hours(self) -> float:
        return self.allocated * self.training.gpus / 3600


def expected(training: Training, costs: Costs) -> RunCost | str:
    """Return the expected time of a run, or why it would not finish."""
    work = training.seconds
    interval = min(training.checkpoint_s or work, work)
    saving = costs.save_seconds if training.checkpoint_s is not None else 0.0
    restart = 60 * costs.restart_minutes
    busy, failures = work * (1 + saving / interval), 0.0
    if costs.gpu_mtbf_hours is not None:
        mtbf = 3600 * costs.gpu_mtbf_hours / training.gpus
        if (interval + saving + restart) / mtbf > _MOST_EXPONENT:
            lost = "between two checkpoints" if training.checkpoint_s is not None else "because it saves no checkpoints"
            return (
                f"a failure is expected every {mtbf / 3600:.2g} hours on {counted(training.gpus, 'GPU')}, so the run "
                f"would not get through the {(interval + restart) / 3600:.2g} hours that it can lose {lost}"
            )
        tries = math.exp(restart / mtbf) * math.expm1((interval + saving) / mtbf)
        busy = mtbf * tries * work / interval
        failures = busy / mtbf
    full = 1
    if training.job_s is not None:
        if restart >= training.job_s:
            return f"a restart takes {restart / 60:g} minutes, the whole time limit of a job"
        full = max(math.ceil(busy / (training.job_s - restart)), 1)
    jobs = full + failures
    return RunCost(training, busy + full * restart, jobs * 3600 * costs.queue_hours, failures, jobs)


def run_cost(each: Sequence[Estimate], cluster: Cluster) -> Prediction | str:
    """Return cost and finish date of a run or its phases, for `estimate`."""
    costs = cluster.costs
    if costs is None:
        return "the cluster profile has no `costs`"
    if costs.kwh is not None and costs.gpu_watts is None:
        message = "a price of energy needs the power of a GPU"
        raise error("costs", message, "cluster profile: costs.kwh", "set `costs.gpu_watts:`, or remove `kwh`")
    training = _training(each)
    found = training if isinstance(training, str) else expected(training, costs)
    if isinstance(found, str):
        return found
    try:
        finish = datetime.now(timezone.utc) + timedelta(seconds=found.allocated + found.waiting)
    except OverflowError:
        finish = _LATEST
    if finish >= _LATEST:
        return "the run would not finish before the year 9999"
    jobs = each[0].prepared.jobs_at_most
    fields = as_json(found, costs, finish)
    return Prediction({"run_cost": fields, "run_cost_reason": None}, partial(_show, fields, found, costs, jobs))


def _training(each: Sequence[Estimate]) -> Training | str:
    seconds = 0.0
    for one in each:
        if one.cost.step_time_s is None:
            return "the speed is unknown; state it with --tokens-per-second-per-gpu"
        if one.cost.steps is not None:
            seconds += one.cost.steps * one.cost.step_time_s
    first = each[0]
    step_s = first.cost.step_time_s
    assert step_s is not None  # checked above
    if not seconds:
        return "the length of the run is unknown; state it with --tokens"
    interval = whole(first.run.arguments, "save_interval") if first.run.arguments.get("save") else None
    job_s = 3600 * first.prepared.loaded.recipe.resources.hours
    return Training(first.cost.gpus, seconds, interval and interval * step_s, job_s or None)


def as_json(found: RunCost, costs: Costs, finish: datetime) -> dict[str, Any]:
    """Return expected values as JSON: hours, kWh and money. A value whose price or power is unknown is null."""
    energy = money = None
    if costs.gpu_watts is not None:
        energy = found.gpu_hours * costs.gpu_watts / 1000 * costs.pue
    if costs.gpu_hour is not None or costs.kwh is not None:
        money = found.gpu_hours * (costs.gpu_hour or 0.0) + (energy or 0.0) * (costs.kwh or 0.0)
    return {
        "training_hours": found.training.seconds / 3600,
        "allocated_hours": found.allocated / 3600,
        "queue_hours": found.waiting / 3600,
        "goodput": found.goodput,
        "failures": found.failures,
        "jobs": found.jobs,
        "gpu_hours": found.gpu_hours,
        "energy_kwh": energy,
        "money": money,
        "currency": costs.currency,
        "finish": finish.strftime("%Y-%m-%dT%H:%MZ"),
    }


def _show(fields: dict[str, Any], found: RunCost, costs: Costs, jobs_at_most: int) -> None:
    days = (found.allocated + found.waiting) / 86400
    failures = "no failures: the profile has no gpu_mtbf_hours"
    if costs.gpu_mtbf_hours is not None:
        failures = f"{found.failures:,.1f} failures, one in {costs.gpu_mtbf_hours:,.0f} hours of a GPU"
    rows = [
        ("training (h)", f"{found.training.seconds / 3600:,.1f}", "steps only"),
        ("allocated (h)", f"{found.allocated / 3600:,.1f}", f"also checkpoints, restarts and lost work; {failures}"),
        ("goodput", f"{found.goodput:.1%}", "training over allocated time"),
        ("queue (h)", f"{found.waiting / 3600:,.1f}", f"{found.jobs:,.1f} jobs"),
        ("GPU-hours", f"{found.gpu_hours:,.0f}", "allocated"),
    ]
    if fields["energy_kwh"] is not None:
        rows.append(("energy (kWh)", f"{fields['energy_kwh']:,.0f}", f"{costs.gpu_watts:g} W, PUE {costs.pue:g}"))
    if fields["money"] is not None:
        prices = []
        if costs.gpu_hour is not None:
            prices.append(f"{costs.gpu_hour:g} for a GPU-hour")
        if costs.kwh is not None:
            prices.append(f"{costs.kwh:g} for a kWh")
        rows.append((f"money ({costs.currency})", f"{fields['money']:,.0f}", ", ".join(prices)))
    rows.append(("finish (UTC)", fields["finish"].replace("T", " ").rstrip("Z"), f"{days:,.1f} days from now"))
    show_table(("expected for the run", "(value)", "rests on"), rows)
    if found.training.checkpoint_s is None and found.failures:
        echo("The run saves no checkpoints, so every failure starts it again from the beginning.")
    if found.jobs > jobs_at_most + 0.5:
        echo(f"It needs about {found.jobs:,.0f} jobs; the recipe allows {jobs_at_most}: raise survive.attempts.")

"""Find the reference of the host in reference_rates.csv, from a host's rates and from runs that waited for it.

    python benchmarks/plan/host_reference.py rates_1.json rates_2.json dense.log experts.log dense_bf16.log

The files are results of benchmarks/h200/lists/host_x1.txt on one machine. Each run gives the factor by which this host
is slower than the one that the speed model assumes for the GPU: the predicted step then agrees with the measured one.
The measured time of small layers, divided by the factor, is the reference.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from measured_runs import measured_run
from published_runs import Run

from fp8launch.hardware.gpus import gpu, gpu_of_model
from fp8launch.plugins.plan.calibration import parsed
from fp8launch.plugins.plan.speeds import Speeds, speeds
from fp8launch.plugins.plan.step_time import StepTime, step_time_at

# A step must change by at least this share of a change of the host's speed. Otherwise its other errors count as the
# host's.
LEAST_CHANGE = 0.4
FASTEST, SLOWEST = 0.25, 8.0


def step_on_host(run: Run, slowness: float) -> StepTime:
    """Predict a run on a host that launches `slowness` times as slowly as the model's host for this GPU."""
    known: Speeds | None = speeds(gpu(run.gpu))
    assert known is not None, run.gpu
    device = replace(known.device, host=known.device.host.slower(slowness))
    step = step_time_at(run.args, run.gpus, run.global_batch, replace(known, device=device))
    assert step is not None, run.name
    return step


def slowness_of(run: Run) -> float | None:
    """Return how much slower the run's host is than the model's; None if the run does not wait for its host enough."""
    low, high = FASTEST, SLOWEST
    if not step_on_host(run, high).tokens_per_s_per_gpu < run.measured < step_on_host(run, low).tokens_per_s_per_gpu:
        return None
    while high / low > 1.0001:
        middle = math.sqrt(low * high)
        if step_on_host(run, middle).tokens_per_s_per_gpu > run.measured:
            low = middle
        else:
            high = middle
    change = step_on_host(run, 1.1 * low).ms / step_on_host(run, low).ms - 1
    return low if change >= LEAST_CHANGE * 0.1 else None


def mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="rates (.json) and logs of one machine")
    rates: list[float] = []
    runs: list[Run] = []
    gpus = set()
    for file in parser.parse_args().files:
        if file.suffix == ".json":
            measured = parsed(file.read_bytes(), str(file))
            card = gpu_of_model(measured.device)
            if card is None or ("host", "small layers") not in measured.rates:
                parser.error(f"{file}: the host of a GPU was not measured")
            gpus.add(card.name)
            rates.append(measured.rates["host", "small layers"])
            print(f"{file.stem}: {rates[-1]:.0f} microseconds for a small layer")
            continue
        run = measured_run(file, file.stem)
        if run is None:
            parser.error(f"{file} has no step time, or does not show Megatron's arguments")
        runs.append(run)
        gpus.add(run.gpu)
    if not rates or not runs:
        parser.error("needs rates and logs")
    if len(gpus) > 1:
        parser.error(f"results of several GPU types: {', '.join(sorted(gpus))}")
    references = []
    for run in runs:
        slowness = slowness_of(run)
        if slowness is None:
            print(f"{run.name}: does not tell the host's speed, because too little of a step waits for it")
            continue
        references.append(mean(rates) / slowness)
        print(f"{run.name}: {slowness:.2f} times as slow as the model's host, reference {references[-1]:.0f}")
    if not references:
        print("No reference: none of the runs waited for its host.")
        return 1
    middle = mean(references)
    apart = max(max(references) / middle, middle / min(references), max(rates) / mean(rates)) - 1
    print(f"{runs[0].gpu},host,small layers,{middle:.0f},benchmarks/plan/kernel_rates.md  (± {apart:.0%})")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

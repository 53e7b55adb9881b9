"""Compare predictions with and without the rates of the machine that ran: the table of kernel_rates.md.

    python benchmarks/plan/calibrated.py

The host's reference comes from these machines. The last column takes it from the other machine alone.
"""

from __future__ import annotations

import statistics
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, replace

from measured_runs import sittings
from memory import ARCHIVE

from fp8launch.hardware.gpus import gpu
from fp8launch.plugins.plan.calibration import Correction, Rates, corrections, parsed
from fp8launch.plugins.plan.cluster_speeds import corrected
from fp8launch.plugins.plan.speeds import Speeds, speeds
from fp8launch.plugins.plan.step_time import step_time_at

# Measurements, by the machine that they ran on: the name of the one with its rates.
MACHINES = {
    "2026-11-28-host-h100": "2026-11-28-host-h100",
    "2026-11-28-host-h100x2": "2026-11-28-host-h100x2",
    "2026-11-28-several-x2": "2026-11-28-host-h100x2",
}
# The reference in microseconds that host_reference.py finds with the runs of the other machine alone.
OTHERS = {"2026-11-28-host-h100": 150.0, "2026-11-28-host-h100x2": 130.0}
HOST = "host", "small layers"


@dataclass(frozen=True)
class Errors:
    """The errors of predicted tokens/s/GPU of a run: without rates, with them, with the other machine's reference."""

    name: str
    before: float
    after: float
    by_other: float


def errors() -> Iterator[Errors]:
    """Yield the errors of every run on machines whose rates were measured."""
    with tarfile.open(ARCHIVE) as archive:
        rates = {machine: _rates(archive, f"{machine}/rates_1.json") for machine in OTHERS}
    for run in sittings(lambda sitting: sitting in MACHINES):
        machine = MACHINES[run.name.split()[0]]
        known = speeds(gpu(run.gpu))
        assert known is not None, run.name
        found = corrections(rates[machine], gpu(run.gpu))
        by_other = [_with_reference(one, OTHERS[machine], rates[machine]) for one in found]
        off = []
        for at in (known, corrected(known, found), corrected(known, by_other)):
            off.append(_predicted(run.args, run.gpus, run.global_batch, at) / run.measured - 1)
        yield Errors(run.name, *off)


def _rates(archive: tarfile.TarFile, name: str) -> Rates:
    file = archive.extractfile(name)
    assert file is not None, name
    return parsed(file.read(), name)


def _with_reference(one: Correction, reference: float, rates: Rates) -> Correction:
    return replace(one, factor=reference / rates.rates[HOST]) if one.group == HOST[0] else one


def _predicted(args: dict[str, object], gpus: int, global_batch: int, at: Speeds) -> float:
    step = step_time_at(args, gpus, global_batch, at)
    assert step is not None
    return step.tokens_per_s_per_gpu


def main() -> None:
    found = list(errors())
    print("| run | without rates | with rates | with the other machine's reference |\n|---|---|---|---|")
    for one in found:
        print(f"| {one.name} | {one.before:+.1%} | {one.after:+.1%} | {one.by_other:+.1%} |")
    for name, off in (
        ("without rates", [one.before for one in found]),
        ("with rates", [one.after for one in found]),
        ("with the other machine's reference", [one.by_other for one in found]),
    ):
        sizes = [abs(error) for error in off]
        print(f"{name}: median {statistics.median(sizes):.1%}, worst {max(sizes):.0%}")


if __name__ == "__main__":
    main()

"""Notes on one run: what its logs lack, and where they contradict what was stated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress

from fp8launch.logs import LoggedProcesses, ParsedLog
from fp8launch.logs.identify import foreign_program, why_no_iterations
from fp8launch.megatron.flops import miscounted
from fp8launch.report.machines import Machines
from fp8launch.report.run_setup import RunSetup
from fp8launch.report.steady_state import SteadyState


def run_notes(
    logs: Sequence[ParsedLog],
    attempts: LoggedProcesses,
    steady: SteadyState,
    setup: RunSetup,
    stated_gpu: str | None,
    machines: Machines,
) -> list[str]:
    """Return the notes on a run. `stated_gpu` is the GPU that the user named."""
    notes = list(steady.notes)
    if setup.gpu and not setup.peak_tflops:
        notes.append(f"{setup.gpu} has no {setup.dtype} tensor cores, so no MFU")
    missing = []
    if not setup.world_size:
        missing.append("world size")
    if not setup.seq_length:
        missing.append("sequence length")
    if steady.lines and missing:
        notes.append(f"the log does not contain the {' and '.join(missing)}")
    sizes = set()
    for _, process in attempts:
        if process.head.world_size:
            sizes.add(process.head.world_size)
    if len(sizes) > 1:
        notes.append(f"the attempts ran on different world sizes: {sorted(sizes)}")
    duplicates = sum(log.duplicates for log in logs)
    if duplicates:
        notes.append(f"{duplicates} iteration lines were printed by more than one rank and counted once")
    if stated_gpu and machines.gpu not in (None, stated_gpu):
        notes.append(f"the GPU is set to {stated_gpu}, but the nodes have {', '.join(machines.gpus)}")
    if steady.lines:
        notes += miscounted(setup.arguments)
    else:
        notes += _without_iterations(logs)
    return notes


def _without_iterations(logs: Sequence[ParsedLog]) -> Iterator[str]:
    """Yield what each log is. A log that shows a failure explains itself, unless another program wrote it."""
    for log in logs:
        failed = any(process.ending.failure for process in log.processes)
        with suppress(OSError):  # it was removed since it was read
            if not failed:
                yield f"{log.path.name}: {why_no_iterations(log.path)}"
            elif program := foreign_program(log.path):
                yield f"{log.path.name}: it is a log of {program}, of which only the failure is read"

"""The progress of a run, from the beginning and the end of its newest log, so that a long log takes no longer."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8launch.injob.regular_files import open_regular
from fp8launch.injob.supervisor.health_rules import HealthProblem, errors_of
from fp8launch.logs import Iteration, IterationTable, Scan, Scanner
from fp8launch.logs.field_names import NOT_FINITE
from fp8launch.report.outcome import health_of_going, limits_of, node_times_of
from fp8launch.report.read_run import stated_arguments
from fp8launch.rundir.attempts import health_actions
from fp8launch.rundir.run_dir import RunFolder
from fp8launch.schedulers.base import JobState
from fp8launch.untyped import as_int

# Bytes that are read of a log: at its beginning the start of the run, at its end the newest iterations.
HEAD_BYTES, TAIL_BYTES = 1 << 20, 1 << 19
# Speed is the median over this many of the newest iterations.
RECENT = 20
# The stages of a start, each with a text that Megatron's or our log has from then on (megatron/training/training.py of
# Megatron-Core 0.17 to 0.19).
STAGES = (
    ("imports", b""),
    ("distributed set-up", b"using world size:"),
    ("model", b"[after megatron is initialized]"),
    ("data", b"scheduler are built]"),
    ("first iteration", b"[before the start of training step]"),
)
QUEUED, STARTING, IMAGE = "queued", "starting", "image"


@dataclass(frozen=True)
class Progress:
    """The progress of a run. Times are in ms or s, memory in MiB; None if the log does not contain a value.

    `stage` is set until the first iteration has been logged. `losses` and `step_times_ms` belong to the newest
    iterations, oldest first; a loss that is NaN is missing, and a step that is much longer than most (the first, or one
    with a checkpoint) is shortened, because it would hide all others.
    """

    stage: str | None = None
    iteration: int | None = None
    planned: int | None = None
    loss: float | None = None
    step_time_ms: float | None = None
    tokens_per_s_per_gpu: float | None = None
    tflops_per_gpu: float | None = None
    peak_memory_mib: float | None = None
    eta_s: float | None = None
    health: tuple[HealthProblem, ...] = ()
    losses: tuple[float, ...] = ()
    step_times_ms: tuple[float, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Return the fields without the series."""
        fields = dict(vars(self))
        del fields["losses"], fields["step_times_ms"]
        fields["health"] = [problem.as_json() for problem in self.health]
        return fields

    @property
    def unhealthy(self) -> str:
        """The codes of the errors in the training's health; empty for a healthy run."""
        codes = ", ".join(problem.code for problem in errors_of(self.health))
        return f"unhealthy: {codes}" if codes else ""

    @property
    def position(self) -> str:
        """The iteration, or the stage of a run that has none yet."""
        if self.iteration is None:
            return self.stage or ""
        if self.planned:
            return f"{self.iteration}/{self.planned}"
        return str(self.iteration)


def progress_of(run: RunFolder, manifest: Mapping[str, Any], state: JobState) -> Progress:
    """Return the progress of a run, from its manifest, its state and its newest log."""
    attempts = run.attempts()
    running = state.status == "running"
    if not attempts:
        return Progress({"pending": QUEUED, "running": STARTING}.get(state.status))
    head, tail = _ends(attempts[-1].log)
    scan = _scanned(head, tail)
    if len(scan.table):
        # The iterations before a rewind are given up: nothing continues from them.
        rewound = [action.attempt for action in health_actions(run) if action.rewound_to is not None]
        earlier = [_newest_iterations(one.log) for one in attempts[-2:-1] if one.log.stem not in rewound]
        return _of_iterations(scan, earlier, manifest, running)
    return Progress(_stage(head, manifest) if running else None)


def _newest_iterations(log: Path) -> IterationTable:
    """Return the last iterations of an earlier attempt, with which a resume is compared."""
    head, tail = _ends(log)
    return _scanned(b"", b"\n" + (tail or head[-TAIL_BYTES:])).table


def _of_iterations(
    scan: Scan, earlier: Sequence[IterationTable], manifest: Mapping[str, Any], running: bool
) -> Progress:
    every = list(scan.table)
    last = every[-1]
    times, tflops = map(scan.table.column, ("step_time_ms", "tflops_per_gpu"))
    step = _median(times[-RECENT:])
    arguments = stated_arguments(manifest)
    total = as_int(last.planned or arguments.get("train_iters"))
    if not _count(total):
        total = None
    eta = None
    if running and step and total:
        eta = max(total - last.number, 0) * step / 1000
    health = health_of_going(
        [*earlier, scan.table],
        [one for _, one in scan.validations],
        arguments,
        limits_of(manifest),
        node_times_of(scan.evidence),
    )
    # The second line of a process may have the mean loss of two iterations.
    separate = [one for row, one in enumerate(every) if row != 1]
    losses = [one.loss for one in separate if one.loss is not None and math.isfinite(one.loss)]
    return Progress(
        iteration=last.number,
        planned=total,
        loss=_last_loss(separate[-RECENT:]),
        step_time_ms=step,
        tokens_per_s_per_gpu=_tokens(last.values.get("global_batch_size"), arguments, manifest, step),
        tflops_per_gpu=_median(tflops[-RECENT:]),
        peak_memory_mib=max((peak for _, peak in scan.memory), default=None),
        eta_s=eta,
        health=health,
        step_times_ms=_shortened(times),
        losses=tuple(losses),
    )


def _last_loss(iterations: Sequence[Iteration]) -> float | None:
    """Return the newest loss; None if it has become NaN since. A skipped step has no loss."""
    for one in reversed(iterations):
        if NOT_FINITE in one.values or one.values.get("nan_iterations", 0) > 0:
            return None
        if one.loss is not None and math.isfinite(one.loss):
            return one.loss
    return None


def _known(values: Iterable[float]) -> list[float]:
    """Return the finite, nonzero values: 0 means a value too small to be printed."""
    return [value for value in values if value and math.isfinite(value)]


def _median(values: Iterable[float]) -> float | None:
    known = _known(values)
    return statistics.median(known) if known else None


def _shortened(times: Iterable[float]) -> tuple[float, ...]:
    known = _known(times)
    if not known:
        return ()
    longest = 2 * statistics.median(known)
    return tuple(min(ms, longest) for ms in known)


def _tokens(
    batch: float | None, arguments: Mapping[str, object], manifest: Mapping[str, Any], step_ms: float | None
) -> float | None:
    """Tokens per second and GPU of steps of this length."""
    layout = manifest.get("layout") or {}
    sequences = _count(batch or layout.get("global_batch"))
    length, world = _count(arguments.get("seq_length")), _count(layout.get("world"))
    if not (step_ms and sequences and length and world):
        return None
    return sequences * length / world / step_ms * 1000


def _count(number: object) -> float | None:
    """Return a size that a run can have, None for anything else: a manifest may contain anything."""
    if isinstance(number, (int, float)) and not isinstance(number, bool) and 0 < number < 1e12:
        return float(number)
    return None


def _ends(log: Path) -> tuple[bytes, bytes]:
    """Return the beginning of a log, and its end unless the beginning includes it."""
    try:
        with open_regular(log, follow=False) as stream:
            head = stream.read(HEAD_BYTES)
            size = stream.seek(0, 2)
            start = max(len(head), size - TAIL_BYTES)
            stream.seek(start)
            return head, stream.read(TAIL_BYTES)
    except OSError:
        return b"", b""


def _scanned(head: bytes, tail: bytes) -> Scan:
    scanner = Scanner()
    # Only whole lines: a torn last line is not a number yet.
    scanner.feed(head[: head.rfind(b"\n") + 1])
    if tail:
        scanner.feed(tail[tail.find(b"\n") + 1 : tail.rfind(b"\n") + 1])
    return scanner.scan


def _stage(head: bytes, manifest: Mapping[str, Any]) -> str:
    """Return the newest stage that a log without iterations shows."""
    if head.strip():
        return [stage for stage, mark in STAGES if mark in head][-1]
    if manifest.get("runtime") in (None, "none"):
        return STARTING
    return IMAGE


def duration(seconds: float | None) -> str:
    """Return a time in two units, such as 2h05m; empty for None."""
    if seconds is None or not math.isfinite(seconds):
        return ""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"

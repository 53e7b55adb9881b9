"""Notes on a comparison: what limits the use of its numbers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from fp8launch.report.differences import affects_speed, differing_facts
from fp8launch.report.entry import Entry
from fp8launch.report.grouping import ComparisonRow
from fp8launch.report.run_data import NOT_SUBMITTED, RunData
from fp8launch.wording import counted

# A longer list of names is cut, with a note.
_MOST_NAMES = 8


def row_notes(row: ComparisonRow, recomputed: bool) -> list[str]:
    """Return the notes on one row. `recomputed` says that TFLOP/s are not those of the logs."""
    notes = list(row.notes)
    if recomputed and any(not run.report.tflops_per_gpu_recomputed for run in row.good):
        notes.append("TFLOP/s are the log's own: its arguments do not determine them")
    names = ", ".join(filter(affects_speed, differing_facts(row.runs)))
    if names:
        notes.append(f"its runs differ in {names}")
    for run in row.good:
        notes += [f"{run.name}: {problem.sentence}" for problem in run.report.health]
    notes += dict.fromkeys(chain.from_iterable(run.report.notes for run in row.good))
    return notes


def comparison_notes(entries: Sequence[Entry], recomputed: bool) -> list[str]:
    """Return the notes on all rows together."""
    rows = [entry.row for entry in entries]
    notes = []
    if recomputed:
        notes.append("some logs count FLOPs in another way than Megatron does today: TFLOP/s are recomputed for all")
    absent: list[RunData] = []
    peaks: set[object] = set()
    for row in rows:
        for run in row.runs:
            if run.absent:
                absent.append(run)
            if run.good and run.report.mfu_denominator:
                peaks.add(run.report.mfu_denominator["peak_tflops"])
    notes += filter(None, map(_merged, entries))
    if absent:
        notes.append(_note_of_absent(absent))
    if any(map(_within_single_runs, entries)):
        notes.append(
            "the interval between two single runs covers their iterations, not the differences between runs: "
            "--repeat 3 measures them"
        )
    if len(peaks) > 1:
        notes.append("MFU divides by the peak of each variant's own data type: compare speeds, not MFUs")
    return notes


def _within_single_runs(entry: Entry) -> bool:
    ratios = [entry.speedup, entry.efficiency.ratio if entry.efficiency else None]
    return any(ratio.interval.covers == "iterations" for ratio in ratios if ratio and ratio.interval)


def _merged(entry: Entry) -> str:
    """Name the runs that one row stands for, with the mean loss of several seeds; empty for a single run."""
    runs = entry.row.runs
    if len(runs) < 2:
        return ""
    what = counted(len(runs), "repeat")
    seeds = {str(run.facts["seed"]) for run in runs if "seed" in run.facts}
    if len(seeds) > 1:
        numbers = sorted(seeds, key=lambda seed: (len(seed), seed))
        what = f"{counted(len(seeds), 'seed')} ({_some(numbers)})"
        if len(runs) > len(seeds):
            what += f" in {counted(len(runs), 'run')}"
    loss = entry.loss
    if loss and loss.interval:
        what += f", mean loss {loss.end:.4f}, 95 % interval {loss.interval.low:.4f} to {loss.interval.high:.4f}"
    return f"{entry.row.name}: {what}: {_some([run.name for run in runs])}"


def _some(names: Sequence[str]) -> str:
    """Join the first names, with the number of the others."""
    shown = list(names[:_MOST_NAMES])
    if len(names) > _MOST_NAMES:
        shown.append(f"and {len(names) - _MOST_NAMES} more")
    return ", ".join(shown)


def _note_of_absent(runs: Sequence[RunData]) -> str:
    text = f"{counted(len(runs), 'run')} of the study missing: {_some([run.name for run in runs])}"
    if any(run.absent == NOT_SUBMITTED for run in runs):
        text += "; repeat the same `submit` to submit the rest"
    return text

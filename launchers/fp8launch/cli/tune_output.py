"""What `tune` prints and writes: the changes that it would try, then the table, the picture and the recipe."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8launch.cli.output import echo, eprint, show_json, show_table
from fp8launch.diagnostics import ANSWER_IS_NO
from fp8launch.rundir.atomic_io import write_atomically
from fp8launch.rundir.study import StudyFolder
from fp8launch.submit.submission import now
from fp8launch.tuning.candidates import Base
from fp8launch.tuning.judgement import standing
from fp8launch.tuning.knobs import Knob
from fp8launch.tuning.knobs import knobs as all_knobs
from fp8launch.tuning.picture import draw
from fp8launch.tuning.recipe_text import recipe_text
from fp8launch.tuning.record import Record, folder_of
from fp8launch.tuning.rows import Row, percent, rows
from fp8launch.tuning.state import Variant, describe, seconds_spent, trials_run

# Beside the state of a search: the SHA-256 of the recipe that it wrote last.
_WRITTEN = "written.sha256"


def show_candidates(record: Record, chosen: Sequence[Knob]) -> None:
    """Print what a search would try, the best prediction first, and what the check refuses."""
    touches = {knob.name: ", ".join(sorted(knob.touches - {"speed"})) for knob in chosen}
    for number, start in enumerate(record.state.starts):
        table = []
        for one in sorted(start.candidates, key=lambda candidate: -candidate.gain):
            keys = " ".join(f"{key}={value}" for key, value in record.overrides[number][one.name].items())
            memory = "" if one.memory_gib is None else f"{one.memory_gib:+.1f}"
            table.append((one.name, one.knob, percent(one.gain), memory, touches.get(one.knob, ""), keys))
        columns = ("change", "knob", "predicted", "memory (GiB)", "also touches", "keys")
        show_table(columns, table, title=start.name if len(record.state.starts) > 1 else None)
        for refused in record.refused[number]:
            eprint(f"refused by the check: {refused.name}: {refused.why}")


@dataclass(frozen=True)
class Ended:
    """A search that has ended, and what it was about. `overrides` are the user's."""

    record: Record
    why: str
    bases: Sequence[Base]
    overrides: Sequence[str]
    folder: StudyFolder


def finish(ended: Ended, write: Path | None, picture: Path | None, as_json: bool) -> int:
    """Write the picture, the recipe and `result.json`; print the table, or JSON. Exit code 1 if no recipe ran."""
    record, folder = ended.record, ended.folder
    table = rows(record, all_knobs(), ended.why)
    best = standing(record.state).best
    eprint(f"ended: {ended.why}")
    file = picture or folder_of(folder) / "tune.png"
    drawn = draw(table, folder.study_id, file)
    if drawn:
        eprint(f"picture: {file}")
    elif picture is not None:
        eprint("no picture: matplotlib is not installed (pip install 'fp8launch[plots]'), or nothing was measured")
    notes = _notes(record, best) if best is not None else []
    if best is not None and write is not None:
        base = ended.bases[best.start]
        setting, values = _setting(record, base), record.values(best)
        text = recipe_text(base.name, base.source, ended.overrides, values, table, setting, notes, write)
        write_atomically(write, text)
        write_atomically(folder_of(folder) / _WRITTEN, _digest(text.encode()) + "\n")
        eprint(f"wrote {write}")
    result = _as_json(record, table, best, folder, ended.why, file if drawn else None)
    write_atomically(folder_of(folder) / "result.json", json.dumps(result, indent=2) + "\n")
    if as_json:
        show_json(result)
    elif best is None:
        eprint("nothing was measured, so there is no result")
    else:
        _show(record, table, best, notes)
    return 0 if best is not None else ANSWER_IS_NO


def wrote(study: StudyFolder, file: Path) -> bool:
    """Whether a file is the recipe that this search wrote last, as it wrote it."""
    try:
        return (folder_of(study) / _WRITTEN).read_text(encoding="utf-8").strip() == _digest(file.read_bytes())
    except (OSError, UnicodeDecodeError):
        return False


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _notes(record: Record, best: Variant) -> list[str]:
    """Remarks on the knobs of what was kept."""
    knobs = all_knobs()
    kept = {candidate.name: candidate.knob for candidate in record.state.starts[best.start].candidates}
    return [f"{name}: {knobs[kept[name]].note}." for name in best.changes if knobs[kept[name]].note]


def _setting(record: Record, base: Base) -> str:
    need = base.prepared.loaded.recipe.resources
    size = base.prepared.layout
    return (
        f"{trials_run(record.state)} trials of {base.iterations} iterations on "
        f"{record.gpus} {need.gpu}, global batch {size.global_batch}, on {now()[:10]}"
    )


def _as_json(
    record: Record, table: Sequence[Row], best: Variant | None, folder: StudyFolder, why: str, picture: Path | None
) -> dict[str, Any]:
    last = next((row for row in reversed(table) if row.kept), None)
    return {
        "study": folder.study_id,
        "folder": str(folder.path),
        "recipe": None if best is None else record.state.starts[best.start].name,
        "changes": [] if best is None else list(best.changes),
        "overrides": {} if best is None else record.values(best),
        "numerics_changed": best is not None and any(row.kept and "numerics" in row.touches for row in table),
        "best": last and last.as_json(),
        "trials": trials_run(record.state),
        "gpu_hours": seconds_spent(record.state) * record.gpus / 3600,
        "ended": why,
        "picture": None if picture is None else str(picture),
        "rows": [row.as_json() for row in table],
    }


def _show(record: Record, table: Sequence[Row], best: Variant, notes: Sequence[str]) -> None:
    shown = []
    in_tflops = any(row.tflops_per_gpu and row.tflops_per_gpu >= 1 for row in table)
    for number, row in enumerate(table):
        measured = ""
        if row.measured is not None and row.low is not None and row.high is not None:
            measured = f"{percent(row.measured)} [{percent(row.low)}, {percent(row.high)}]"
        value = row.tflops_per_gpu if in_tflops else row.tokens_per_s_per_gpu
        speed = f"{value:,.1f}" if value else ""
        memory = f"{row.peak_memory_gib:.1f}" if row.peak_memory_gib else ""
        name = row.change + (" (numerics)" if "numerics" in row.touches else "")
        predicted = "" if row.predicted is None else percent(row.predicted)
        shown.append((name if number == 0 else f"+ {name}", predicted, measured, speed, memory, row.why))
    unit = "(TFLOP/s/GPU)" if in_tflops else "(tokens/s/GPU)"
    show_table(("change", "predicted", "measured [95 %]", unit, "peak (GiB)", "kept or why not"), shown)
    echo()
    hours = seconds_spent(record.state) * record.gpus / 3600
    trials = trials_run(record.state)
    echo(f"{trials} trial{'s' * (trials > 1)}, {hours:,.2f} GPU-hours")
    echo(f"best: {record.state.starts[best.start].name}, {describe(best)}" if best.changes else "best: as it was")
    changed = record.values(best)
    if changed:
        import shlex

        from fp8launch.submit.grid import Point

        echo("  " + " ".join(f"--set {shlex.quote(word)}" for word in Point("", None, changed).overrides))
    for note in notes:
        eprint(f"note: {note}")

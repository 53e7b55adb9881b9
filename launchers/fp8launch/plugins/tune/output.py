"""What `tune` prints and writes: the candidate changes, the table of results, the picture and the recipe."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8launch.cli.output import echo, eprint, overrides_text, show_json, show_table
from fp8launch.diagnostics import exit_code
from fp8launch.injob.regular_files import read_regular
from fp8launch.injob.supervisor.run_records import now
from fp8launch.job.prepared import Prepared
from fp8launch.plugins.tune.candidates import Base
from fp8launch.plugins.tune.judgement import standing
from fp8launch.plugins.tune.knobs import Knob
from fp8launch.plugins.tune.knobs import knobs as all_knobs
from fp8launch.plugins.tune.memory_fit import misfit
from fp8launch.plugins.tune.picture import draw
from fp8launch.plugins.tune.recipe_text import recipe_text
from fp8launch.plugins.tune.record import Record, folder_of
from fp8launch.plugins.tune.rows import Row, known_gain, percent, rows
from fp8launch.plugins.tune.state import Variant, describe, seconds_spent, trials_run
from fp8launch.recipe.yaml_source import MAX_BYTES
from fp8launch.rundir.atomic_io import write_atomically
from fp8launch.rundir.study import StudyFolder
from fp8launch.submit.grid import Point
from fp8launch.wording import and_more, counted

# Next to the state of a search: the SHA-256 digest of the recipe that it wrote last.
_WRITTEN = "written.sha256"


def show_candidates(record: Record, chosen: Sequence[Knob], as_json: bool) -> None:
    """Print the changes that a search would try, the best prediction first, and the changes that the check refuses."""
    touches = {knob.name: sorted(knob.touches - {"speed"}) for knob in chosen}
    starts: list[dict[str, Any]] = []
    for number, start in enumerate(record.state.starts):
        overrides, refused = record.overrides[number], record.refused[number]
        changes = []
        for change in sorted(start.candidates, key=lambda candidate: -candidate.gain):
            entry = {
                "change": change.name,
                "knob": change.knob,
                "predicted": known_gain(change.gain),
                "memory_gib": change.memory_gib,
                "misfit": misfit(record.state, Variant(number, (change.name,))),
                "touches": touches.get(change.knob, []),
                "overrides": dict(overrides[change.name]),
            }
            changes.append(entry)
        reasons = [{"change": one.name, "why": one.why} for one in refused]
        starts.append({"recipe": start.name, "changes": changes, "refused": reasons, "basis": record.basis})
    if as_json:
        show_json(starts)
        return
    for one in starts:
        _show_changes(one, titled=len(starts) > 1)


def _show_changes(start: Mapping[str, Any], titled: bool) -> None:
    table = []
    for one in start["changes"]:
        if one["misfit"] is not None:
            continue
        gain = ""
        if one["predicted"] is not None:
            gain = percent(one["predicted"])
        keys = " ".join(f"{key}={value}" for key, value in one["overrides"].items())
        memory = _formatted("{:+.1f}", one["memory_gib"])
        table.append((one["change"], one["knob"], gain, memory, ", ".join(one["touches"]), keys))
    columns = ("change", "knob", "predicted", "memory (GiB)", "also touches", "keys")
    show_table(columns, table, title=start["recipe"] if titled else None)
    for one in start["changes"]:
        if one["misfit"] is not None:
            eprint(f"only together with changes that save memory: {one['change']}: {one['misfit']}")
    for refused in start["refused"]:
        eprint(f"refused by the check: {refused['change']}: {refused['why']}")


@dataclass(frozen=True)
class Ended:
    """A search that has ended, with its recipes. `overrides` are the user's."""

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
    drawn = _draw(table, ended, picture)
    if best is not None and write is not None:
        _write_recipe(ended, best, table, write)
    result = _as_json(record, table, best, folder, ended.why, drawn)
    write_atomically(folder_of(folder) / "result.json", json.dumps(result, indent=2) + "\n")
    if as_json:
        show_json(result)
    elif best is None:
        eprint("nothing was measured, so there is no result")
    else:
        _show(record, table, best)
    return exit_code(best is not None)


def _draw(table: Sequence[Row], ended: Ended, wanted: Path | None) -> Path | None:
    """Draw the picture into the requested file or the study's folder. Return None if it cannot be drawn."""
    file = wanted or folder_of(ended.folder) / "tune.png"
    recipes = [base.prepared for base in ended.bases]
    if draw(table, f"{ended.folder.study_id} · {setup_of(recipes)}", file):
        eprint(f"picture: {file}")
        return file
    if wanted is not None:
        eprint("no picture: matplotlib is not installed (pip install 'fp8launch[plots]'), or nothing was measured")
    return None


def setup_of(recipes: Sequence[Prepared]) -> str:
    """Return the names of the recipes, and their GPUs and batch, which they share."""
    names = [one.loaded.recipe.name for one in recipes]
    need = recipes[0].loaded.recipe.resources
    hardware = f"{need.nodes * need.gpus_per_node} × {need.gpu.upper()}"
    batch = f"global batch {recipes[0].layout.global_batch:,}"
    if length := recipes[0].args.integer("seq_length", 0):
        batch += f" × {length:,} tokens"
    return " · ".join((and_more(names, 3), hardware, batch))


def _write_recipe(ended: Ended, best: Variant, table: Sequence[Row], file: Path) -> None:
    record, base = ended.record, ended.bases[best.start]
    setting, values, notes = _setting(record, base), record.values(best), _notes(record, best)
    text = recipe_text(base.name, base.source, ended.overrides, values, table, setting, notes, file)
    write_atomically(file, text)
    write_atomically(folder_of(ended.folder) / _WRITTEN, _digest(text.encode()) + "\n")
    eprint(f"wrote {file}")


def wrote(study: StudyFolder, file: Path) -> bool:
    """Return whether a file is the recipe that this search wrote last, unedited."""
    try:
        recorded = read_regular(folder_of(study) / _WRITTEN, 1024).decode()
        return recorded.strip() == _digest(read_regular(file, MAX_BYTES))
    except (OSError, ValueError):
        return False


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _notes(record: Record, best: Variant) -> list[str]:
    """Return the notes on the knobs of the changes that were kept."""
    knobs = all_knobs()
    kept = {candidate.name: candidate.knob for candidate in record.state.starts[best.start].candidates}
    notes = []
    for name in best.changes:
        note = knobs[kept[name]].note
        if note:
            notes.append(f"{name}: {note}.")
    return notes


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
    kept = [row for row in table if row.kept]
    result: dict[str, Any] = {
        "study": folder.study_id,
        "folder": str(folder.path),
        "recipe": None,
        "changes": [],
        "overrides": {},
        "numerics_changed": best is not None and any("numerics" in row.touches for row in kept),
        "best": None,
        "trials": trials_run(record.state),
        "gpu_hours": seconds_spent(record.state) * record.gpus / 3600,
        "ended": why,
        "picture": picture and str(picture),
        "basis": record.basis,
        "rows": list(map(Row.as_json, table)),
    }
    if best is not None:
        result["recipe"] = record.state.starts[best.start].name
        result["changes"] = list(best.changes)
        result["overrides"] = record.values(best)
    if kept:
        result["best"] = kept[-1].as_json()
    return result


def _show(record: Record, table: Sequence[Row], best: Variant) -> None:
    """Print the table, the best variant with its overrides, and the notes on its knobs."""
    in_tflops = any(row.tflops_per_gpu and row.tflops_per_gpu >= 1 for row in table)
    unit = "(tokens/s/GPU)"
    if in_tflops:
        unit = "(TFLOP/s/GPU)"
    shown = [_cells(row, number, in_tflops) for number, row in enumerate(table)]
    show_table(("change", "predicted", "measured [95 %]", unit, "peak (GiB)", "verdict"), shown)
    echo()
    hours = seconds_spent(record.state) * record.gpus / 3600
    echo(f"{counted(trials_run(record.state), 'trial')}, {hours:,.2f} GPU-hours")
    if not best.changes:
        echo("best: the recipe without changes")
    else:
        echo(f"best: {record.state.starts[best.start].name}, {describe(best)}")
        overrides = Point("", None, record.values(best)).overrides
        echo(f"  {overrides_text(overrides)}")
    for note in _notes(record, best):
        eprint(f"note: {note}")


def _cells(row: Row, number: int, in_tflops: bool) -> tuple[str, ...]:
    name = row.change
    if "numerics" in row.touches:
        name += " (numerics)"
    if number > 0:
        name = f"+ {name}"
    predicted = measured = ""
    if row.predicted is not None:
        predicted = percent(row.predicted)
    if row.measured is not None and row.low is not None and row.high is not None:
        measured = f"{percent(row.measured)} [{percent(row.low)}, {percent(row.high)}]"
    speed = row.tokens_per_s_per_gpu
    if in_tflops:
        speed = row.tflops_per_gpu
    memory = _formatted("{:.1f}", row.peak_memory_gib or None)
    return name, predicted, measured, _formatted("{:,.1f}", speed or None), memory, row.why


def _formatted(form: str, value: float | None) -> str:
    if value is None:
        return ""
    return form.format(value)

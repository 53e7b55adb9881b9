"""The notes beside the main table of a comparison: differences, phases, and remarks in sentences."""

from __future__ import annotations

from collections.abc import Sequence

from fp8launch.report.columns import Table, shows_speedup
from fp8launch.report.comparison import Comparison
from fp8launch.report.differences import is_unknown, shortened
from fp8launch.report.entry import Entry
from fp8launch.report.phases import PHASE_COLUMNS, phase_cells
from fp8launch.report.run_data import UNITS

LEGEND = {
    "*": "other settings than the variant differ too: see the differences",
    "!": "printed because of --force: the runs cannot be compared",
    "unlike": "no ratio: the runs cannot be compared",
}
# The meaning of a difference, by its kind.
MEANING = {
    "unlike": "other work or machine",
    "noted": "may change the speed",
    "neutral": "changes the loss only",
}
COMPARED = "what is compared"
# More rows than this do not get a column each.
_MOST_COLUMNS = 6
# A longer list of facts is cut in the terminal.
_MOST_NAMES = 8


def differences_table(comparison: Comparison) -> Table:
    """Return the differences between the rows and their meaning, with a column for each row, or one for all of many.

    A fact that the rows are named by is left out: its cells would repeat the header.
    """
    labels = {entry.row.name: entry.row.label for entry in comparison.entries}
    names = list(labels)
    many = len(names) > _MOST_COLUMNS
    rows: list[tuple[str, ...]] = []
    for one in comparison.differences:
        texts = list(map(str, map(one.values.get, names)))
        if names and texts == list(labels.values()):
            continue
        meaning = MEANING[one.kind]
        if one.axis:
            meaning = COMPARED
        values = [_short(one.values.get(name, "?")) for name in names]
        if many:
            values = [_by_value(values, names)]
        rows.append((one.name, meaning, *values))
    if many:
        return Table(("fact", "meaning", "values"), tuple(rows), (False,) * 3)
    return Table(("fact", "meaning", *names), tuple(rows), (False,) * (2 + len(names)))


def _by_value(values: Sequence[str], names: Sequence[str]) -> str:
    """Each value with its rows, where a column for each row would be too wide; many rows are counted."""
    found: dict[str, list[str]] = {}
    for value, name in zip(values, names, strict=True):
        found.setdefault(value, []).append(name)
    texts = []
    for value, rows in found.items():
        which = f"{len(rows)} rows"
        if len(rows) == 1:
            which = rows[0]
        texts.append(f"{value} ({which})")
    return "; ".join(texts)


def _short(value: object) -> str:
    words = {"None": "off", "False": "off", "True": "on"}
    return shortened(words.get(str(value), str(value)))


def phases_table(comparison: Comparison) -> Table | None:
    """Return a row for each phase of each run that has several; None where no run has."""
    rows = []
    for run in comparison.runs():
        if len(run.report.phases) < 2:
            continue
        for cells in phase_cells(run.report):
            rows.append((run.name, *cells))
    if not rows:
        return None
    return Table(("run", *PHASE_COLUMNS), tuple(rows), (False, *PHASE_COLUMNS.values()))


def difference_lines(comparison: Comparison) -> list[str]:
    """Name the facts that differ: first those that change the speed, then those that change the loss only."""
    speed, loss, lines = [], [], []
    for one in comparison.differences:
        if one.axis or one.kind != "neutral":
            speed.append(one.name)
        else:
            loss.append(one.name)
    if speed:
        lines.append(f"differs: {_first_names(speed)}")
    if loss:
        lines.append(f"differs in what changes the loss only: {_first_names(loss)}")
    return lines


def _first_names(names: Sequence[str]) -> str:
    if len(names) <= _MOST_NAMES + 1:
        return ", ".join(names)
    return f"{', '.join(names[:_MOST_NAMES])} and {len(names) - _MOST_NAMES} more (--md or --html lists all)"


def remarks(comparison: Comparison) -> list[str]:
    """Explain in sentences how the numbers were made; `problems` has what makes the comparison invalid."""
    lines = []
    if comparison.baseline and shows_speedup(comparison.entries):
        lines.append(
            f"speed-up: tokens/s/GPU relative to {comparison.baseline} (the most similar row); an interval marked "
            "'within' covers the iterations of two single runs, others cover repeats"
        )
        shown = [entry.speedup for entry in comparison.entries if entry.speedup and entry.speedup.interval]
        if not all(ratio.distinguishable for ratio in shown):
            text = "not distinguishable: the interval includes 1"
            if any(ratio.noise for ratio in shown):
                text += ", or two single runs differ by less than twice the sum of their ±"
            lines.append(text)
    if comparison.good:
        lines.append(f"±: {_meaning_of_spread(comparison)}")
    if comparison.about_loss:
        text = "loss at the end: mean of the last 10 % of the iterations, at least 5"
        if any(entry.loss and entry.loss.seeds > 1 for entry in comparison.entries):
            text += "; mean over the seeds ± their standard deviation"
        lines.append(text)
    if comparison.price_per_gpu_hour:
        lines.append(f"cost: at {comparison.price_per_gpu_hour:g} per GPU-hour")
    lines += _ratio_remarks(comparison)
    lines += _row_remarks(comparison)
    for entry in comparison.entries:
        if entry.published and (line := f"published: {entry.published.source}") not in lines:
            lines.append(line)
    return [*lines, *comparison.notes]


def _meaning_of_spread(comparison: Comparison) -> str:
    counts = [len(entry.row.good) for entry in comparison.good]
    single = "half the interquartile range of a run's iterations"
    if max(counts) < 2:
        return single
    several = "half the range of the repeats' medians"
    return several if min(counts) > 1 else f"{several}; for a single run, {single}"


def _row_remarks(comparison: Comparison) -> list[str]:
    """The notes of the rows; one that several rows share comes once."""
    rows: dict[str, list[str]] = {}
    for entry in comparison.entries:
        for note in _notes_of(entry):
            rows.setdefault(note, []).append(entry.row.name)
    every = len(comparison.entries)
    lines = []
    for note, names in rows.items():
        which = "; ".join(names)
        if len(names) == every and every > 1:
            which = "all rows"
        lines.append(f"{which}: {note}")
    return lines


def _notes_of(entry: Entry) -> tuple[str, ...]:
    if entry.published is None:
        return entry.notes
    return (*entry.notes, *entry.published.notes)


def _ratio_remarks(comparison: Comparison) -> list[str]:
    """Explain missing ratios, other units and marks; rows with the same explanation share a line."""
    rows: dict[str, list[str]] = {}
    for name, entry, ratio in comparison.ratios():
        own = entry.row.name
        if ratio.missing:
            if name == "speed-up":
                rows.setdefault(f"no speed-up: {ratio.missing}", []).append(own)
            continue
        if ratio.value is None or ratio.against == own:
            continue
        if ratio.unit != UNITS[0]:
            note = f"{name} in {ratio.unit}, because its log or the baseline's does not contain {UNITS[0]}"
            rows.setdefault(note, []).append(own)
        which = own if name == "speed-up" else f"scaling of {own}"
        differ = [note for note in ratio.comparability.noted if not is_unknown(note)]
        if differ:
            rows.setdefault(f"relative to {ratio.against} differs in {'; '.join(differ)}", []).append(f"* {which}")
        for note in filter(is_unknown, ratio.comparability.noted):
            rows.setdefault(f"relative to {ratio.against}: {note}, so the work may differ", []).append(f"* {which}")
    lines = []
    for note, owners in rows.items():
        separator = " " if note.startswith("relative") else ": "
        lines.append(f"{'; '.join(owners)}{separator}{note}")
    return lines

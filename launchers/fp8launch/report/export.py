"""Write a comparison as Markdown for pull requests, as CSV for other programs, and for the terminal.

Markdown adds tables of differences and phases, and remarks. The terminal shows only the names of the differences.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from fp8launch.diagnostics import printable
from fp8launch.report.columns import all_columns, csv_names, csv_row, main_table, shows_speedup
from fp8launch.report.comparison import Comparison
from fp8launch.report.conclusion import conclusion
from fp8launch.report.differences import is_unknown, shortened
from fp8launch.report.losses import end_words, ranked_by_loss
from fp8launch.report.parity import FEWEST_ITERATIONS, FEWEST_LINES, Parity
from fp8launch.report.phases import PHASE_COLUMNS, phase_cells
from fp8launch.report.rows import in_units
from fp8launch.report.run_report import UNITS
from fp8launch.report.steady_state import RULE_NOTE
from fp8launch.report.tables import Table, escaped, fitted_table, fitted_widths, markdown_table
from fp8launch.report.variant_labels import words_of
from fp8launch.wording import counted


def to_markdown(comparison: Comparison) -> str:
    """Return GitHub's Markdown: the conclusion, the table, remarks, differences, parity, commands."""
    parts = [f"**{escaped(conclusion(comparison))}**", markdown_table(main_table(comparison.rows))]
    lines = []
    for problem in comparison.problems:
        lines.append(f"**unlike**: {escaped(problem)}")
    lines += map(escaped, [*remarks(comparison), RULE_NOTE])
    parts.append(_bullets(lines))
    phases = phases_table(comparison)
    if phases:
        parts.append("### Phases\n\n" + markdown_table(phases))
    differences = differences_table(comparison)
    if differences.rows:
        parts.append("### Differences\n\n" + markdown_table(differences))
    if comparison.parities:
        sentences = map(Parity.sentence, comparison.parities)
        parts.append("### Loss parity\n\n" + _bullets(map(escaped, sentences)))
    commands = "\n".join(map(printable, comparison.commands()))
    if commands:
        parts.append("### Commands\n\n```\n" + commands.replace("```", "` ` `") + "\n```")
    return "\n\n".join(parts) + "\n"


def _bullets(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def to_csv(comparison: Comparison) -> str:
    """Return one line for each row, numbers unrounded, and an empty cell for an unknown value."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(csv_names())
    for row in comparison.rows:
        writer.writerow(map(csv_cell, csv_row(row)))
    return out.getvalue()


# Where a spreadsheet that splits text at commas, semicolons or tabs would see a formula. Some programs also accept the
# full-width signs of East Asian fonts.
_FORMULA = re.compile(r"(^|[;,\t\r\n])(\s*)(?=[=+\-@\uff1d\uff0b\uff0d\uff20])")


def csv_cell(value: object) -> object:
    """Put a quote before text that a spreadsheet would read as a formula: some formulas run programs."""
    if isinstance(value, str):
        return _FORMULA.sub(r"\1\2'", value)
    return value


def to_terminal(comparison: Comparison, width: int = 120, details: bool = True) -> RenderableType:
    """Render the table and the conclusion in `width` columns, with all remarks or only with `doubts`.

    Differences are only named; the other formats have all values. Columns that are not needed to compare are left out
    if there is no room.
    """
    table = main_table(comparison.rows)
    parts: list[RenderableType] = [fitted_table(table, width), Text("")]
    parts += [Text(conclusion(comparison), style="bold"), Text("")]
    if not details:
        for line in doubts(comparison):
            invalid = line.startswith("not valid") or "unhealthy: " in line
            parts.append(Text(line, style="bold red" if invalid else ""))
        parts.append(Text("--details explains the numbers and lists all differences", style="dim"))
        return Group(*parts)
    phases = phases_table(comparison)
    if phases:
        parts += [fitted_table(phases, width), Text("")]
    for problem in comparison.problems:
        parts.append(Text(f"not valid: {problem}", style="bold red"))
    parts += map(Text, remarks(comparison))
    parts += map(Text, difference_lines(comparison))
    parts += map(Text, _parity_lines(comparison.parities))
    shown = fitted_widths(table, width)
    hidden = [header for position, header in enumerate(table.headers) if position not in shown]
    if hidden:
        parts.append(Text(f"not shown in {width} columns, but in --md, --csv and --html: {', '.join(hidden)}"))
    parts.append(Text(style="dim"))
    return Group(*parts)


def doubts(comparison: Comparison) -> list[str]:
    """Return what makes the conclusion less certain: unequal work, unhealthy or missing runs, too few iterations."""
    rows: dict[str, list[str]] = {}
    for name, row, ratio in comparison.ratios():
        if ratio.missing or ratio.against == row.name:
            continue
        if not ratio.comparability.comparable:
            reasons = "; ".join(ratio.comparability.unlike)
            rows.setdefault(f"not valid: {name} over {ratio.against}: {reasons}", []).append(row.name)
        elif ratio.value is not None and ratio.comparability.noted:
            noted = ratio.comparability.noted
            text = "may differ from" if all(map(is_unknown, noted)) else "differs from"
            rows.setdefault(f"* {text} {ratio.against}: {'; '.join(noted)}", []).append(row.name)
    for row in comparison.rows:
        differing = [note for note in row.notes if note.startswith("its runs differ")]
        differing += filter(None, [row.sharing])
        for run in row.good:
            for problem in run.health:
                word = "unhealthy" if problem.severity == "error" else "health warning"
                rows.setdefault(f"{word}: {problem.message} [{problem.code}]", []).append(run.name)
            differing += run.steady_state.notes
        for note in dict.fromkeys(differing):
            rows.setdefault(note, []).append(row.name)
    lines = []
    if not comparison.good:
        lines += [f"not valid: {problem}" for problem in comparison.problems]
    for note, owners in rows.items():
        which = "; ".join(owners) if len(owners) <= _MOST_NAMES else f"{owners[0]} and {len(owners) - 1} more"
        if note.startswith("* "):
            lines.append(f"* {which} {note[2:]}")
        elif note.startswith("not valid"):
            lines.append(f"{note} ({which})")
        else:
            lines.append(f"{which}: {note}")
    absent = sum(bool(run.absent) for run in comparison.runs())
    if absent:
        lines.append(f"{counted(absent, 'run')} of the study missing")
    for column in all_columns():
        lines += column.doubt(comparison.rows)
    return [*lines, *_few_seeds(comparison)]


def _parity_lines(parities: Sequence[Parity]) -> list[str]:
    """Return a line for each verdict. Runs that are too short for a verdict share a line."""
    short = [parity.variant for parity in parities if parity.verdict == "too short"]
    lines = [f"parity: {one.sentence()}" for one in parities if one.verdict != "too short" or len(short) < 2]
    if len(short) > 1:
        which = "; ".join(short) if len(short) <= _MOST_NAMES else f"{len(short)} rows"
        needed = f"at least {FEWEST_ITERATIONS} iterations and {FEWEST_LINES} lines"
        lines.append(f"parity: too short to judge {which} (needed: {needed})")
    return lines


# Of more variants than this, only the number is shown.
_MOST_NAMES = 4
# The meaning of a difference, by its kind.
MEANING = {
    "unlike": "other work or machine",
    "noted": "may change the speed",
    "neutral": "changes the loss only",
}
COMPARED = "what is compared"
_SWITCHES = {"None": "off", "False": "off", "True": "on"}
# With more rows than this, all values share one column.
_MOST_COLUMNS = 6
# A longer list of facts is cut in the terminal.
_MOST_FACTS = 8


def differences_table(comparison: Comparison) -> Table:
    """Return the differences between the rows and their meaning, with a column for each row or, for many, one column.

    Facts that the row names already contain are left out: their cells would repeat the header.
    """
    labels = {row.name: row.label for row in comparison.rows}
    names = list(labels)
    many = len(names) > _MOST_COLUMNS
    rows: list[tuple[str, ...]] = []
    for one in comparison.differences:
        if labels and all(_states(label, one.name, one.values.get(name)) for name, label in labels.items()):
            continue
        meaning = COMPARED if one.axis else MEANING[one.kind]
        texts = [str(one.values.get(name, "?")) for name in names]
        values = [shortened(_SWITCHES.get(text, text)) for text in texts]
        if many:
            values = [_by_value(values, names)]
        rows.append((one.name, meaning, *values))
    headers = ("fact", "meaning", *(["values"] if many else names))
    return Table(headers, tuple(rows), (False,) * len(headers))


def _states(label: str, fact: str, value: object) -> bool:
    return label == str(value) or words_of(fact, value) in label.split(", ")


def _by_value(values: Sequence[str], names: Sequence[str]) -> str:
    """Return each value with its rows, for when a column per row would be too wide; many rows are counted."""
    found: dict[str, list[str]] = {}
    for value, name in zip(values, names, strict=True):
        found.setdefault(value, []).append(name)
    texts = []
    for value, rows in found.items():
        texts.append(f"{value} ({rows[0] if len(rows) == 1 else counted(len(rows), 'row')})")
    return "; ".join(texts)


def phases_table(comparison: Comparison) -> Table | None:
    """Return a row for each phase of each run with several phases; None if no run has several."""
    rows = []
    for run in comparison.runs():
        if len(run.phases) < 2:
            continue
        for cells in phase_cells(run):
            rows.append((run.name, *cells))
    if not rows:
        return None
    headers = [in_units(comparison.rows, header) for header in PHASE_COLUMNS]
    return Table(("run", *headers), tuple(rows), (False, *PHASE_COLUMNS.values()))


def difference_lines(comparison: Comparison) -> list[str]:
    """Name the differing facts: first facts that change the speed, then facts that only change the loss."""
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
    if len(names) <= _MOST_FACTS + 1:
        return ", ".join(names)
    return f"{', '.join(names[:_MOST_FACTS])} and {len(names) - _MOST_FACTS} more (--md or --html lists all)"


def remarks(comparison: Comparison) -> list[str]:
    """Explain in sentences how the numbers were made; `problems` are the reasons why the comparison is not valid."""
    lines = [*explanations(comparison), *_ratio_remarks(comparison), *_row_remarks(comparison)]
    for row in comparison.rows:
        if row.published and (line := f"published: {row.published.source}") not in lines:
            lines.append(line)
    return [*lines, *comparison.notes]


def explanations(comparison: Comparison) -> list[str]:
    """Explain the numbers in the table."""
    lines = []
    if comparison.baseline and shows_speedup(comparison.rows):
        unit = in_units(comparison.rows, UNITS[0])
        lines.append(
            f"speed-up: {unit} relative to {comparison.baseline} (the most similar row); an interval marked "
            "'within' covers the iterations of two single runs, others cover repeats"
        )
        shown = [row.speedup for row in comparison.rows if row.speedup and row.speedup.interval]
        if not all(ratio.distinguishable for ratio in shown):
            text = "not distinguishable: the interval includes 1"
            if any(ratio.noise for ratio in shown):
                text += ", or two single runs differ by less than twice the sum of their ±"
            lines.append(text)
    if comparison.good:
        lines += [f"±: {meaning_of_spread(comparison)}", _MEDIAN]
    if comparison.about_loss:
        several = [row for row in comparison.rows if row.loss and row.loss.seeds > 1]
        text = f"loss at the end: mean of the {end_words(row.loss for row in comparison.rows)} of each run"
        lines.append(f"{text}, over all seeds" if several else text)
        if ranked_by_loss(several):
            lines.append(_TESTED)
        lines += _few_seeds(comparison)
    for column in all_columns():
        lines += column.explain(comparison.rows)
    if len(comparison.good) > 1 and not shows_speedup(comparison.rows):
        lines.append("speed: differences not tested, because these settings do not change the work of a step")
    if comparison.price_per_gpu_hour:
        lines.append(f"cost: at {comparison.price_per_gpu_hour:g} per GPU-hour")
    return lines


_MEDIAN = "speed and step time: median of a run's iterations; for several runs, the median of their medians"
_TESTED = (
    "losses are compared in pairs by Welch's t over the seeds (95 %), not corrected for several comparisons; a "
    "difference may be negative, so its interval is not cut off at 0"
)


def meaning_of_spread(comparison: Comparison) -> str:
    counts = [len(row.good) for row in comparison.good]
    single = "half the interquartile range of a run's iterations"
    if max(counts) < 2:
        return single
    several = "standard deviation over the runs of a row"
    if any(row.loss and 1 < row.loss.seeds < len(row.good) for row in comparison.good):
        several += " (of the loss, over its seeds)"
    return several if min(counts) > 1 else f"{several}; for a single run, {single}"


def _few_seeds(comparison: Comparison) -> list[str]:
    if all(row.loss is None or row.loss.seeds != 2 for row in comparison.rows):
        return []
    return ["only 2 seeds, so the intervals are wide: --seeds 1,2,3,4,5 narrows them"]


def _row_remarks(comparison: Comparison) -> list[str]:
    """Return the notes of the rows; a note that several rows share appears once."""
    rows: dict[str, list[str]] = {}
    for row in comparison.rows:
        for note in (*row.notes, *(row.published.notes if row.published else ())):
            rows.setdefault(note, []).append(row.name)
    every = len(comparison.rows)
    lines = []
    for note, names in rows.items():
        which = "; ".join(names)
        if len(names) == every and every > 1:
            which = "all rows"
        lines.append(f"{which}: {note}")
    return lines


def _ratio_remarks(comparison: Comparison) -> list[str]:
    """Explain missing ratios, other units and marks; rows with the same explanation share a line."""
    rows: dict[str, list[str]] = {}
    for name, row, ratio in comparison.ratios():
        own = row.name
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

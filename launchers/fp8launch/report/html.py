"""A comparison as one HTML file: no network, no script, light or dark as the reader's system is, fit for a phone."""

from __future__ import annotations

import html
from collections.abc import Sequence
from datetime import datetime
from itertools import zip_longest

from fp8launch import __version__
from fp8launch.report.cells import NONE
from fp8launch.report.columns import Table, main_table
from fp8launch.report.comparison import Comparison
from fp8launch.report.conclusion import conclusion, unlike_rows
from fp8launch.report.grouping import labels_of
from fp8launch.report.html_pictures import picture_html
from fp8launch.report.html_text import LONGEST_PART, breakable, quiet
from fp8launch.report.parity import Parity
from fp8launch.report.plot_bars import MOST_BARS
from fp8launch.report.plots import available, pictures
from fp8launch.report.remarks import LEGEND, differences_table, phases_table, remarks
from fp8launch.report.steady_state import RULE_NOTE
from fp8launch.wording import counted

_STYLE = """
:root { color-scheme: light dark; --ink: #24272b; --paper: #ffffff; --soft: #f2f4f6; --line: #d5d9de; --bad: #b3261e;
  --quiet: #5b636d }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e7ea; --paper: #16181b; --soft: #212428; --line: #3a3f45;
  --bad: #ff8a80; --quiet: #a2abb5 } }
* { box-sizing: border-box }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.5 system-ui, sans-serif }
main { max-width: 1280px; margin: 0 auto; padding: 1rem }
h1 { font-size: 1.35rem; line-height: 1.35; margin: .4rem 0; max-width: 60rem }
h2 { font-size: 1.15rem; margin: 2rem 0 .5rem }
h3 { font-size: 1rem; margin: 0 } h4 { font-size: .88rem; font-weight: 600; margin: 0 }
p, li, h1, h4 { overflow-wrap: anywhere }
.quiet { color: var(--quiet); font-size: .9rem; margin: .3rem 0 }
.scroll { overflow-x: auto; border: 1px solid var(--line); border-radius: 6px }
table { border-collapse: collapse; font-size: .88rem; font-variant-numeric: tabular-nums; width: 100% }
th, td { padding: .35rem .55rem; text-align: left; vertical-align: top; border-bottom: 1px solid var(--line) }
thead th { background: var(--soft); font-weight: 600 }
tbody th { font-weight: 600; background: var(--paper); position: sticky; left: 0 }
tbody tr:last-child > * { border-bottom: 0 }
.name span { white-space: nowrap }
.number { text-align: right }
.interval { display: block; color: var(--quiet) }
tr.bad > th { border-left: 4px solid var(--bad) }
.why { display: block; color: var(--bad); font-weight: 400; max-width: 22rem }
.pictures { display: grid; gap: 1.6rem 1rem; grid-auto-flow: dense }
figure { margin: 0; border-top: 1px solid var(--line); padding-top: .6rem; min-width: 0 }
.panels { display: grid; gap: .8rem 1rem }
.panel { max-width: 620px; min-width: 0 }
.key { list-style: none; margin: .2rem 0; padding: 0; font-size: .85rem; display: flex; flex-wrap: wrap;
  gap: .1rem 1rem }
.key li { display: flex; gap: .45rem; overflow-wrap: normal } .panel .key li { width: 100% }
.key svg { width: 30px; height: 1.3rem; flex: none }
.panel > svg { width: 100%; height: auto; display: block }
pre { background: var(--soft); padding: .7rem; overflow-x: auto; border-radius: 6px; font-size: .85rem }
@media (min-width: 720px) { .pictures, .w2 .panels, .w3 .panels { grid-template-columns: 1fr 1fr }
  .w2, .w3 { grid-column: span 2 } }
@media (min-width: 1080px) { .pictures, .w3 .panels { grid-template-columns: 1fr 1fr 1fr } .w3 { grid-column: span 3 } }
@media (max-width: 719px) {
  .scroll { border: 0 } table, tbody, tr, td, tbody th { display: block } thead { display: none }
  tr { border: 1px solid var(--line); border-radius: 6px; margin: 0 0 .7rem; overflow: hidden }
  tbody th { position: static; background: var(--soft) }
  td, td.number { display: flex; flex-wrap: wrap; justify-content: space-between; gap: 0 1rem; text-align: right;
    overflow-wrap: anywhere }
  td::before { content: attr(data-label); color: var(--quiet); text-align: left; flex: none; max-width: 60% }
  .interval { flex-basis: 100% } td:empty { display: none }
}
"""


def to_html(comparison: Comparison) -> str:
    """Render the whole report. Pictures are left out where matplotlib is missing."""
    condemned = unlike_rows(comparison)
    why = [condemned.get(row.name, "") for row in comparison.rows]
    results = _html_table(main_table(comparison.entries), why)
    tables = [_section("Results", results, _legend(comparison))]
    phases = phases_table(comparison)
    if phases:
        tables.append(_section("Phases", _html_table(phases)))
    drawn = _pictures(comparison)
    parts = [_head(comparison), *tables, *drawn]
    if len(comparison.entries) > MOST_BARS:
        # Pictures are easier to read than a long table, so they come first.
        parts = [_head(comparison), *drawn, *tables]
    parts.append(_section("Remarks", _list([*remarks(comparison), RULE_NOTE])))
    differences = differences_table(comparison)
    if differences.rows:
        parts.append(_section("Differences", _html_table(differences)))
    else:
        none = "The logs and manifests show no other differences that affect speed or loss."
        parts.append(_section("Differences", f"<p>{none}</p>"))
    if comparison.parities:
        parts.append(_section("Loss parity", _list(list(map(Parity.sentence, comparison.parities)))))
    parts.append(_section("Runs", _html_table(_runs(comparison)), _commands(comparison)))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>fp8launch comparison</title><style>{_STYLE}</style></head>\n<body><main>\n"
        + "\n".join(parts)
        + "\n</main></body></html>\n"
    )


def _head(comparison: Comparison) -> str:
    """The conclusion, and below it the variants that were compared."""
    runs = len(comparison.runs())
    made = datetime.now().astimezone().isoformat(sep=" ", timespec="minutes")
    labels = labels_of(comparison.rows)
    title = "; ".join(labels)
    if len(labels) > 4:
        title = f"{len(labels)} variants"
    about = f"Comparison of {title}: {counted(runs, 'run')}. fp8launch {__version__}, {made}"
    return f"<h1>{html.escape(conclusion(comparison))}</h1>{quiet(about)}"


def _pictures(comparison: Comparison) -> list[str]:
    """The section of the pictures; none without matplotlib, or with nothing to draw."""
    if not available():
        return []
    drawn = "".join(map(picture_html, pictures(comparison)))
    if not drawn:
        return []
    return [_section("Pictures", f'<div class="pictures">{drawn}</div>')]


def _section(title: str, *body: str) -> str:
    return f"<section><h2>{html.escape(title)}</h2>{''.join(body)}</section>"


def _list(lines: Sequence[str]) -> str:
    if not lines:
        return ""
    items = "</li><li>".join(map(html.escape, lines))
    return f"<ul><li>{items}</li></ul>"


def _legend(comparison: Comparison) -> str:
    cells = " ".join(map(" ".join, main_table(comparison.entries).rows))
    used = []
    for mark, text in LEGEND.items():
        if mark in cells:
            used.append(f"{mark}: {text}")
    return quiet("; ".join(used))


def _html_table(table: Table, condemned: Sequence[str] = ()) -> str:
    """Render a table whose first column names the row. `condemned` says for each row why it is unlike, if it is.

    On a phone each row becomes a block of names and values, so nothing is cut and nothing scrolls sideways.
    """
    heads = []
    for text, number in zip(table.headers, table.numbers, strict=True):
        heads.append(f'<th scope="col"{_class(number)}>{html.escape(text)}</th>')
    body = []
    for row, why in zip_longest(table.rows, condemned, fillvalue=""):
        name, tag = _whole(row[0]), "<tr>"
        if why:
            name += f'<small class="why">unlike: {breakable(why)}</small>'
            tag = '<tr class="bad">'
        cells = [f'<th scope="row" class="name">{name}</th>']
        for header, text, number in zip(table.headers[1:], row[1:], table.numbers[1:], strict=True):
            shown = _number(text) if number else breakable(text, 12)
            cells.append(f'<td{_class(number)} data-label="{html.escape(header)}">{shown}</td>')
        body.append(f"{tag}{''.join(cells)}</tr>")
    inner = f"<thead><tr>{''.join(heads)}</tr></thead><tbody>{''.join(body)}</tbody>"
    return f'<div class="scroll"><table>{inner}</table></div>'


def _number(text: str) -> str:
    """A number that breaks before ± and `of` where room is short, with its interval on a line of its own."""
    value, bracket, interval = html.escape(text).partition(" [")
    value = value.replace("± ", "±&nbsp;").replace("of ", "of&nbsp;")
    if not bracket:
        return value
    return f'{value} <small class="interval">[{interval}</small>'


def _class(number: bool) -> str:
    if not number:
        return ""
    return ' class="number"'


_LONGEST_NAME = 40


def _whole(name: str) -> str:
    """A name that breaks between its parts only, and only if it is long."""
    if len(name) <= _LONGEST_NAME:
        return f"<span>{html.escape(name)}</span>"
    parts = []
    for part in name.split(", "):
        shown = breakable(part)
        if len(part) <= LONGEST_PART:
            shown = f"<span>{shown}</span>"
        parts.append(shown)
    return ", ".join(parts)


def _runs(comparison: Comparison) -> Table:
    rows = []
    for entry in comparison.entries:
        for run in entry.row.runs:
            report = run.report
            status = run.absent or report.status.replace("_", " ")
            step_time, lines = NONE, NONE
            if run.good and report.step_time_ms:
                step_time, lines = f"{report.step_time_ms.median:,.1f}", str(len(run.kept))
            source = ", ".join(run.sources)
            rows.append((run.name, entry.row.name, status, step_time, lines, str(report.warmup_dropped), source))
    headers = ("run", "row", "status", "step time (ms)", "lines counted", "dropped as warm-up", "from")
    return Table(headers, tuple(rows), (False, False, False, True, True, True, False))


def _commands(comparison: Comparison) -> str:
    commands = "\n".join(comparison.commands())
    if not commands:
        return ""
    return f"<pre>{html.escape(commands)}</pre>"

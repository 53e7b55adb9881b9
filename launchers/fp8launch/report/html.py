"""A comparison as one HTML file: no network, no script, light or dark as the reader's system is, fit for a phone."""

from __future__ import annotations

import html
import io
import re
from collections.abc import Sequence
from datetime import datetime

from fp8launch import __version__
from fp8launch.report.columns import NONE, Table, main_table
from fp8launch.report.comparison import Comparison
from fp8launch.report.plot_style import INK, Picture
from fp8launch.report.plots import available, figure_of, pictures
from fp8launch.report.remarks import LEGEND, differences_table, phases_table, remarks
from fp8launch.report.steady_state import RULE_NOTE

# Narrow, so that its letters stay legible at the width of a phone.
_SIZE = (4.4, 3.3)

_STYLE = """
:root { color-scheme: light dark; --ink: #24272b; --paper: #ffffff; --soft: #f2f4f6; --line: #d5d9de; --bad: #b3261e;
  --good: #1b7a3d; --quiet: #5b636d }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e7ea; --paper: #16181b; --soft: #212428; --line: #3a3f45;
  --bad: #ff8a80; --good: #7bd88f; --quiet: #a2abb5 } }
* { box-sizing: border-box }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.5 system-ui, sans-serif }
main { max-width: 1200px; margin: 0 auto; padding: 1rem }
h1 { font-size: 1.5rem; margin: .2rem 0 }
h2 { font-size: 1.15rem; margin: 2rem 0 .5rem }
p, li { overflow-wrap: anywhere }
.quiet { color: var(--quiet); font-size: .9rem }
.verdict { border-left: 4px solid var(--good); background: var(--soft); padding: .6rem 1rem; margin: 1rem 0 }
.verdict.bad { border-color: var(--bad) }
.scroll { overflow-x: auto; border: 1px solid var(--line); border-radius: 6px }
table { border-collapse: collapse; font-size: .88rem; font-variant-numeric: tabular-nums; width: 100% }
th, td { padding: .35rem .55rem; text-align: left; vertical-align: top; border-bottom: 1px solid var(--line) }
thead th { background: var(--soft); font-weight: 600; min-width: 5rem }
tbody th { font-weight: 600; background: var(--paper); position: sticky; left: 0;
  min-width: min(11rem, 30vw); max-width: 12rem; overflow-wrap: anywhere }
tbody tr:last-child > * { border-bottom: 0 }
td { min-width: 6rem }
.number { min-width: 0; text-align: right; white-space: nowrap }
thead .number { white-space: normal }
.pictures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 330px), 1fr)); gap: 1rem }
figure { margin: 0; max-width: 620px }
svg { width: 100%; height: auto; display: block }
pre { background: var(--soft); padding: .7rem; overflow-x: auto; border-radius: 6px; font-size: .85rem }
"""


def to_html(comparison: Comparison) -> str:
    """Render the whole report. Pictures are left out where matplotlib is missing."""
    parts = [_head(comparison), _section("Results", _html_table(main_table(comparison.entries)), _legend(comparison))]
    phases = phases_table(comparison)
    if phases:
        parts.append(_section("Phases", _html_table(phases)))
    drawn = pictures(comparison) if available() else []
    if drawn:
        parts.append(_section("Pictures", '<div class="pictures">' + "".join(map(_figure, drawn)) + "</div>"))
    parts.append(_section("Remarks", _list([*remarks(comparison), RULE_NOTE])))
    differences = differences_table(comparison)
    if differences.rows:
        parts.append(_section("Differences", _html_table(differences)))
    else:
        none = "The logs and manifests show no other differences that affect speed or loss."
        parts.append(_section("Differences", f"<p>{none}</p>"))
    if comparison.parities:
        parts.append(_section("Loss parity", _list([parity.sentence() for parity in comparison.parities])))
    parts.append(_section("Runs", _html_table(_runs(comparison)), _commands(comparison)))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>fp8launch comparison</title><style>{_STYLE}</style></head>\n<body><main>\n"
        + "\n".join(parts)
        + "\n</main></body></html>\n"
    )


def _head(comparison: Comparison) -> str:
    runs = len(comparison.runs())
    made = datetime.now().astimezone().isoformat(sep=" ", timespec="minutes")
    labels = list(dict.fromkeys(entry.row.label for entry in comparison.entries))
    title = "Comparison of " + (", ".join(labels) if len(labels) <= 4 else f"{len(labels)} variants")
    if not comparison.valid:
        verdict = "This comparison is not valid."
    elif any(not one.axis for one in comparison.differences):
        verdict = "The runs can be compared; other differences are listed below."
    else:
        verdict = "The runs can be compared."
    reasons = _list(comparison.problems) if comparison.problems else ""
    return (
        f"<h1>{html.escape(title)}</h1>"
        f'<p class="quiet">fp8launch {html.escape(__version__)}, {made}, {runs} run{"" if runs == 1 else "s"}</p>'
        f'<div class="verdict{"" if comparison.valid else " bad"}"><strong>{verdict}</strong>{reasons}</div>'
    )


def _section(title: str, *body: str) -> str:
    return f"<section><h2>{html.escape(title)}</h2>{''.join(body)}</section>"


def _list(lines: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{html.escape(line)}</li>" for line in lines) + "</ul>" if lines else ""


def _legend(comparison: Comparison) -> str:
    cells = " ".join(cell for row in main_table(comparison.entries).rows for cell in row)
    found = [f"{mark}: {text}" for mark, text in LEGEND.items() if mark in cells]
    return f'<p class="quiet">{html.escape("; ".join(found))}</p>' if found else ""


def _html_table(table: Table) -> str:
    def cell(tag: str, text: str, number: bool, scope: str = "") -> str:
        kind = ' class="number"' if number else ""
        return f"<{tag}{scope}{kind}>{html.escape(text)}</{tag}>"

    head = "".join(cell("th", h, n, ' scope="col"') for h, n in zip(table.headers, table.numbers, strict=True))
    body = "".join(
        "<tr>"
        + cell("th", row[0], False, ' scope="row"')
        + "".join(cell("td", text, n) for text, n in zip(row[1:], table.numbers[1:], strict=True))
        + "</tr>"
        for row in table.rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


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
    commands = comparison.commands()
    return f"<pre>{html.escape(chr(10).join(commands))}</pre>" if commands else ""


_IDS = r'\sid="(?:figure|axes|patch|line2d|text|legend|xtick|ytick|matplotlib\.axis|PolyCollection)_\d+"'


def _figure(picture: Picture) -> str:
    return f'<figure role="img" aria-label="{html.escape(picture.title)}">{_svg(picture)}</figure>'


def _svg(picture: Picture) -> str:
    """The picture with its letters as text, in the page's colours, and without what a page does not need."""
    import matplotlib as mpl

    # A salt of its own keeps the ids of one picture from meaning something in another.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": picture.name}):
        out = io.StringIO()
        figure = figure_of([picture], size=_SIZE)
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    text = out.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.S)
    # Only tags change: what stands between them are labels, which may be anything, and whose < and > are escaped.
    return re.sub(r"<[^<>]*>", _tag, text).replace("\n", " ")


def _tag(match: re.Match[str]) -> str:
    """A tag of matplotlib's SVG without what a page does not need, with the page's fonts and colours."""
    text = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", match[0])
    text = re.sub(r'<svg [^>]*?(viewBox="[^"]*")[^>]*>', r"<svg \1>", text)
    text = re.sub(_IDS, "", text)
    text = re.sub(r"font: ([\d.]+)px [^;\"]*|font-family: [^;\"]*", _font, text)
    return text.replace(INK, "var(--ink)").replace(INK.lower(), "var(--ink)")


def _font(match: re.Match[str]) -> str:
    return f"font: {match[1]}px system-ui, sans-serif" if match[1] else "font-family: system-ui, sans-serif"

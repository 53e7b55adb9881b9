"""Render a comparison as one HTML file: no network, no scripts, light and dark mode, readable on a phone."""

from __future__ import annotations

import html
import io
import re
from collections.abc import Sequence
from datetime import datetime
from functools import partial
from itertools import count, zip_longest
from pathlib import PurePath

from fp8launch import __version__
from fp8launch.plugins.plots.figures import available, panel_figure, pictures
from fp8launch.plugins.plots.row_pictures import MOST_BARS
from fp8launch.plugins.plots.setup import setup_of, training_of
from fp8launch.plugins.plots.style import INK, Key, Panel, Picture
from fp8launch.report.columns import NONE, main_table
from fp8launch.report.comparison import Comparison
from fp8launch.report.conclusion import conclusion, unlike_rows
from fp8launch.report.export import (
    differences_table,
    explanations,
    meaning_of_spread,
    phases_table,
    remarks,
)
from fp8launch.report.losses import loss_summary
from fp8launch.report.parity import Parity
from fp8launch.report.rows import labels_of
from fp8launch.report.steady_state import RULE
from fp8launch.report.tables import Table
from fp8launch.wording import counted

# A longer part of a name does not fit on a phone, so it may break after a separator.
LONGEST_PART = 36
# A name of at most this many characters stays on one line of the headline.
LONGEST_UNBROKEN = 16


def quiet(text: str) -> str:
    """Return a paragraph in small print, or nothing for an empty text."""
    if not text:
        return ""
    return f'<p class="quiet">{_unbroken(text)}</p>'


def _unbroken(text: str) -> str:
    """Escape a text whose numbers keep their ± and % on one line."""
    return html.escape(text).replace(" ± ", "&nbsp;±&nbsp;").replace(" %", "&nbsp;%")


def breakable(text: str, longest: int = LONGEST_PART) -> str:
    """Escape a text, such as a path, and let it break after separators, but not inside a word or a number."""
    shown = html.escape(text)
    if len(text) <= longest:
        return shown
    return re.sub(r"([/_=:-](?=\w)|[.,](?=[A-Za-z]))", r"\1<wbr>", shown)


_IDS = r'\sid="(?:figure|axes|patch|line2d|text|legend|xtick|ytick|matplotlib\.axis|PolyCollection)_\d+"'


def picture_html(picture: Picture) -> str:
    panels = "".join(map(partial(_panel, picture), count(), picture.panels))
    return (
        f'<figure class="w{picture.width}" id="picture-{picture.name}"><h3>{html.escape(picture.title)}</h3>'
        f'{quiet(picture.remark)}{_keys(picture.keys)}<div class="panels">{panels}</div></figure>'
    )


def _panel(picture: Picture, i: int, panel: Panel) -> str:
    title = ""
    if panel.title:
        title = f"<h4>{html.escape(panel.title)}</h4>"
    label = html.escape(", ".join(filter(None, (picture.title, panel.title))))
    svg = _svg(panel, f"{picture.name}-{i}").replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)
    return f'<div class="panel">{title}{svg}{_keys(panel.keys)}</div>'


def _keys(keys: Sequence[Key]) -> str:
    """Return a legend as text of the page, which wraps. Inside the picture it would be cut off."""
    if not keys:
        return ""
    entries = []
    for key in keys:
        entries.append(f"<li>{_swatch(key)}<span>{breakable(key.text)}</span></li>")
    return f'<ul class="key">{"".join(entries)}</ul>'


_DASH_LENGTHS = {"--": "6 3", ":": "2 2", "-.": "6 2 2 2"}
_MARKER_SHAPES = {
    "s": '<path d="M11 6h8v8h-8z"/>',
    "D": '<path d="M15 5l5 5-5 5-5-5z"/>',
    "^": '<path d="M15 5l5 9H10z"/>',
    "v": '<path d="M15 15l5-9H10z"/>',
}


def _swatch(key: Key) -> str:
    colour = key.colour
    if colour == INK:
        colour = "var(--ink)"
    return f'<svg viewBox="0 0 30 20" fill="{colour}" aria-hidden="true">{_swatch_shape(key, colour)}</svg>'


def _swatch_shape(key: Key, colour: str) -> str:
    if key.shape == "bar":
        return '<path d="M2 4h26v12H2z" opacity="1"/>'
    if key.shape == "band":
        return '<path d="M2 4h26v12H2z" opacity="0.2"/>'
    if key.shape == "ring":
        return f'<circle cx="15" cy="10" r="4" fill="none" stroke="{colour}" stroke-width="1.5"/>'
    dash = ""
    if key.dash in _DASH_LENGTHS:
        dash = f' stroke-dasharray="{_DASH_LENGTHS[key.dash]}"'
    width = 0.9 if key.shape == "thin" else 2
    line = f'<path d="M1 10h28" stroke="{colour}" stroke-width="{width}"{dash}/>'
    if key.marker:
        line += _MARKER_SHAPES.get(key.marker, '<circle cx="15" cy="10" r="4"/>')
    return line


def _svg(panel: Panel, name: str) -> str:
    """Draw a panel as SVG in the page's colours, with text as text and without metadata."""
    import matplotlib as mpl

    # Ids of several pictures on a page must differ: matplotlib derives them from the salt.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": name, "text.parse_math": False}):
        out = io.StringIO()
        panel_figure(panel).savefig(out, format="svg", transparent=True, metadata={"Date": None})
    text = out.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.S)
    # Only tags are rewritten. The text between them is labels with arbitrary content, with < and > escaped.
    text = re.sub(r"<[^<>]*>", _tag, text)
    return re.sub(r">\s+<", "><", text).replace("\n", " ")


def _tag(match: re.Match[str]) -> str:
    """Remove ids and namespaces from a tag of matplotlib's SVG, and use the page's fonts and colours."""
    text = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", match[0])
    text = re.sub(r'<svg [^>]*?(viewBox="[^"]*")[^>]*>', r"<svg \1>", text)
    text = re.sub(_IDS, "", text)
    text = re.sub(r'\stransform="rotate\(-?0 [^"]*"', "", text)
    # A hundredth of a point is far below a pixel.
    text = re.sub(r"(\d\.\d\d)\d+", r"\1", text)
    text = re.sub(r'(?<=\sd=")[^"]*', _path, text)
    text = re.sub(r"font: ([\d.]+)px [^;\"]*|font-family: [^;\"]*;?\s?", _font, text)
    return text.replace(INK, "var(--ink)").replace(INK.lower(), "var(--ink)")


def _path(match: re.Match[str]) -> str:
    """Remove spaces around the commands of a path; round straight lines to a tenth of a point."""
    text = match[0]
    if not re.search("[CQ]", text):
        text = re.sub(r"(\d\.\d)\d", r"\1", text)
    return re.sub(r"\s*([A-Za-z])\s*", r"\1", text).strip()


def _font(match: re.Match[str]) -> str:
    """Keep the size of a font. The family is the page's."""
    if match[1]:
        return f"font-size: {match[1]}px"
    return ""


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
p, li, h1, h4, dd { overflow-wrap: anywhere }
dl { display: flex; flex-wrap: wrap; gap: .3rem 1.8rem; margin: .6rem 0 } dd { margin: 0; font-weight: 600 }
dt { color: var(--quiet); font-size: .8rem }
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
pre { background: var(--soft); padding: .7rem; border-radius: 6px; font-size: .85rem; white-space: pre-wrap;
  overflow-wrap: anywhere } pre span { display: inline-block; max-width: 100%; white-space: normal }
@media (min-width: 720px) { .pictures, .w2 .panels, .w3 .panels { grid-template-columns: 1fr 1fr }
  .w2, .w3 { grid-column: span 2 } }
@media (min-width: 1080px) { .pictures, .w3 .panels { grid-template-columns: 1fr 1fr 1fr } .w3 { grid-column: span 3 } }
@media (max-width: 719px) {
  main { display: flex; flex-direction: column } header { order: -2 } .drawn { order: -1 }
  .scroll { border: 0 } table, tbody, tr, td, tbody th { display: block } thead { display: none }
  tr { border: 1px solid var(--line); border-radius: 6px; margin: 0 0 .7rem; overflow: hidden }
  tbody th { position: static; background: var(--soft) }
  td, td.number { display: flex; flex-wrap: wrap; justify-content: space-between; gap: 0 1rem; text-align: right;
    overflow-wrap: anywhere }
  td::before { content: attr(data-label); color: var(--quiet); text-align: left; flex: none; max-width: 60% }
  dl { display: grid; grid-template-columns: auto 1fr; gap: .1rem .8rem; align-items: baseline }
  dl div { display: contents }
  .interval { flex-basis: 100% } td:empty { display: none }
}
"""


def to_html(comparison: Comparison) -> str:
    """Render the whole report, without pictures if matplotlib is missing."""
    condemned = unlike_rows(comparison)
    why = [condemned.get(row.name, "") for row in comparison.rows]
    results = _html_table(main_table(comparison.rows), why)
    explained = [line for line in explanations(comparison) if line != _spread_of_headline(comparison)]
    tables = [_section("Results", results, *map(quiet, [_legend(comparison), *explained]))]
    phases = phases_table(comparison)
    if phases:
        tables.append(_section("Phases", _html_table(phases)))
    drawn = _pictures(comparison)
    # On a phone, where each row of the table is a card, the style sheet moves the pictures up.
    parts = [_head(comparison), *tables, *drawn]
    if len(comparison.rows) > MOST_BARS:
        # Pictures are easier to read than a long table, so they come first.
        parts = [_head(comparison), *drawn, *tables]
    further = [line for line in remarks(comparison) if line not in explanations(comparison)]
    rule = RULE[:1].lower() + RULE[1:]
    parts.append(_section("Remarks", _list([*further, f"iterations that count for the speed: {rule}"])))
    differences = differences_table(comparison)
    if differences.rows:
        parts.append(_section("Differences", _html_table(differences)))
    else:
        none = (
            "The logs and manifests show no other differences in the settings "
            "(not compared: output, logging, evaluation and checkpoints)."
        )
        parts.append(_section("Differences", f"<p>{none}</p>"))
    if comparison.parities:
        parts.append(_section("Loss parity", _list(list(map(Parity.sentence, comparison.parities)))))
    folder = _common_folder(comparison)
    where = quiet(f"in {folder}" if folder else "")
    parts.append(_section("Runs", _html_table(_runs(comparison, folder)), where, _commands(comparison)))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(_title(comparison))}</title><style>{_STYLE}</style></head>\n<body><main>\n"
        + "\n".join(parts)
        + "\n</main></body></html>\n"
    )


def _head(comparison: Comparison) -> str:
    """Return the conclusion, followed by the compared variants."""
    runs = len(comparison.runs())
    made = datetime.now().astimezone().isoformat(sep=" ", timespec="minutes")
    labels = labels_of(comparison.rows)
    title = "; ".join(labels)
    if len(labels) > 4:
        title = f"{len(labels)} variants"
    about = f"Comparison of {title}: {counted(runs, 'run')}. fp8launch {__version__}, {made}"
    facts = "".join(
        f"<div><dt>{name}</dt><dd>{breakable(text)}</dd></div>"
        for name, text in (setup_of(comparison) | training_of(comparison)).items()
    )
    headline = _unbroken(conclusion(comparison))
    for label in labels:
        if len(label) <= LONGEST_UNBROKEN:
            headline = headline.replace(html.escape(label), html.escape(label).replace(" ", "&nbsp;"))
    spread = quiet(_spread_of_headline(comparison))
    return f"<header><h1>{headline}</h1>{spread}<dl>{facts}</dl>{quiet(about)}</header>"


def _spread_of_headline(comparison: Comparison) -> str:
    """Explain a ± in the headline. The page has it there, because a phone shows the pictures before the table."""
    if not comparison.good or "±" not in conclusion(comparison):
        return ""
    return f"±: {meaning_of_spread(comparison)}"


def _title(comparison: Comparison) -> str:
    """Return the names of the studies, for the browser's tab."""
    return f"{setup_of(comparison).get('Study', 'Comparison')} – fp8launch"


def _pictures(comparison: Comparison) -> list[str]:
    """Return the section with pictures, or nothing if matplotlib is missing or there is nothing to draw."""
    if not available():
        return []
    drawn = "".join(map(picture_html, pictures(comparison)))
    if not drawn:
        return []
    return [_section("Pictures", f'<div class="pictures">{drawn}</div>', kind="drawn")]


def _section(title: str, *body: str, kind: str = "") -> str:
    tag = f'<section class="{kind}">' if kind else "<section>"
    return f"{tag}<h2>{html.escape(title)}</h2>{''.join(body)}</section>"


def _list(lines: Sequence[str]) -> str:
    if not lines:
        return ""
    items = "</li><li>".join(map(html.escape, lines))
    return f"<ul><li>{items}</li></ul>"


_LEGEND = {
    "*": "other settings than the variant differ too: see the differences",
    "!": "printed because of --force: the runs cannot be compared",
    "unlike": "no ratio: the runs cannot be compared",
}


def _legend(comparison: Comparison) -> str:
    cells = " ".join(map(" ".join, main_table(comparison.rows).rows))
    used = []
    for mark, text in _LEGEND.items():
        if mark in cells:
            used.append(f"{mark}: {text}")
    return "; ".join(used)


def _html_table(table: Table, condemned: Sequence[str] = ()) -> str:
    """Render a table whose first column names the row.

    `condemned` has the reason for each row that cannot be compared, and an empty text for the others. On a phone each
    row becomes a block of names and values, so nothing is cut off or scrolls sideways.
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
    """Render a number that can break before ± and `of`, with its interval on a separate line."""
    value, bracket, interval = _unbroken(text).partition(" [")
    value = value.replace("&nbsp;±", " ±").replace("of ", "of&nbsp;")
    if not bracket:
        return value
    return f'{value} <small class="interval">[{interval}</small>'


def _class(number: bool) -> str:
    if not number:
        return ""
    return ' class="number"'


_LONGEST_NAME = 40


def _whole(name: str) -> str:
    """Render a name that breaks only between its parts, and only if it is long."""
    if len(name) <= _LONGEST_NAME:
        return f"<span>{html.escape(name)}</span>"
    parts = []
    for part in name.split(", "):
        shown = breakable(part)
        if len(part) <= LONGEST_PART:
            shown = f"<span>{shown}</span>"
        parts.append(shown)
    return ", ".join(parts)


def _common_folder(comparison: Comparison) -> str:
    """Return the folder that has the folders of all runs, each named like its run; empty if there is none."""
    parents = set()
    for run in comparison.runs():
        for source in map(PurePath, run.sources):
            parents.add(str(source.parent) if source.name == run.name else "")
    return parents.pop() if len(parents) == 1 else ""


def _runs(comparison: Comparison, folder: str) -> Table:
    """Return a row for each run. Columns without content are left out, and so are paths if `folder` tells them."""
    rows = []
    for row in comparison.rows:
        for run in row.runs:
            step_time, lines, loss = NONE, NONE, NONE
            if run.good and run.speed.step_time_ms:
                step_time, lines = f"{run.speed.step_time_ms.median:,.1f}", str(len(run.steady_state.kept))
            if comparison.about_loss and run.good and (summary := loss_summary([run])):
                loss = summary.end_text
            rows.append(
                (
                    run.name,
                    row.name,
                    str(run.facts.get("seed", NONE)) if comparison.about_loss else NONE,
                    run.absent or run.status.replace("_", " "),
                    loss,
                    step_time,
                    lines,
                    str(run.steady_state.warmup_dropped),
                    NONE if folder else ", ".join(run.sources),
                )
            )
    headers = (
        "run", "variant", "seed", "status", "loss at the end", "step time (ms)", "log lines counted",
        "dropped as warm-up", "from",
    )  # fmt: skip
    numbers = (False, False, True, False, True, True, True, True, False)
    shown = [i for i, cells in enumerate(zip(*rows, strict=True)) if set(cells) != {NONE}]
    return Table(
        tuple(headers[i] for i in shown),
        tuple(tuple(row[i] for i in shown) for row in rows),
        tuple(numbers[i] for i in shown),
    )


def _commands(comparison: Comparison) -> str:
    commands = "\n".join(comparison.commands())
    if not commands:
        return ""
    # A browser would break after the hyphens of an option.
    words = re.sub(r"(?<!\S)-\S+", r"<span>\g<0></span>", html.escape(commands))
    return f"<pre>{words}</pre>"

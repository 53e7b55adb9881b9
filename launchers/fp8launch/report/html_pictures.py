"""Pictures of a comparison in a page: SVG with text as text, in the page's colours, and legends that wrap."""

from __future__ import annotations

import html
import io
import re
from collections.abc import Sequence
from functools import partial
from itertools import count

from fp8launch.report.html_text import breakable, quiet
from fp8launch.report.plot_style import INK, Key, Panel, Picture
from fp8launch.report.plots import panel_figure

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
    """A legend as text of the page, which wraps; inside the picture it would be cut."""
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
    dash = ""
    if key.dash in _DASH_LENGTHS:
        dash = f' stroke-dasharray="{_DASH_LENGTHS[key.dash]}"'
    line = f'<path d="M1 10h28" stroke="{colour}" stroke-width="2"{dash}/>'
    if key.marker:
        line += _MARKER_SHAPES.get(key.marker, '<circle cx="15" cy="10" r="4"/>')
    return line


def _svg(panel: Panel, name: str) -> str:
    """The panel with text as text, in the page's colours, without metadata."""
    import matplotlib as mpl

    # A salt of its own keeps the ids of one picture from meaning something in another.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": name, "text.parse_math": False}):
        out = io.StringIO()
        panel_figure(panel).savefig(out, format="svg", transparent=True, metadata={"Date": None})
    text = out.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.S)
    # Only tags change. The text between them are labels of any content, with < and > escaped.
    text = re.sub(r"<[^<>]*>", _tag, text)
    return re.sub(r">\s+<", "><", text).replace("\n", " ")


def _tag(match: re.Match[str]) -> str:
    """A tag of matplotlib's SVG without ids and namespaces, with the page's fonts and colours."""
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
    """The commands of a path without spaces around their letters; a path of straight lines to a tenth of a point."""
    text = match[0]
    if not re.search("[CQ]", text):
        text = re.sub(r"(\d\.\d)\d", r"\1", text)
    return re.sub(r"\s*([A-Za-z])\s*", r"\1", text).strip()


def _font(match: re.Match[str]) -> str:
    """The size of a font; its family is the page's."""
    if match[1]:
        return f"font-size: {match[1]}px"
    return ""

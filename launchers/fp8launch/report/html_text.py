"""Pieces of text in a page."""

from __future__ import annotations

import html
import re

# A part of a name that is longer than this does not fit a phone: it may break behind a separator.
LONGEST_PART = 36


def quiet(text: str) -> str:
    """A paragraph in small print; nothing for an empty text."""
    if not text:
        return ""
    return f'<p class="quiet">{html.escape(text)}</p>'


def breakable(text: str, longest: int = LONGEST_PART) -> str:
    """A text, such as a path, that may break behind its separators, but not inside a word or a number."""
    shown = html.escape(text)
    if len(text) <= longest:
        return shown
    return re.sub(r"([/_=:-](?=\w)|[.,](?=[A-Za-z]))", r"\1<wbr>", shown)

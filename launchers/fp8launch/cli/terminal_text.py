"""What programs printed, as a terminal may show it: colours, and no other command to the terminal."""

from __future__ import annotations

import codecs
import re

# Every control character, C1 and the marks for the direction of writing included, but line ends, tabs and the escape
# sequences that set colours.
_COMMANDS = re.compile(
    r"\x1b(?!\[[0-9;]{0,32}m)|[\x00-\x08\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]"
)
# The beginning of an escape sequence at the end of a block: the next block decides what it is.
_BEGUN = re.compile(r"\x1b(?:\[[0-9;]{0,32})?$")


class TerminalText:
    """The output of a program, in blocks of any size, with its colours and no other terminal command.

    Nothing is concealed by a colour's attributes, and no colour outlasts the text.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        self._held = ""
        self._coloured = False

    def feed(self, block: bytes, final: bool = False) -> str:
        """Return the text of a block; with `final` also what was held back, and the end of any colour."""
        text = self._held + self._decoder.decode(block, final)
        self._held = ""
        begun = _BEGUN.search(text)
        if begun and not final:
            self._held = text[begun.start() :]
            text = text[: begun.start()]
        spelt_out = _COMMANDS.sub(lambda match: match[0].encode("unicode_escape").decode(), text)
        visible = _COLOURS.sub(_without_hiding, spelt_out)
        self._coloured = self._coloured or "\x1b[" in visible
        if final and self._coloured:
            visible += "\x1b[0m"
        return visible


_COLOURS = re.compile(r"\x1b\[([0-9;]{0,32})m")
# A colour by number or by its parts: the values that follow are not attributes.
_COLOUR_PARTS = re.compile(r"(?<![0-9])0*[345]8;(?:0*5;[0-9]*|0*2;[0-9]*;[0-9]*;[0-9]*)")
# Attributes that hide text, or make it blink.
_HIDING = re.compile(r"(?<![0-9])0*[568](?![0-9])")


def _without_hiding(match: re.Match[str]) -> str:
    """The sequence without what conceals the text that follows it."""
    kept = ""
    at = 0
    for part in _COLOUR_PARTS.finditer(match[1]):
        kept += _HIDING.sub("", match[1][at : part.start()]) + part[0]
        at = part.end()
    kept += _HIDING.sub("", match[1][at:])
    attributes = ";".join(filter(None, kept.split(";")))
    if match[1] and not attributes:
        return ""
    return f"\x1b[{attributes}m"


def for_terminal(raw: bytes) -> bytes:
    """Return the output of a program as a terminal may show it."""
    return TerminalText().feed(raw, final=True).encode()

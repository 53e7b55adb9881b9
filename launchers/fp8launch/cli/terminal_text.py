"""Make program output safe for a terminal: keep colours, and escape all other terminal commands."""

from __future__ import annotations

import codecs
import re
import sys
from pathlib import Path

from fp8launch.injob.regular_files import open_regular
from fp8launch.injob.supervisor.log_lines import tail

# All control characters, including C1 and bidirectional marks, except newlines, tabs and escape sequences that set
# colours.
_COMMANDS = re.compile(
    r"\x1b(?!\[[0-9;]{0,32}m)|[\x00-\x08\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]"
)
# An escape sequence cut off at the end of a block. It is held back until the next block completes it.
_BEGUN = re.compile(r"\x1b(?:\[[0-9;]{0,32})?$")
_COLOURS = re.compile(r"\x1b\[([0-9;]{0,32})m")
# A colour given by index or RGB. Its parameters after the first are values, not attributes.
_COLOUR_PARTS = re.compile(r"(?<![0-9])0*[345]8;(?:0*5;[0-9]*|0*2;[0-9]*;[0-9]*;[0-9]*)")
# Attributes that hide text or make it blink.
_HIDING = re.compile(r"(?<![0-9])0*[568](?![0-9])")


class TerminalText:
    """Filters program output, fed in blocks of any size. Colours stay; other terminal commands are escaped.

    Attributes that hide text are removed, and colours are reset at the end.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        self._held = ""
        self._coloured = False

    def feed(self, block: bytes, final: bool = False) -> str:
        """Filter a block and return its text. With `final`, hold nothing back and reset colours."""
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


def _without_hiding(match: re.Match[str]) -> str:
    """Return a colour sequence without attributes that would hide the text that follows."""
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


def last_lines(path: Path, count: int) -> str:
    """Return the last lines of a text file, which may be huge."""
    return "\n".join(tail(path, longest=1000 * count).splitlines()[-count:])


class GrowingFile:
    """Copies a file to stdout as it grows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._text = TerminalText()

    def copy(self, final: bool = False) -> None:
        """Write what was appended since the last call. With `final`, hold nothing back."""
        write = sys.stdout.buffer.write
        terminal = sys.stdout.isatty()
        try:
            with open_regular(self._path) as file:
                file.seek(self._offset)
                while block := file.read(1 << 20):
                    self._offset += len(block)
                    if terminal:
                        block = self._text.feed(block).encode()
                    write(block)
        except FileNotFoundError:
            return
        if final and terminal:
            write(self._text.feed(b"", final=True).encode())
        sys.stdout.buffer.flush()

"""A log line as a program printed it, without what terminals and launchers add to it.

Launchers put prefixes in front of a line: `7: ` (srun --label), `[default7]:` or `[rank7]:` (torchrun --tee,
PyTorch), `[rank-63/64]` (Primus), `role/0 ` (NeMo-Run), `10.0.0.1: ` (pdsh), a time stamp, ANSI colours, a progress
bar that ends in a carriage return.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
from pathlib import Path
from typing import Any

from fp8launch.injob.regular_files import open_regular

# Only this many characters of a line are searched: no message is longer, and the time of a pattern stays bounded.
LONGEST_LINE = 4096
TAIL = 8 << 20  # bytes

_ANSI = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_TIME = r"\[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?\]?:?(?= )"
_RANK = r"(\d{1,6}):(?= )|\[(?:default|rank|Rank )-?(\d{1,6})(?:/\d{1,6})?\]:?"
_ROLE = r"[\w.-]{1,40}/\d{1,6}(?= )|\d{1,3}(?:\.\d{1,3}){3}:(?= )"
_PREFIX = re.compile(rf"\s{{0,40}}(?:{_RANK}|{_ROLE}|{_TIME}) ?")


def say(*words: str) -> None:
    """Print a message into the script's own output."""
    with contextlib.suppress(OSError):  # a full disk
        print("fp8launch:", *words, file=sys.stderr, flush=True)


def tail(path: Path, start: int = 0, longest: int = TAIL) -> str:
    """Return the end of a file, at most `longest` bytes, from byte `start` on; an empty text if it cannot be read."""
    try:
        with open_regular(path) as file:
            file.seek(max(start, file.seek(0, 2) - longest))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""


def without_colours(line: str) -> str:
    """Remove the escape sequences of a terminal."""
    return _ANSI.sub("", line) if "\x1b" in line else line


def clean(line: str) -> str:
    """Remove colours, and the text of a progress bar before its last carriage return."""
    line = without_colours(line)
    if "\r" in line:
        line = line.rstrip("\r").rsplit("\r", 1)[-1]
    return line


def bounded_int(text: str) -> int:
    """Return an integer of a record or a log. Raises ValueError if it has more digits than a recipe may have (39)."""
    # Beyond 308 digits no float holds it, and arithmetic fails.
    if len(text) > 40:
        raise ValueError(f"it has a number with {len(text)} digits")
    return int(text)


def json_object(text: str, start: int = 0) -> dict[str, Any] | None:
    """Return the JSON object at a position of a line, whatever follows it; None for anything else."""
    try:
        found, _ = json.JSONDecoder(parse_int=bounded_int).raw_decode(text, start)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def split_prefix(line: str) -> tuple[int | None, str]:
    """Return the rank or task that a launcher wrote in front of the line, if any, and the rest."""
    rank = None
    at = 0
    found = _PREFIX.match(line)
    while found:
        number = found.group(1) or found.group(2)
        if number:
            rank = int(number)
        at = found.end()
        found = _PREFIX.match(line, at)
    return rank, line[at:]

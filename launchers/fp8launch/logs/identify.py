"""Identify logs without Megatron's iteration lines."""

from __future__ import annotations

import re
from pathlib import Path

from fp8launch.logs.open_log import open_log

EXPECTED = "Megatron's `iteration N/M | ... elapsed time per iteration (ms): T`"
# Bytes of a file to search: enough to reach the first step after a long set-up, and little enough for any file.
_LOOKED_AT = 1 << 20
_ARGUMENTS = "---- arguments ----"
# Above this share of undecodable characters a file is not text in any encoding.
_MOST_UNREADABLE = 0.1

# Progress lines of programs, by fields that no other program prints together.
_PROGRAMS = (
    ("torchtitan", re.compile(r"\bstep:\s{1,10}\d{1,12}\s{1,10}loss:[^\n]{1,200}\btps:\s{1,10}[\d,]{1,20}")),
    ("nanotron", re.compile(r"\biteration: \d{1,12} / \d{1,12} \| consumed_tokens: ")),
    ("NeMo 1 (a progress bar)", re.compile(r"\bEpoch \d{1,9}:[^\n]{1,400}\breduced_train_loss=")),
)


def foreign_program(path: Path) -> str | None:
    """Return the program that wrote a log, if it is one whose logs fp8launch does not read."""
    return _program_of(_start_of(path).decode("utf-8", "replace"))


def why_no_iterations(path: Path) -> str:
    """Describe a log without iteration lines: what it is, and what was expected. Raises OSError if it is unreadable."""
    data = _start_of(path)
    text = data.decode("utf-8", "replace")
    if not data.strip():
        found = "it is empty"
    elif b"\0" in data or text.count("\ufffd") > _MOST_UNREADABLE * len(text):
        return f"it is a binary file; expected text with {EXPECTED}"
    elif program := _program_of(text):
        found = f"it is a log of {program}, which is not read"
    elif _ARGUMENTS in text:
        found = "it has Megatron's arguments, but ends before the first iteration"
    else:
        found = "the file has no iteration lines"
    if data.strip() and len(data) < _LOOKED_AT and not data.endswith(b"\n"):
        found += ", and its last line is cut off"
    return f"{found}; expected lines like {EXPECTED}"


def _start_of(path: Path) -> bytes:
    with open_log(path) as stream:
        return stream.read(_LOOKED_AT)


def _program_of(text: str) -> str | None:
    for program, line in _PROGRAMS:
        if line.search(text):
            return program
    return None

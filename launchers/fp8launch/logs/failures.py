"""Why a run failed, from what its log shows: the first real cause rather than the cascade after it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from fp8launch.logs.failure_patterns import CAUSE, END, EXCEPTION, PATTERNS
from fp8launch.logs.lines import clean, split_prefix

_TRACEBACK = re.compile(r"Traceback \(most recent call last\)")
_FRAME = re.compile(r'\s+File "([^"]+)", line \d+, in (\S+)')
_EXCEPTION = re.compile(r"(?:[A-Za-z_][\w.]*\.)?([A-Z]\w*(?:Error|Exception|Exit|Interrupt|Expired))\b\s*(?::|$)")
# torchrun and multiprocessing report the death of a child as an exception of their own.
_SECOND_HAND = (
    "ChildFailedError",
    "SignalException",
    "KeyboardInterrupt",
    "ProcessExitedException",
    "ProcessRaisedException",
)
# Lines that report nothing wrong although they hold the words: warnings, notes, source text, the argument dump.
HARMLESS = re.compile(
    r"Warning:|\bWARNING\b|INFO:|NCCL INFO|destroy_process_group\(\) was not called|(?i:error_handling)"
    r"|^\s{1,8}\w+ \.{2,} |number of nan iterations|^\s*(?:export|raise|assert|#|\^|\[--)"
)
# srun --kill-on-bad-exit ends a step with the words of a cancellation: they are the cause only where they come first.
_STEP_CANCELLED = re.compile(r"\*\*\* STEP .*CANCELLED AT (?!.*DUE TO)")
_CONFIGURATION = re.compile(r"arguments\.py|_config\.py|/config/|validate_args|__post_init__|yaml_arguments")
_REFUSALS = ("AssertionError", "ValueError", "TypeError", "NotImplementedError", "RuntimeError")


@dataclass(frozen=True)
class Failure:
    """`line` counts from 1, `offset` is in bytes; `message` is the log's own line, shortened."""

    code: str
    message: str
    advice: str
    depth: int
    offset: int
    line: int | None = None

    def as_json(self) -> dict[str, str | int | None]:
        return {"code": self.code, "message": self.message, "line": self.line, "advice": self.advice}


class FailureFinder:
    """Fed with the lines of one process in order, or with those that hold one of `NEEDLES`; `found` is the cause.

    State is kept per rank, as far as lines carry one, because tracebacks of several ranks come interleaved. `left` is
    to be set once the program has said that it leaves: what ends its step then is no failure.
    """

    def __init__(self) -> None:
        self.found: Failure | None = None
        self.left = False
        self._last_frame: dict[int | None, str] = {}
        self._in_traceback: set[int | None] = set()

    def feed(self, offset: int, raw: str) -> None:
        rank, line = split_prefix(clean(raw))
        if _TRACEBACK.search(line):
            self._in_traceback.add(rank)
            self._last_frame.pop(rank, None)
        elif frame := _FRAME.match(line):
            self._last_frame[rank] = f"{frame[1]} {frame[2]}"
        elif rank in self._in_traceback and (exception := _EXCEPTION.match(line)):
            self._in_traceback.discard(rank)
            self._exception(offset, line, exception[1], self._last_frame.pop(rank, ""))
        elif not HARMLESS.search(line):
            self._line(offset, line)

    def _exception(self, offset: int, line: str, kind: str, frame: str) -> None:
        """The last line of a traceback: a pattern explains it, or where it was raised does."""
        pattern = next((p for p in PATTERNS if p.expression.search(line)), None)
        if pattern and (pattern.depth < END or kind in _SECOND_HAND):
            self._take(Failure(pattern.code, _short(line), pattern.advice, pattern.depth, offset))
        elif kind in _REFUSALS and _CONFIGURATION.search(frame):
            advice = "`fp8launch check` finds most of these before the job is queued"
            self._take(Failure("bad-arguments", _located(line, frame), advice, CAUSE, offset))
        else:
            self._take(Failure("exception", _located(line, frame), "see the traceback above", EXCEPTION, offset))

    def _line(self, offset: int, line: str) -> None:
        pattern = next((p for p in PATTERNS if p.expression.search(line)), None)
        if pattern and not ((self.found or self.left) and _STEP_CANCELLED.search(line)):
            self._take(Failure(pattern.code, _short(line), pattern.advice, pattern.depth, offset))

    def _take(self, failure: Failure) -> None:
        if self.found is None or failure.depth < self.found.depth:
            self.found = failure


def find_failure(lines: Iterable[tuple[int, str]]) -> Failure | None:
    """The cause among lines given as (byte offset, text); `line` is left to who knows the file."""
    finder = FailureFinder()
    for offset, line in lines:
        finder.feed(offset, line)
    return finder.found


def _located(line: str, frame: str) -> str:
    """An assertion without a text says nothing but its place."""
    empty = not line.partition(":")[2].strip()
    return _short(line) + (f" (in {frame.rsplit('/', 1)[-1]})" if frame and empty else "")


def _short(line: str, width: int = 300) -> str:
    line = line.strip()
    return line if len(line) <= width else line[: width - 1] + "…"

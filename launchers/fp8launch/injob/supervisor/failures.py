"""Why a training ended, from what its log shows: the first real cause rather than the cascade after it.

The supervisor uses this module on the compute node; `fp8launch parse` and the reports use it later.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from fp8launch.injob.supervisor.failure_patterns import (
    CAUSE,
    END,
    EXCEPTION,
    PATTERNS,
    PEER,
    STEP_CANCELLED,
    VAGUE,
    Pattern,
    needles,
)
from fp8launch.injob.supervisor.log_lines import LONGEST_LINE, clean, split_prefix

# Megatron's message at the end of its loop, and the worker's message when everything is written.
TRAINED = "after training is done]"
ALL_WRITTEN = "fp8launch: the training is over, and everything is written"
# A failure may precede this many of the last iterations. Earlier failures did not stop the training.
LAST_ITERATIONS = 3

TRACEBACK_ADVICE = "no known cause: read the traceback that ends at this line of the log"

_TRACEBACK = re.compile(r"Traceback \(most recent call last\)")
_FRAME = re.compile(r'\s{1,80}File "([^"]+)", line \d{1,9}, in (\S+)')
_EXCEPTION = re.compile(
    r"(?:[A-Za-z_][\w.]{0,200}\.)?([A-Z]\w{0,100}(?:Error|Exception|Exit|Interrupt|Expired))\b\s{0,40}(?::|$)"
)
# torchrun and multiprocessing report the death of a child by their own exceptions.
_SECOND_HAND = (
    "ChildFailedError",
    "SignalException",
    "KeyboardInterrupt",
    "ProcessExitedException",
    "ProcessRaisedException",
)
# Lines that contain the words but report no failure: warnings, notes, source text, the argument dump.
_HARMLESS = re.compile(
    r"Warning:|\bWARNING\b|INFO:|NCCL INFO|destroy_process_group\(\) was not called|error_handling|ERROR_HANDLING"
    r"|^\s{1,8}\w{1,100} \.{2,} |number of nan iterations|^\s{0,200}(?:export|raise|assert|#|\^|\[--)"
)
# srun --kill-on-bad-exit ends a step with the words of a cancellation: they are the cause only if they come first.
_STEP_CANCELLED = re.compile(r"\*\*\* STEP [^*]{0,200}CANCELLED AT (?![^*]{0,200}DUE TO)")
# srun prints this when it ends the step itself because a process failed, never for a cancellation.
_STEP_ENDED_BY_SRUN = re.compile(r"srun: [^*]{0,100}?Terminating (?:StepId=|job step )")
# srun prints this if a step is ended from outside, and also if it ends the step itself.
_STEP_ABORTED = re.compile(r"srun: Job step aborted")
# srun reports failed tasks in the order in which they ended.
_TASK_ENDED = re.compile(r"srun: error: [\w.-]{1,255}: tasks? \d[\d,-]{0,200}: (.{1,100})")
# A process that ends like this before srun ends the step did not end because another one was gone.
_ENDS_BY_SIGNAL = (
    (re.compile(r"Killed|Exited with exit code 137\b"), "killed"),
    (re.compile(r"Segmentation fault|Exited with exit code 139\b"), "segfault"),
)
# What a peer prints if the kernel on the other side closed the connection, because the process there was gone.
_CONNECTION_CLOSED = re.compile(r"[Cc]onnection (?:was )?(?:closed|reset)|remote process exit")
_TIMED_OUT = re.compile(r"[Tt]imed[ _]?out|[Tt]imeout")
_ITERATION = re.compile(r"\biteration\s{0,20}:?\s{1,20}\d{1,15}\s{0,20}/\s{0,20}\d{1,15}\s{0,20}\|")
_SLURM_ANNOUNCES = re.compile(r"DUE TO |CANCELLED AT ")
# The supervisor then ends the training, which may print further iterations until it has been killed.
_SUPERVISOR_ENDS_IT = re.compile(r"^fp8launch: (?:hang|unhealthy): ")
_EXITING = re.compile(r"\[(exiting program[^\]]{0,200})")
_CONFIGURATION = re.compile(r"arguments\.py|_config\.py|/config/|validate_args|__post_init__|yaml_arguments")
_REFUSALS = ("AssertionError", "ValueError", "TypeError", "NotImplementedError", "RuntimeError")

# Every line that matters to the classifier contains one of these; all others may be left out.
NEEDLES: tuple[bytes, ...] = needles(
    PATTERNS, "Traceback", '  File "', "Error", "Exception", "Exit", "Interrupt", "Expired",
    TRAINED, ALL_WRITTEN, "[exiting program", "Terminating ", "Job step aborted",
)  # fmt: skip

_NEEDLES_AS_TEXT = tuple(needle.decode() for needle in NEEDLES)
ADVICE = {pattern.code: pattern.advice for pattern in reversed(PATTERNS)}


@dataclass(frozen=True)
class Failure:
    """A failure and the line that shows it.

    `line` counts from 1, `offset` is in bytes. `message` is the line, shortened; `source` includes its prefixes.
    """

    code: str
    message: str
    advice: str
    depth: int
    offset: int
    line: int | None = None
    source: str = ""

    def as_json(self) -> dict[str, str | int | None]:
        return {"code": self.code, "message": self.message, "line": self.line, "advice": self.advice}


@dataclass(frozen=True)
class Ending:
    """How a process ended.

    `finished`: Megatron printed that training is done. `exit_line`: the reason that it printed for an early exit.
    `whole`: the worker printed that everything is written, after which nothing can fail any more.
    """

    finished: bool = False
    exit_line: str | None = None
    failure: Failure | None = None
    whole: bool = False


class FailureFinder:
    """Feed it the lines of one process in order, at least the lines with one of `NEEDLES`; `found` is the cause.

    State is kept per rank if lines name one, because tracebacks of several ranks are interleaved. Set `left` once the
    program has printed that it exits, or srun that it ends the step: a cancellation of the step is no failure then.
    """

    def __init__(self) -> None:
        self.found: Failure | None = None
        self.left = False
        self._last_frame: dict[int | None, str] = {}
        self._in_traceback: set[int | None] = set()

    def feed(self, offset: int, raw: str) -> None:
        if self.found is not None and self.found.depth == CAUSE:
            # No later line is a deeper cause, but Slurm may say later why the step was cancelled.
            if self.found.code == STEP_CANCELLED:
                self._why_cancelled(offset, raw[:LONGEST_LINE])
            return
        source = clean(raw[:LONGEST_LINE])
        rank, line = split_prefix(source)
        if _TRACEBACK.search(line):
            self._in_traceback.add(rank)
            self._last_frame.pop(rank, None)
            return
        frame = _FRAME.match(line)
        if frame:
            self._last_frame[rank] = f"{frame.group(1)} {frame.group(2)}"
            return
        exception = _EXCEPTION.match(line) if rank in self._in_traceback else None
        if exception:
            self._in_traceback.discard(rank)
            self._exception(offset, line, source, exception.group(1), self._last_frame.pop(rank, ""))
        elif not _HARMLESS.search(line):
            self._line(offset, line, source)

    def _exception(self, offset: int, line: str, source: str, kind: str, frame: str) -> None:
        """Take the last line of a traceback. A pattern explains it, or the place where the exception was raised."""
        pattern = _meaning(line)
        if pattern and (pattern.depth < END or kind in _SECOND_HAND):
            self._take(Failure(pattern.code, _short(line), pattern.advice, pattern.depth, offset, source=source))
        elif kind in _REFUSALS and _CONFIGURATION.search(frame):
            advice = "`fp8launch check` finds most of these before the job is queued"
            self._take(Failure("bad-arguments", _located(line, frame), advice, CAUSE, offset, source=source))
        else:
            message = _located(line, frame)
            self._take(Failure("exception", message, TRACEBACK_ADVICE, EXCEPTION, offset, source=source))

    def _line(self, offset: int, line: str, source: str) -> None:
        pattern = _meaning(line, VAGUE + 1 if self.found is None else self.found.depth)
        if pattern is None:
            return
        if (self.found or self.left) and _STEP_CANCELLED.search(line):
            return
        self._take(Failure(pattern.code, _short(line), pattern.advice, pattern.depth, offset, source=source))

    def _why_cancelled(self, offset: int, raw: str) -> None:
        if not _SLURM_ANNOUNCES.search(raw):
            return
        source = clean(raw)
        line = split_prefix(source)[1]
        pattern = _meaning(line, EXCEPTION)
        if pattern is not None and pattern.code != STEP_CANCELLED:
            self.found = Failure(pattern.code, _short(line), pattern.advice, CAUSE, offset, source=source)

    def _take(self, failure: Failure) -> None:
        if self.found is None or failure.depth < self.found.depth:
            self.found = failure


def read_ending(lines: Iterable[tuple[int, str]], since: int = 0, batch_output: str = "") -> Ending:
    """Return how a process ended, from lines as (byte offset, text): all lines, or only lines with one of `NEEDLES`.

    Failures before offset `since` did not stop the training, except failures that Slurm announced or for which the
    supervisor ended it. `batch_output` is what srun printed, if that is another file: it shows whether srun ended the
    step itself.
    """
    finished, whole, exit_line = False, False, None
    finder = FailureFinder()
    finder.left = _STEP_ENDED_BY_SRUN.search(batch_output) is not None
    aborted = _STEP_ABORTED.search(batch_output) is not None
    for offset, raw in lines:
        line = raw[:LONGEST_LINE]
        if offset < since and not (_SLURM_ANNOUNCES.search(line) or _SUPERVISOR_ENDS_IT.search(line)):
            continue
        if ALL_WRITTEN in line:
            whole = True
        elif TRAINED in line:
            finished, finder = True, FailureFinder()
            finder.left = True
        elif _STEP_ENDED_BY_SRUN.search(line):
            finder.left = True
        elif _STEP_ABORTED.search(line):
            aborted = True
        elif "[exiting program" in line:
            found = _EXITING.search(line)
            if found:
                exit_line = found.group(1).strip()
            finder.left = True
        else:
            finder.feed(offset, line)
    if whole:
        return Ending(finished, exit_line, None, whole)
    failure = finder.found
    if failure is not None and failure.code == STEP_CANCELLED and aborted and not finder.left:
        failure = replace(failure, code="cancelled", advice=ADVICE["cancelled"])
    return Ending(finished, exit_line, failure, whole)


def ending_of_attempt(log: str, batch_output: str = "") -> Ending:
    """Return how an attempt ended, from the end of its log and the output of its batch script, where srun prints."""
    ending = read_ending(_telling_lines(log), _last_iterations(log), batch_output)
    of_srun = read_ending(_telling_lines(batch_output)).failure
    if of_srun is None or ending.whole:
        return ending
    first = _first_to_end(batch_output, _peer_is_gone(log, ending.failure))
    if first is not None and (ending.failure is None or ending.failure.depth >= EXCEPTION):
        return replace(ending, failure=first)
    # The log is the training's own: srun's lines help only if the log shows next to nothing.
    says_little = ending.failure is None or ending.failure.depth >= EXCEPTION or ending.failure.code == STEP_CANCELLED
    if ending.failure is None or (of_srun.depth == CAUSE and says_little):
        return replace(ending, failure=of_srun)
    return ending


def failures_of(log: str) -> Iterator[tuple[str, str]]:
    """Yield the code and the text of every line that means a failure."""
    for _, source in _telling_lines(log):
        _, line = split_prefix(clean(source))
        if _HARMLESS.search(line):
            continue
        pattern = _meaning(line)
        if pattern is not None:
            yield pattern.code, source


def _peer_is_gone(log: str, failure: Failure | None) -> bool:
    """Return whether processes failed because another one had ended, not because it was silent.

    A silent process may still run, and is killed when srun ends the step.
    """
    if failure is None or failure.depth != PEER:
        return False
    reports = [source for _, source in failures_of(log)]
    return any(map(_CONNECTION_CLOSED.search, reports)) and not any(map(_TIMED_OUT.search, reports))


def _first_to_end(batch_output: str, peer_is_gone: bool) -> Failure | None:
    """Return the signal that ended a process of the step, if it explains why the others failed.

    srun may first report a peer that failed because the process was gone, and end the step. The messages of the peers
    (`peer_is_gone`) then distinguish a process that was gone from one that srun killed.
    """
    for offset, raw in _telling_lines(batch_output):
        if _SLURM_ANNOUNCES.search(raw) or (_STEP_ENDED_BY_SRUN.search(raw) and not peer_is_gone):
            return None
        ended = _TASK_ENDED.search(raw)
        if ended is None:
            continue
        for how, code in _ENDS_BY_SIGNAL:
            if how.match(ended.group(1)):
                return Failure(code, _short(raw), ADVICE[code], EXCEPTION, offset, source=raw)
    return None


def _telling_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield the offset and the text of lines that matter to the classifier, cut to the length that it searches."""
    offset = 0
    for line in text.split("\n"):
        start = line[:LONGEST_LINE]
        if any(needle in start for needle in _NEEDLES_AS_TEXT):
            yield offset, start
        offset += len(line) + 1


def _last_iterations(log: str) -> int:
    """Return where the last iteration lines start; nothing before them stopped the training."""
    since = len(log)
    for _ in range(LAST_ITERATIONS):
        at = log.rfind("iteration", 0, since)
        while at >= 0 and not _ITERATION.match(log, at):
            at = log.rfind("iteration", 0, at)
        if at < 0:
            break
        since = log.rfind("\n", 0, at) + 1
    return 0 if since == len(log) else since


def traceback_of(lines: Iterable[str], source: str) -> list[str]:
    """Return the traceback that ends with a failure's line, without what launchers put in front of its lines.

    Only lines of the same rank belong to it, because ranks write into one log at once. Return an empty list if the
    line ends no traceback.
    """
    rank, _ = split_prefix(source)
    traceback: list[str] = []
    for raw in lines:
        cleaned = clean(raw[:LONGEST_LINE])
        of_line, line = split_prefix(cleaned)
        if of_line != rank:
            continue
        if _TRACEBACK.search(line):
            traceback = [line]
        elif traceback:
            traceback.append(line)
            if cleaned == source:
                return traceback
            if not line.startswith(" ") and _EXCEPTION.match(line):
                traceback = []  # it ended in another exception
    return []


def _meaning(line: str, below: int = VAGUE + 1) -> Pattern | None:
    """Return the first matching pattern of a lower depth; patterns are in the order of their depth."""
    for pattern in PATTERNS:
        if pattern.depth >= below:
            return None
        if pattern.matches(line):
            return pattern
    return None


def _located(line: str, frame: str) -> str:
    """Return the line, with its place if it has no text, as for an assertion."""
    if frame and not line.partition(":")[2].strip():
        return f"{_short(line)} (in {frame.rsplit('/', 1)[-1]})"
    return _short(line)


def _short(line: str, width: int = 300) -> str:
    line = line.strip()
    if len(line) > width:
        line = line[: width - 1] + "…"
    return line

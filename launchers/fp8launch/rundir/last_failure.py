"""The cause of failure of a run's newest attempt, from its files in the run folder."""

from __future__ import annotations

import glob
from pathlib import Path

from fp8launch.injob.supervisor.failures import Failure, ending_of_attempt, traceback_of
from fp8launch.injob.supervisor.log_lines import LONGEST_LINE, tail
from fp8launch.logs.file_slices import lines
from fp8launch.rundir.atomic_io import is_own_file
from fp8launch.rundir.attempts import read_attempt_log
from fp8launch.rundir.run_dir import RunFolder
from fp8launch.untyped import as_int

# The end of a log, which says why it ended; `runs` reads it for many runs.
_END_BYTES = 1 << 20
# A traceback may begin this far before its last line, because ranks write theirs at the same time.
_TRACEBACK_BYTES = 1 << 20


def last_failure(run: RunFolder) -> Failure | None:
    """Classify the end of the newest attempt as its supervisor would have; None if nothing shows a failure."""
    attempts = run.attempts()
    log = tail(attempts[-1].log, longest=_END_BYTES) if attempts else ""
    return ending_of_attempt(log, _batch_output(run)).failure


def _batch_output(run: RunFolder) -> str:
    """Return the output of the newest attempt's script, without the output of earlier starts of the same job."""
    files, attempts = run.batch_output(), run.attempts()
    if not files and attempts:
        # A task of an array writes into its study's folder.
        pattern = f"*-{glob.escape(attempts[-1].job_id)}.out"
        files = [file for file in (run.path.parent / "logs").glob(pattern) if is_own_file(file)]
    if not files:
        return ""
    start = 0
    if attempts and attempts[-1].restart:
        said = _output_before(run, f"{attempts[-1].job_id}-{attempts[-1].restart}")
        if said is None:
            return ""  # output of an earlier start would explain the wrong failure
        start = said
    return tail(files[-1], start, _END_BYTES)


def _output_before(run: RunFolder, attempt_name: str) -> int | None:
    """Return the size of the script's output, in bytes, when this attempt began; None if it is not recorded."""
    for attempt in read_attempt_log(run).get("attempts", []):
        if attempt.get("name") == attempt_name:
            return as_int(attempt.get("said"))
    return None


def traceback_in(path: Path, failure: Failure) -> list[str]:
    """Return the lines of the traceback in a log that ends at a failure's line, if there is one."""
    begin, end = max(0, failure.offset - _TRACEBACK_BYTES), failure.offset + 4 * LONGEST_LINE
    try:
        near = [text for _, text in lines(path, begin, end)]
    except OSError:
        return []
    return traceback_of(near, failure.source)

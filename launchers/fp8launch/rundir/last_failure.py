"""Why the newest attempt at a run failed, from what it left in the run folder."""

from __future__ import annotations

from pathlib import Path

from fp8launch.injob.supervisor.failures import Failure, ending_of_attempt
from fp8launch.injob.supervisor.slurm_cli import tail
from fp8launch.rundir.atomic_io import is_own_file
from fp8launch.rundir.attempts import read_attempt_log
from fp8launch.rundir.run_dir import RunFolder
from fp8launch.untyped import as_int

# The end of a log, which says why it ended; `runs` reads it for many runs.
_END_BYTES = 1 << 20


def last_failure(run: RunFolder) -> Failure | None:
    """Classify the end of the newest attempt, as its supervisor would have; None where nothing shows a failure."""
    attempts = run.attempts()
    log = ""
    if attempts:
        log = _end(attempts[-1].log)
    return ending_of_attempt(log, _batch_output(run)).failure


def _batch_output(run: RunFolder) -> str:
    """The output of the newest attempt's batch script. Slurm appends to the file of a job that it restarts."""
    files, attempts = run.batch_output(), run.attempts()
    if not files and attempts:
        # A task of an array writes into its study's folder.
        of_study = run.path.parent / "logs" / f"slurm-{attempts[-1].job_id}.out"
        if is_own_file(of_study):
            files = [of_study]
    if not files:
        return ""
    start = 0
    if attempts and attempts[-1].restart:
        said = _output_before(run, f"{attempts[-1].job_id}-{attempts[-1].restart}")
        if said is None:
            return ""  # words of an earlier start would explain the wrong end
        start = said
    return _end(files[-1], start)


def _output_before(run: RunFolder, attempt_name: str) -> int | None:
    """The size of the batch script's output, in bytes, when this attempt began; None where it is not recorded."""
    for attempt in read_attempt_log(run).get("attempts", []):
        if attempt.get("name") == attempt_name:
            return as_int(attempt.get("said"))
    return None


def _end(file: Path, start: int = 0) -> str:
    try:
        return tail(file, max(start, file.stat().st_size - _END_BYTES))
    except OSError:
        return ""

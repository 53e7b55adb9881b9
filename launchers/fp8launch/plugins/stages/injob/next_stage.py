"""The last act of a stage's job: `next_stage.py RUN-FOLDER ATTEMPT STATUS SCHEDULER`.

If the run is complete, the run of the next stage is released. SCHEDULER is the class of the scheduler's half inside the
job. Nothing here decides about this run: every problem is a message in the job's output.
"""
# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

if __name__ == "__main__":
    # Started by its path: imports go by the package's full names, never by bare names in this folder.
    sys.path[0] = str(Path(__file__).resolve().parents[4])

from fp8launch.injob.supervisor import job_scheduler
from fp8launch.injob.supervisor.log_lines import say
from fp8launch.injob.supervisor.run_end import end_of
from fp8launch.injob.supervisor.run_records import MANIFEST, json_mapping

STUDY = "study.json"


def next_run(folder: Path) -> Path | None:
    """Return the folder of the run that waits for the run in `folder`; None for the last one."""
    names = [str(point["run"]) for point in json_mapping(folder.parent / STUDY).get("points", [])]
    following = names[names.index(folder.name) + 1 :]
    return folder.with_name(Path(following[0]).name) if following else None


def release_next(folder: Path, attempt: str, status: int, scheduler: str) -> None:
    end, after = end_of(folder, attempt, status), next_run(folder)
    if end is None or after is None:
        return
    if end.state != "completed":
        say(f"the stage is not complete ({end.state}): {after.name} waits; `fp8launch resume {folder.name}` continues")
        return
    jobs = json_mapping(after / MANIFEST).get("jobs") or []
    half = job_scheduler.load(attempt.rpartition("-")[0], folder, os.environ, {"scheduler": scheduler})
    if half.release(after, str(jobs[-1]["id"]) if jobs else None):
        say(f"the stage is complete, and {after.name} may start")
    else:
        say(f"the stage is complete, but {after.name} was not released: run `fp8launch resume {folder.parent.name}`")


def main(words: list[str]) -> None:
    folder, attempt, status, scheduler = words
    # The script ignores SIGTERM while this runs. The next stage's script would inherit that.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.umask(os.umask(0o022) | 0o022)
    try:
        release_next(Path(folder), Path(attempt).name, int(status), scheduler)
    except Exception as problem:  # whatever it is, the job has ended as it has
        say(f"the next stage was not released: {type(problem).__name__}: {problem}; run `fp8launch resume`")


if __name__ == "__main__":
    main(sys.argv[1:])

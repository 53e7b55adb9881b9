"""The last act of a job: `at_end.py RUN-FOLDER ATTEMPT STATUS VARIABLE end|failure`.

If the run has ended, this posts its end to the webhook whose address is in the environment variable VARIABLE. The
address is in no file and on no command line. Nothing here decides about the job: every problem is a message in its
output.
"""
# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import threading
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # Started by its path: imports go by the package's full names, never by bare names in this folder.
    sys.path[0] = str(Path(__file__).resolve().parents[4])

from fp8launch.injob.supervisor.attempt_log import batch_output
from fp8launch.injob.supervisor.failures import Failure, ending_of_attempt
from fp8launch.injob.supervisor.health_rules import HealthLimits, HealthProblem, errors_of, problems_of
from fp8launch.injob.supervisor.health_watch import series_of, values_of
from fp8launch.injob.supervisor.log_lines import say, tail
from fp8launch.injob.supervisor.run_end import End, end_of
from fp8launch.injob.supervisor.run_records import MANIFEST, json_mapping
from fp8launch.plugins.notify.injob.sent import claim, record_of
from fp8launch.plugins.notify.injob.webhook import ADDRESS, post

# Slurm kills a job 30 s after it asked it to end.
LONGEST = 20.0
# Rules that need to know nothing about the run but its log.
_CODES = ("nan", "zero-grad-norm")


def message_about(folder: Path, end: End) -> tuple[dict[str, Any], bool]:
    """Return the message that `--wait` would send, and whether the run is all right."""
    log = tail(folder / "logs" / f"{end.attempt}.log")
    rows = [row for row in map(values_of, log.splitlines()) if row is not None]
    health = _health(folder, rows)
    failure: Failure | None = None
    if end.state != "completed":
        output = tail(batch_output(folder, end.attempt.rpartition("-")[0]))
        failure = ending_of_attempt(log, output).failure
    loss = rows[-1].get("loss", math.nan) if rows else math.nan
    text = f"{folder.name}: {end.state}"
    if end.state != "cancelled" and failure is not None:
        text += f": {failure.code}: {failure.message}"
    elif health:
        text += f", unhealthy: {health[0].message}"
    elif end.detail:
        text += f": {end.detail}"
    message = {
        "text": text,
        "run": folder.name,
        "state": end.state,
        "detail": end.detail,
        "failure": failure.as_json() if failure is not None else None,
        "health": [problem.as_json() for problem in health],
        "loss": loss if math.isfinite(loss) else None,
        "iteration": int(rows[-1]["number"]) if rows else None,
    }
    return message, end.state == "completed" and not health


def _health(folder: Path, rows: list[dict[str, float]]) -> list[HealthProblem]:
    recipe = json_mapping(folder / MANIFEST).get("recipe") or {}
    limits = HealthLimits.of_recipe(recipe.get("health") or {})
    series = series_of(rows)
    return [problem for problem in errors_of(problems_of(series, series, {}, limits)) if problem.code in _CODES]


def notify(folder: Path, attempt: str, status: int, variable: str, when: str) -> None:
    end = end_of(folder, attempt, status)
    if end is None:
        return
    message, good = message_about(folder, end)
    if good and when == "failure":
        return
    url = os.environ.get(variable, "")
    if not ADDRESS.fullmatch(url):
        why = "does not contain the address of a webhook" if url else "did not reach the job"
        say(f"no notification was sent: the variable {variable} {why}")
        return
    record = record_of(folder, end.attempt)
    if not claim(record):
        return  # another job of this run, or somebody who waits, has notified of this end
    problem = _post_in_time(url, json.dumps(message))
    if problem:
        with contextlib.suppress(OSError):
            record.unlink()
        say(f"no notification was sent: the webhook {problem}")


def _post_in_time(url: str, body: str) -> str:
    """Post a message, but give up after LONGEST seconds: no timeout of the library limits the look-up of a name."""
    answers: list[str] = []
    thread = threading.Thread(target=lambda: answers.append(post(url, body)), daemon=True)
    thread.start()
    thread.join(LONGEST)
    return answers[0] if answers else f"did not answer within {LONGEST:.0f} s"


def main(words: list[str]) -> None:
    folder, attempt, status, variable, when = words
    os.umask(os.umask(0o022) | 0o022)
    try:
        notify(Path(folder), Path(attempt).name, int(status), variable, when)
    except Exception as problem:  # whatever it is, the job has ended as it has
        say(f"no notification was sent: {type(problem).__name__}")


if __name__ == "__main__":
    main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)  # a thread may still wait for an answer

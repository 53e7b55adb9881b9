"""Log a run to a tracker while it runs: `follow.py wandb|mlflow|tensorboard RUN-FOLDER ATTEMPT SETTINGS`.

It reads the log of the attempt as it grows, after those of earlier attempts, and ends soon after the attempt or on
SIGTERM. Nothing here reaches the training: every problem is a line in the job's output.
"""
# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import contextlib
import fcntl
import importlib
import json
import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # Started by its path: imports go by the package's full names, never by bare names in this folder.
    sys.path[0] = str(Path(__file__).resolve().parents[4])

from fp8launch.injob.regular_files import open_regular
from fp8launch.injob.supervisor.log_lines import say
from fp8launch.injob.supervisor.run_end import end_of
from fp8launch.plugins.tracking.injob.event_file import EventFile
from fp8launch.plugins.tracking.injob.log_rows import LogRows, Row
from fp8launch.plugins.tracking.injob.mlflow_run import MlflowRun
from fp8launch.plugins.tracking.injob.tracked_run import file_name, tracked_run
from fp8launch.plugins.tracking.injob.wandb_run import WandbRun

EVERY = 2.0  # seconds between two looks at the log
RETRY_AFTER = 60.0  # seconds without an attempt after a problem of the tracker
# Seconds that a tracker may take once the training has ended, and if the job is being ended: Slurm kills it 30 s after
# it asked it to end, and the job may notify somebody after this.
LONGEST_END, LONGEST_CANCELLED_END = 25.0, 10.0
# Seconds for which an attempt may decide how the run goes on, once its training has ended.
AFTER_THE_TRAINING = 5.0
_MOST_ROWS = 200_000
_BLOCK = 1 << 22
_LONGEST_PENDING = 1 << 20
_SECRETS = re.compile(r"WANDB_API_KEY|MLFLOW_TRACKING_(?:TOKEN|PASSWORD|URI)")
_INTERRUPTED = 143


def open_run(tracker: str, folder: Path, settings: dict[str, Any]) -> WandbRun | MlflowRun | EventFile:
    """Open the run of a folder in a tracker. Raises whatever the tracker's library does."""
    run = tracked_run(folder)
    if tracker == "wandb":
        return WandbRun(run, settings, folder / "tracking")
    if tracker == "mlflow":
        return MlflowRun(run, settings, run.config)
    if settings.get("dir"):
        return EventFile(Path(settings["dir"], run.project, file_name(run.name)))
    return EventFile(folder / "tensorboard")


@dataclass
class GrowingLog:
    """The lines of a log so far."""

    file: Path
    offset: int = 0
    pending: bytes = b""

    def lines(self) -> Iterator[str]:
        """Yield the lines that were completed since the last call."""
        with contextlib.suppress(OSError), open_regular(self.file) as stream:  # it may not exist yet
            stream.seek(self.offset)
            while block := stream.read(_BLOCK):
                self.offset += len(block)
                *lines, pending = (self.pending + block).split(b"\n")
                self.pending = pending[-_LONGEST_PENDING:]
                for line in lines:
                    yield line.decode("utf-8", "replace")


@dataclass
class Delivery:
    """Rows on their way to a tracker. They wait while it has a problem."""

    tracker: str
    folder: Path
    settings: dict[str, Any]
    waiting: list[Row] = field(default_factory=list)
    run: WandbRun | MlflowRun | EventFile | None = None
    retry_at: float = 0.0
    problem: str = ""

    def deliver(self, at_once: bool = False) -> None:
        """Log what waits, unless the tracker had a problem a moment ago."""
        if not self.waiting or (time.monotonic() < self.retry_at and not at_once):
            return
        try:
            if self.run is None:
                self.run = open_run(self.tracker, self.folder, self.settings)
                say(f"tracking: {self.tracker}: {self.run.place}")
                if isinstance(self.run, WandbRun) and self.run.upload:
                    say(f"tracking: wandb: to upload the run: {self.run.upload}")
            last = self.run.last
            rows = [row for row in self.waiting if row.step > last]
            if rows:
                self.run.log(rows)
            self.waiting = []
            self.problem = ""
        except Exception as problem:  # libraries of trackers raise anything
            self._failed(problem)

    def close(self, state: str, failed: bool) -> None:
        """Log what waits, and end the run in the tracker as it ended."""
        self.deliver(at_once=True)
        if self.waiting:
            how = f"`fp8launch export {self.folder.name} --to {self.tracker}` completes the run"
            say(f"tracking: {self.tracker}: {len(self.waiting)} iterations were not logged: {how}")
        if self.run is None:
            return
        try:
            self.run.close(state, failed)
        except Exception as problem:
            self._failed(problem)

    def _failed(self, problem: Exception) -> None:
        self.run = None
        self.retry_at = time.monotonic() + RETRY_AFTER
        del self.waiting[:-_MOST_ROWS]
        told = f"{type(problem).__name__}: {without_secrets(' '.join(str(problem).split()))[:200]}"
        if told != self.problem:
            say(f"tracking: {self.tracker}: {told}")
        self.problem = told


def without_secrets(text: str) -> str:
    for name, value in os.environ.items():
        if value and _SECRETS.fullmatch(name):
            text = text.replace(value, name)
    return re.sub(r"//\S*@", "//", text)


def follow(tracker: str, folder: Path, attempt: Path, settings: dict[str, Any], stop: threading.Event) -> None:
    """Follow an attempt until it ends, its script is gone, or `stop` is set."""
    parent, exit_file, log = os.getppid(), Path(f"{attempt}.exit"), Path(f"{attempt}.log")
    rows, delivery = LogRows(), Delivery(tracker, folder, settings)
    earlier = sorted((file for file in log.parent.glob("*.log") if file != log), key=lambda file: file.stat().st_mtime)
    logs = [GrowingLog(file) for file in (*earlier, log)]
    with contextlib.suppress(Exception):  # reported when the first row is logged
        # While the training starts: it takes seconds.
        if tracker != "tensorboard":
            importlib.import_module(tracker)
    ends_at: float | None = None
    while True:
        if ends_at is None and exit_file.exists():
            ends_at = time.monotonic() + AFTER_THE_TRAINING
        over = stop.is_set() or os.getppid() != parent or (ends_at is not None and time.monotonic() > ends_at)
        for each in logs:
            for line in each.lines():
                delivery.waiting += rows.feed(line)
        # Earlier attempts write nothing any more.
        logs = logs[-1:]
        if over:
            break
        delivery.deliver()
        stop.wait(EVERY)
    delivery.waiting += rows.rest()
    delivery.close(*state_of(folder, attempt))


def state_of(folder: Path, attempt: Path) -> tuple[str, bool]:
    """Return the state of a run after an attempt, and whether it failed. A run that goes on is `running`."""
    status = _INTERRUPTED
    with contextlib.suppress(OSError, ValueError), open_regular(Path(f"{attempt}.exit")) as file:
        status = int(file.read(20))
    end = end_of(folder, attempt.name, status)
    if end is None:
        return "running", False
    return end.state, end.state == "failed"


@contextlib.contextmanager
def only_one(tracker: str, folder: Path, stop: threading.Event) -> Iterator[None]:
    """Wait for the process of the attempt before to end. File systems without locks cannot tell."""
    (folder / "tracking").mkdir(exist_ok=True)
    with (folder / "tracking" / f"{tracker}.lock").open("a") as file:
        end = time.monotonic() + 2 * (LONGEST_END + AFTER_THE_TRAINING)
        while time.monotonic() < end and not stop.is_set():
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                stop.wait(0.2)
            except OSError:
                break
            else:
                break
        yield


def main(words: list[str]) -> None:
    tracker, folder, attempt, settings = words
    os.nice(10)  # the training comes first
    os.umask(os.umask(0o022) | 0o022)
    logging.disable(logging.WARNING)
    stop = threading.Event()

    def end_soon(number: int, frame: object) -> None:
        """End within a limit, whatever a tracker waits for."""
        if not stop.is_set():
            stop.set()
            seconds = LONGEST_END if Path(f"{attempt}.exit").exists() else LONGEST_CANCELLED_END
            timer = threading.Timer(seconds, _give_up, [tracker, seconds])
            timer.daemon = True
            timer.start()

    signal.signal(signal.SIGTERM, end_soon)
    try:
        with only_one(tracker, Path(folder), stop):
            follow(tracker, Path(folder), Path(attempt), json.loads(settings), stop)
    except Exception as problem:  # whatever it is, the training goes on
        say(f"tracking: {tracker}: {type(problem).__name__}: {without_secrets(str(problem))[:200]}")


def _give_up(tracker: str, seconds: float) -> None:
    say(f"tracking: {tracker} did not answer within {seconds:.0f} s of the job's end")
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)  # a thread of a library may still wait for an answer

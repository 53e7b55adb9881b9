"""A process that imports a run's software once and forks for each rehearsal, as seen by `workers`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from fp8launch.plugins.rehearse import containment

# `python -m` would import any file in the working folder that has the name of a module, and `-P` requires Python 3.11.
# The argument is the folder that contains the package fp8launch.
_START = (
    "import sys; sys.path[:] = [sys.argv[1], *filter(None, sys.path)]; "
    "import runpy; runpy.run_module('fp8launch.plugins.rehearse.forked', run_name='__main__')"
)

# Twice the time that the process needs at most.
CLOSING_SECONDS = 20.0


class Server:
    """The process, and its reports about the requested rehearsals, by number."""

    def __init__(self, setup: Mapping[str, Any], python_path: Sequence[str], limit_gib: float) -> None:
        launchers = Path(__file__).resolve().parents[3]
        self.folder = tempfile.TemporaryDirectory(prefix="fp8launch-rehearsal-")
        self.place = Path(self.folder.name)
        self.pids: dict[int, int] = {}
        self.ended: set[int] = set()
        self.over = False
        self.stopped = ""
        self._asked = 0
        self._text = b""
        with (self.place / "messages").open("wb") as messages:
            # Start a new session, so that Ctrl-C reaches only fp8launch, which ends the workers without their
            # tracebacks.
            self.process = subprocess.Popen(
                [sys.executable, "-c", _START, str(launchers)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=messages,
                env=containment.minimal_environment(os.environ),
                cwd=self.place,  # as in a job, the working folder holds none of the user's files
                start_new_session=True,
                umask=0o022,  # nobody else may change the bytecode that Python caches
            )
        assert self.process.stdout is not None
        os.set_blocking(self.process.stdout.fileno(), False)
        folders = list(map(os.path.abspath, python_path))
        self._write({**setup, "parent": os.getpid(), "limit_gib": limit_gib, "python_path": folders})

    def submit(self, request: Mapping[str, Any]) -> int:
        """Request a rehearsal and return its number."""
        self._asked += 1
        files = {"result": str(self._result(self._asked)), "messages": str(self._said(self._asked))}
        self._write({**request, **files, "id": self._asked})
        return self._asked

    def listen(self) -> None:
        """Record which rehearsals have begun and ended. If the process is over, all have ended."""
        assert self.process.stdout is not None
        # Poll before reading: output that the process wrote before its end can still be read.
        over = self.process.poll() is not None
        with suppress(BlockingIOError):
            while chunk := os.read(self.process.stdout.fileno(), 1 << 16):
                self._text += chunk
        *lines, self._text = self._text.split(b"\n")
        for line in lines:
            said = json.loads(line)
            if "pid" in said:
                self.pids[said["id"]] = said["pid"]
            else:
                self.ended.add(said["id"])
        self.over = self.over or over

    def has_ended(self, number: int) -> bool:
        """Return whether there was nothing left to wait for when `listen` was last called."""
        return number in self.ended or self.over

    def answer(self, number: int) -> dict[str, Any] | None:
        """Return the result of a rehearsal that has ended, or None if it left none."""
        try:
            result: dict[str, Any] = json.loads(self._result(number).read_text())
        except FileNotFoundError:
            return None
        return result

    def last_words(self, number: int) -> str:
        """Return the last line that the rehearsal wrote, or the process if the rehearsal wrote none."""
        for file in (self._said(number), self.place / "messages"):
            lines = file.read_text(errors="replace").strip().splitlines() if file.exists() else []
            if lines:
                return lines[-1]
        return f"exit code {self.process.returncode}"

    def kill(self, number: int) -> None:
        """End a rehearsal. Only the process knows whether the child still has its process id, which may be reused."""
        self._write({"kill": number})

    def stop(self, why: str) -> None:
        """End the process during its imports, with all rehearsals that wait for it."""
        self.stopped, self.over = why, True
        self.process.terminate()

    def close(self) -> None:
        """End the process, which first ends everything that was started below it."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with suppress(OSError):
            self.process.stdin.close()
        self.process.terminate()
        try:
            self.process.wait(CLOSING_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
        self.folder.cleanup()

    def _write(self, line: Mapping[str, Any]) -> None:
        assert self.process.stdin is not None
        # `listen` notices that the process is over.
        with suppress(OSError):
            self.process.stdin.write(json.dumps(line).encode() + b"\n")
            self.process.stdin.flush()

    def _result(self, number: int) -> Path:
        return self.place / f"{number}.json"

    def _said(self, number: int) -> Path:
        return self.place / f"{number}.txt"

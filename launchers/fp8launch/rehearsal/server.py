"""A process that imports a run's software once and is forked for each rehearsal with it, as `workers` sees it."""

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

from fp8launch.rehearsal import containment

# `python -m` would import what somebody left in the working folder under the name of a module, and `-P` is new in
# Python 3.11. The argument is the folder of this package.
_START = (
    "import sys; sys.path[:] = [sys.argv[1], *filter(None, sys.path)]; "
    "import runpy; runpy.run_module('fp8launch.rehearsal.forked', run_name='__main__')"
)

# Twice as long as the process takes at most.
CLOSING_SECONDS = 20.0


class Server:
    """The process, and what it has said of the rehearsals that it was asked for, by number."""

    def __init__(self, setup: Mapping[str, Any], python_path: Sequence[str], limit_gib: float) -> None:
        launchers = Path(__file__).resolve().parents[2]
        self.folder = tempfile.TemporaryDirectory(prefix="fp8launch-rehearsal-")
        self.place = Path(self.folder.name)
        self.pids: dict[int, int] = {}
        self.ended: set[int] = set()
        self.over = False
        self.stopped = ""
        self._asked = 0
        self._text = b""
        with (self.place / "messages").open("wb") as messages:
            # A session of its own: Ctrl-C reaches this process, which ends its workers without their tracebacks.
            self.process = subprocess.Popen(
                [sys.executable, "-c", _START, str(launchers)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=messages,
                env=containment.minimal_environment(os.environ),
                cwd=self.place,  # as in a job, nothing of the user's is in the working folder
                start_new_session=True,
                umask=0o022,  # what Python compiles into the cache is run later
            )
        assert self.process.stdout is not None
        os.set_blocking(self.process.stdout.fileno(), False)
        folders = list(map(os.path.abspath, python_path))
        self._write({**setup, "parent": os.getpid(), "limit_gib": limit_gib, "python_path": folders})

    def submit(self, request: Mapping[str, Any]) -> int:
        """Ask for a rehearsal; its number."""
        self._asked += 1
        files = {"result": str(self._result(self._asked)), "messages": str(self._said(self._asked))}
        self._write({**request, **files, "id": self._asked})
        return self._asked

    def listen(self) -> None:
        """Note which rehearsals have begun and ended; when the process is over, all have ended."""
        assert self.process.stdout is not None
        # Looked at first: what it said before its end can be read afterwards.
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
        """Whether there is nothing to wait for, as of the last time of listening."""
        return number in self.ended or self.over

    def answer(self, number: int) -> dict[str, Any] | None:
        """The result of a rehearsal that has ended, None if it left none."""
        try:
            result: dict[str, Any] = json.loads(self._result(number).read_text())
        except FileNotFoundError:
            return None
        return result

    def last_words(self, number: int) -> str:
        """The last line that a rehearsal wrote, or the process if there is none."""
        for file in (self._said(number), self.place / "messages"):
            lines = file.read_text(errors="replace").strip().splitlines() if file.exists() else []
            if lines:
                return lines[-1]
        return f"exit code {self.process.returncode}"

    def kill(self, number: int) -> None:
        """End a rehearsal. The process knows whether its child still has this number, a process id may be reused."""
        self._write({"kill": number})

    def stop(self, why: str) -> None:
        """End the process while it imports, with all rehearsals that wait for it."""
        self.stopped, self.over = why, True
        self.process.terminate()

    def close(self) -> None:
        """End the process, which first ends all that was started below it."""
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
        # A process that is over says so to `listen`.
        with suppress(OSError):
            self.process.stdin.write(json.dumps(line).encode() + b"\n")
            self.process.stdin.flush()

    def _result(self, number: int) -> Path:
        return self.place / f"{number}.json"

    def _said(self, number: int) -> Path:
        return self.place / f"{number}.txt"

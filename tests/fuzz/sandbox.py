"""fp8launch in this very process, watched: what it writes, what it starts, and how it ends.

Every case goes through the command's own entry point. What may not happen is seen where it happens, by Python's audit
events: a file written outside of the sandbox, a program started that is not one of the few, a signal sent. A canary
file would show what those events do not.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fp8launch.cli import run

TOUCHES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.chmod", "os.link", "os.symlink", "os.truncate"}
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
STARTS = {"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.startfile", "pty.spawn"}
# Megatron's validators run in a separate Python; git says where a recipe comes from.
# Other programs are looked up on a PATH that has none.
SLURM = {"sbatch", "scancel", "scontrol", "squeue", "sacct", "sacctmgr", "sinfo", "srun"}
PROGRAMS = {Path(sys.executable).name, "git", "nvidia-smi", *SLURM}


@dataclass
class Sandbox:
    """Home, run root and working folder of every case; `cases` and `seconds` count what was run."""

    root: Path
    watching: bool = False
    violations: list[str] = field(default_factory=list)
    cases: int = 0
    seconds: float = 0.0

    @property
    def canary(self) -> Path:
        return self.root / "canary"

    @property
    def runs(self) -> Path:
        return self.root / "runs"

    @property
    def work(self) -> Path:
        return self.root / "work"

    def see(self, event: str, arguments: tuple[Any, ...]) -> None:
        """An audit event."""
        if event in STARTS:
            program = Path(os.fsdecode(arguments[0])).name if arguments and arguments[0] else event
            if event != "subprocess.Popen" or program not in PROGRAMS:
                self.violations.append(f"started {program}: {str(arguments[1:2])[:200]}")
        elif event == "os.kill":
            self.violations.append(f"sent signal {arguments}")
        elif event == "open":
            path, mode, flags = arguments
            writes = flags & WRITES if isinstance(flags, int) else "r" not in str(mode)
            if writes and not isinstance(path, int):
                self.check_place(event, path)
        elif event in TOUCHES:
            for path in arguments[: 2 if event in ("os.rename", "os.link", "os.symlink") else 1]:
                # What is removed with a folder comes as a name in that folder, which is open.
                if not (event in ("os.remove", "os.rmdir") and arguments[1] not in (-1, None)):
                    self.check_place(event, path)

    def check_place(self, event: str, path: object) -> None:
        if isinstance(path, int) or os.fsdecode(path) == os.devnull:  # type: ignore[arg-type]
            return
        real = os.path.realpath(os.fsdecode(path))  # type: ignore[arg-type]
        if not real.startswith(f"{self.root}/"):
            self.violations.append(f"{event} {real}")

    def __call__(self, *arguments: str) -> tuple[int, str, str]:
        """Run a command; its exit code, stdout and stderr. Asserts what holds for every command and every input."""
        began = time.perf_counter()
        self.violations.clear()
        with captured() as (out, err):
            self.watching = True
            try:
                code = run(list(arguments))
            finally:
                self.watching = False
        self.cases += 1
        self.seconds += time.perf_counter() - began
        told = err.getvalue().decode()
        assert code in (0, 1, 2, 3), (arguments, code)
        assert "Traceback (most recent" not in told, told
        assert not self.violations, (arguments, [*self.violations])
        assert not self.canary.exists(), arguments
        assert code == 0 or told or out.getvalue(), (arguments, code, "ended without a word")
        for text in (told, out.getvalue().decode()):
            assert arguments[:1] in (("render",), ("import",), ("recipes",)) or "\x1b]" not in text, (arguments, text)
        return code, out.getvalue().decode(), told


@contextlib.contextmanager
def captured() -> Iterator[tuple[io.BytesIO, io.BytesIO]]:
    """stdout and stderr as pipes are: text over bytes, without a terminal."""
    before = sys.stdout, sys.stderr
    raw = io.BytesIO(), io.BytesIO()
    wrapped = [io.TextIOWrapper(one, encoding="utf-8", write_through=True) for one in raw]
    sys.stdout, sys.stderr = wrapped
    try:
        yield raw
    finally:
        sys.stdout, sys.stderr = before
        for one in wrapped:
            one.flush()
            one.detach()

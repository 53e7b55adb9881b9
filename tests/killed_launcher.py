"""Runs fp8launch, and kills it (SIGKILL) right before a side effect that it is about to have.

`KILL_LOG=FILE` writes down every side effect as a line: making, renaming, opening for writing and removing files below
`KILL_BELOW`, every command of Slurm that changes something, and every write to stdout and stderr. `KILL_AT=N` strikes
before the Nth of them, and `KILL_AFTER=SECONDS` that much later, for what happens while sbatch runs. Python's audit
events come before the deed.
"""

from __future__ import annotations

import io
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

BELOW = os.environ["KILL_BELOW"]
LOG = os.environ.get("KILL_LOG")
AT = int(os.environ.get("KILL_AT", "0"))
AFTER = float(os.environ.get("KILL_AFTER", "0"))
TOUCHES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.chmod", "os.link", "os.symlink", "os.truncate"}
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
seen = 0
lines: list[str] = []


def kind(event: str, arguments: tuple[Any, ...]) -> str | None:
    """Describe a side effect identically for every run of a study; None if the call has none."""
    if event == "subprocess.Popen":
        program = Path(str(arguments[0])).name
        return f"command {program}" if program in ("sbatch", "scancel", "bash") else None
    if event == "open":
        path, mode, flags = arguments
        if isinstance(path, int) or not (flags & WRITES if isinstance(flags, int) else "r" not in str(mode)):
            return None
    elif event not in TOUCHES:
        return None
    # A path in a folder that is open may come as its last part alone, as shutil.rmtree has it.
    path = os.path.abspath(os.fsdecode(arguments[1] if event == "os.rename" else arguments[0]))  # noqa: PTH100 (resolves nothing)
    if not path.startswith(BELOW):
        return None
    short = re.sub(r"(\.making-)?tiny_cpu[\w.-]*(?=/|$)", "RUN", path[len(BELOW) :])
    short = re.sub(r"/code/.+", "/code/FILE", short)
    short = re.sub(r"arrays/\.?[\w.-]+\.(sbatch|txt)", r"arrays/KEY.\1", short)
    return f"{event} {re.sub(r'[.][a-z0-9_]{8}$', '.NEW', short)}"


def strike() -> None:
    time.sleep(AFTER)
    os.kill(os.getpid(), signal.SIGKILL)


def hook(event: str, arguments: tuple[Any, ...]) -> None:
    if event not in TOUCHES and event not in ("open", "subprocess.Popen"):
        return
    effect = kind(event, arguments)
    if effect is not None:
        count(effect)


def count(what: str) -> None:
    """Write down a side effect that is about to happen, or strike."""
    global seen
    seen += 1
    lines.append(what)
    if seen == AT:
        if AFTER:
            threading.Thread(target=strike, daemon=True).start()
        else:
            os.kill(os.getpid(), signal.SIGKILL)


class Output(io.FileIO):
    """Counts what reaches the user."""

    def write(self, data: Any) -> int:
        count(f"print {self.fileno()}")
        return super().write(data)


sys.addaudithook(hook)
sys.stdout, sys.stderr = (
    io.TextIOWrapper(io.BufferedWriter(Output(number, "wb", closefd=False)), "utf-8", line_buffering=True)  # type: ignore[type-var]
    for number in (1, 2)
)

from fp8launch.cli import run  # noqa: E402 (what it imports may count too)

status = run(sys.argv[1:])
if LOG:
    Path(LOG).write_text("\n".join(lines) + "\n")
sys.exit(status)

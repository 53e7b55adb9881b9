"""Records that both jobs and the launcher write: manifests, and the user's list of run roots for `fp8launch runs`."""

from __future__ import annotations

import json
import os
from datetime import datetime
from pathlib import Path
from typing import Any

from fp8launch.injob.regular_files import read_regular, write_whole
from fp8launch.injob.supervisor.log_lines import bounded_int

MANIFEST = "manifest.json"
_LARGEST_JSON = 64 << 20


def roots_file() -> Path:
    base = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(base).expanduser() / "fp8launch" / "run_roots"


def recorded_roots() -> list[str]:
    """Read the recorded run roots, oldest first. Raises OSError if there is no list."""
    lines = roots_file().read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    return [line for line in lines if line]


def record_root(root: Path) -> None:
    """Append a run root to the list. Raises OSError."""
    # One write appends the whole line, so that two launchers at the same time lose neither root.
    with roots_file().open("a", encoding="utf-8", errors="surrogateescape") as lines:
        lines.write(f"{root}\n")


def now() -> str:
    """Return the current time in the format of manifests."""
    return datetime.now().astimezone().isoformat(timespec="milliseconds")


def new_submission(key: str, index: int | None = None) -> dict[str, Any]:
    """Return the manifest entry for a submission that this process has started."""
    return {"key": key, "index": index, "answered": False, "reported": False, "begun": now(), **this_launcher()}


def this_launcher() -> dict[str, Any]:
    """Return what identifies this process, for those who want to know whether it is still alive."""
    pid = os.getpid()
    return {"host": os.uname().nodename, "pid": pid, "started": start_of(pid)}


def start_of(pid: int) -> str:
    """Return when a process started, in clock ticks since boot; empty if it does not exist or is a zombie."""
    fields = process_stat(pid)
    return fields[19] if fields and fields[0] != "Z" else ""


def parent_of(pid: int) -> int:
    """Return the parent of a process; 0 if the process does not exist."""
    fields = process_stat(pid)
    return int(fields[1]) if fields else 0


def process_stat(pid: int) -> list[str]:
    """Return the kernel's fields about a process, from its state on; none if it does not exist."""
    try:
        # The command name, in parentheses, may contain anything, so only the fields after it are split.
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def read_json(file: Path) -> Any:
    """Read a JSON file. Raises OSError, or ValueError for content that fp8launch never writes."""
    raw = read_regular(file, _LARGEST_JSON)
    try:
        return json.loads(raw.decode("utf-8"), parse_int=bounded_int)
    except RecursionError:
        raise ValueError("its contents are nested too deeply") from None


def json_mapping(file: Path) -> dict[str, Any]:
    """Read a mapping from a JSON file. It is empty if the file does not exist or contains anything else."""
    try:
        found = read_json(file)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def write_json(file: Path, content: Any) -> None:
    """Write a JSON file, whole or not at all."""
    write_whole(file, json.dumps(content, indent=2))

"""Records that both jobs and the launcher write: manifests, and the user's list of run roots for `fp8launch runs`."""

from __future__ import annotations

import os
from pathlib import Path

MANIFEST = "manifest.json"


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

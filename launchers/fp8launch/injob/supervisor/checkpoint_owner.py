"""The owner of a checkpoint folder: the run that writes into it, recorded next to the checkpoints.

Only the owner knows that its checkpoints are its own work. Transformer Engine pickles the state of delayed scaling, and
since 2.16.1, 2.17.1 and 2.18.0 it refuses to load that state unless NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE=1, because
unpickling runs whatever code the file holds (transformer_engine/pytorch/_extra_state.py). A run that resumes from its
own checkpoint, which nobody else could have changed, may set it.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fp8launch.injob.ownership import why_others_may_change
from fp8launch.injob.regular_files import read_regular
from fp8launch.injob.supervisor import checkpoints

RECORD = "fp8launch_owner.json"
UNPICKLE = "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE"
_LONGEST_RECORD = 1 << 16
# What identifies a run: names of runs repeat in other run roots.
_IDENTITY = ("run", "recipe", "created")


def read_owner(folder: Path) -> dict[str, Any] | None:
    """Return the record of a checkpoint folder; None if there is none. Raises OSError, ValueError for a damaged one."""
    try:
        raw = checkpoints.again(lambda: read_regular(folder / RECORD, _LONGEST_RECORD, follow=False))
        record = json.loads(raw.decode())
    except FileNotFoundError:
        return None
    if not isinstance(record, dict):
        raise ValueError(f"{folder / RECORD} is not a mapping")
    return record


def claim(folder: Path, identity: Mapping[str, Any], inherited: int) -> dict[str, Any]:
    """Make a run the owner of a checkpoint folder that has none, and return the owner's record.

    `identity` has the run's id, the digest of its recipe and the time of its creation. `inherited` is the iteration of
    the newest checkpoint that precedes the run, 0 for none. Raises OSError, and ValueError for a damaged record.
    """
    folder.mkdir(parents=True, exist_ok=True)
    record = {"format": 1, **{name: identity[name] for name in _IDENTITY}, "inherited": inherited}
    new = folder / f".{RECORD}.{os.getpid()}.new"
    try:
        with os.fdopen(os.open(str(new), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644), "w") as file:
            json.dump(record, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        try:
            # Unlike a rename, a link never replaces the record of a run that was faster.
            os.link(str(new), str(folder / RECORD))
        except FileExistsError:
            pass
        except OSError:  # a file system without hard links
            if not (folder / RECORD).exists():
                new.rename(folder / RECORD)
    finally:
        with contextlib.suppress(FileNotFoundError):
            new.unlink()
    return read_owner(folder) or record


def is_owner(record: Mapping[str, Any], identity: Mapping[str, Any]) -> bool:
    """Return whether the record names this run."""
    return bool(identity) and all(record.get(name) == identity.get(name) for name in _IDENTITY)


def why_not_trusted(
    folder: Path, identity: Mapping[str, Any], iteration: int, group_is_trusted: bool = False
) -> str | None:
    """Say why the checkpoint of an iteration may not be the run's own, unchanged work; None if it is.

    `group_is_trusted` says that the user lets others write to the run root, and so lets them run code already.
    """
    try:
        record = read_owner(folder)
    except (OSError, ValueError):
        return f"{folder / RECORD} cannot be read"
    if record is None:
        return f"{folder} has no {RECORD}"
    if not is_owner(record, identity):
        return f"{folder} belongs to the run {record.get('run')}"
    inherited = record.get("inherited")
    if not isinstance(inherited, int) or iteration <= inherited:
        return f"checkpoint {iteration} was there before this run"
    if group_is_trusted:
        return None
    for path in (folder / RECORD, checkpoints.place(folder, iteration)):
        reason = why_others_may_change(path)
        if reason is not None:
            return reason
    return None

"""A run in Weights & Biases. Only its own library reads the key of the account (WANDB_API_KEY, or `wandb login`)."""
# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import importlib
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fp8launch.injob.regular_files import read_regular
from fp8launch.plugins.tracking.injob.log_rows import Row
from fp8launch.plugins.tracking.injob.tracked_run import TrackedRun

_QUIET = {"silent": True, "console": "off", "disable_git": True, "save_code": False, "init_timeout": 60}
# Measurements of this process would only disturb the training. The name of the setting depends on the version.
_NO_STATISTICS = {"WANDB_X_DISABLE_STATS": "true", "WANDB__DISABLE_STATS": "true"}
_LARGEST_FILE = 4 << 30
_BLOCK, _HEADER = 32768, 7


class WandbRun:
    """The run with our id. Another attempt, or `export`, continues it. `last` is the newest iteration that it has."""

    def __init__(self, run: TrackedRun, settings: Mapping[str, Any], folder: Path, tags: Sequence[str] = ()) -> None:
        """`folder` takes the files of the library."""
        folder.mkdir(parents=True, exist_ok=True)
        os.environ.update(_NO_STATISTICS)
        offline = settings.get("mode") == "offline"
        # Before this attempt adds its own file.
        self.last = newest_step(folder, run.id)
        wandb: Any = importlib.import_module("wandb")
        self.run = wandb.init(
            project=settings.get("project") or run.project,
            entity=settings.get("entity"),
            group=settings.get("group") or run.group,
            id=run.id,
            name=run.name,
            tags=["fp8launch", *tags],
            config=dict(run.config),
            dir=str(folder),
            settings=wandb.Settings(**_QUIET),
            **({"mode": "offline"} if offline else {"resume": "allow"}),
        )
        if not self.run.offline:
            # The server has the last word: files of a killed attempt may not have arrived.
            self.last = self.run.starting_step - 1
        self.upload = ""
        if self.run.offline:
            self.place = str(Path(self.run.dir).parent)
            # One file for each attempt. With --id, they are uploaded in order, as one run.
            self.upload = f"wandb sync --id {run.id} {folder}/wandb/offline-run-*-{run.id}"
        else:
            self.place = self.run.url

    def log(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self.run.log(dict(row.values), step=row.step)
            self.last = row.step

    def close(self, state: str, failed: bool) -> None:
        self.run.summary.update({"status": state})
        self.run.finish(exit_code=int(failed))


def newest_step(folder: Path, run_id: str) -> int:
    """Return the newest iteration in the offline files of a run, 0 if there is none."""
    newest = 0
    for file in sorted(folder.glob(f"wandb/offline-run-*-{run_id}/run-{run_id}.wandb")):
        for record in records_in(file):
            if record.HasField("history"):
                newest = max(newest, record.history.step.num)
    return newest


def records_in(file: Path) -> Iterator[Any]:
    """Yield the records of a W&B file. The end of a file that a killed process wrote may be missing.

    It is a LevelDB log after seven bytes: blocks of 32 KiB, with pieces of checksum, length and kind.
    """
    record: Any = importlib.import_module("wandb.proto.wandb_internal_pb2").Record
    data, at, message = read_regular(file, _LARGEST_FILE), _HEADER, b""
    while at + _HEADER <= len(data):
        if _BLOCK - at % _BLOCK < _HEADER:
            at += _BLOCK - at % _BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + _HEADER])
        piece = data[at + _HEADER : at + _HEADER + length]
        at += _HEADER + length
        if not kind or len(piece) < length:
            return
        message += piece
        # Whole, or the last piece.
        if kind in (1, 4):
            yield record.FromString(message)
            message = b""

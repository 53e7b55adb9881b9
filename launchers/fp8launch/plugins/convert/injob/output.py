"""The output of a conversion, which all ranks write atomically."""
# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fp8launch.injob.rank import worker
from fp8launch.injob.supervisor import checkpoints


def unfinished(out: Path) -> Path:
    """Return the folder in which this job writes until the output is complete. Other jobs use other folders."""
    job = os.environ.get("SLURM_JOB_ID") or f"{os.uname().nodename}-{os.environ['MASTER_PORT']}"
    return out.with_name(f".{out.name}.{job}.unfinished")


def begin_output(out: Path) -> Path:
    """Create the folder to write to. Exits if the output exists."""
    folder = unfinished(out)
    if rank() == 0:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            worker.stop(worker.WRONG_REQUEST, f"{out} exists and is not empty")
        shutil.rmtree(str(folder), ignore_errors=True)  # of an earlier start of the same job
        folder.mkdir(parents=True)
    wait_for_all()
    return folder


def finish_output(folder: Path, out: Path, record: Mapping[str, Any]) -> None:
    """Write the record, then rename the output."""
    wait_for_all()
    if rank() == 0:
        with (folder / checkpoints.CONVERSION_RECORD).open("w") as file:
            json.dump(dict(record), file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        try:
            folder.rename(out)  # fails on a folder that is not empty
        except OSError as failure:
            worker.stop(1, f"{out} cannot be given to the result, which stays in {folder}: {failure.strerror}")
        print(f"fp8launch: wrote {out}", flush=True)
    wait_for_all()


def rank() -> int:
    return int(os.environ["RANK"])


def wait_for_all() -> None:
    """Wait for all ranks."""
    import torch

    torch.distributed.barrier()


def of_all_ranks(value: Any) -> list[Any]:
    """Return the value of each rank."""
    import torch

    found: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, value)
    return found

"""Train with several ranks, each a child of this process, and collect what they record."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from fp8launch.plugins.prove.settings import CUDA
from fp8launch.plugins.rehearse.containment import end_with_parent
from fp8launch.plugins.rehearse.failure import described

# After the first failure the other ranks wait for a peer that is gone. Their own failures say nothing.
_GRACE_SECONDS = 0.5
_HOST = "127.0.0.1"
_PORT_BYTES = 2
# Runs a rank in a new process. The arguments are the folders to import from, the task as JSON, and the rank's record.
_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from fp8launch.plugins.prove import world; "
    "sys.exit(world.train_on_gpu(json.loads(sys.argv[2]), sys.argv[3]))"
)


def train(task: dict[str, Any]) -> dict[str, Any]:
    """Train in `folder` with `world` ranks and Megatron's arguments `argv`. Return what every rank recorded, by rank.

    `record` configures `recording.install`. If ranks fail, the first failure is reported.
    """
    folder = Path(task["folder"])
    folder.mkdir(parents=True)
    reading, writing = os.pipe()
    ranks = {_fork(task, folder, rank, reading): rank for rank in range(task["world"])}
    # The kernel chooses the port and this process keeps it, so no other training can have the same one. The store has
    # threads, which a fork would not copy, so the ranks are forked first and wait for the port.
    store = TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
    os.write(writing, store.port.to_bytes(_PORT_BYTES, "big") * task["world"])
    failed = None
    while ranks:
        pid, status = os.waitpid(-1, 0)
        if pid not in ranks:
            continue
        rank = ranks.pop(pid)
        if status and failed is None:
            failed = rank
            time.sleep(_GRACE_SECONDS)
            for other in ranks:
                with suppress(ProcessLookupError):
                    os.kill(other, signal.SIGKILL)
    if failed is not None:
        return _failure(folder, failed)
    return {"ok": True, "ranks": [json.loads(_record(folder, rank).read_text()) for rank in range(task["world"])]}


def _failure(folder: Path, rank: int) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        found: dict[str, Any] = json.loads(_record(folder, rank).read_text())
        if not found["ok"]:
            return found
    lines = (folder / f"{rank}.log").read_text(errors="replace").strip().splitlines() or ["no output"]
    return {"ok": False, "exception": "", "message": f"rank {rank} ended: {lines[-1]}", "at": "", "settings": []}


def _record(folder: Path, rank: int) -> Path:
    return folder / f"{rank}.json"


def _fork(task: dict[str, Any], folder: Path, rank: int, ports: int) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        end_with_parent(parent)
        log = os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        world = str(task["world"])
        # As with torchrun, the ranks use the store of the process that started them.
        os.environ.update(
            RANK=str(rank), WORLD_SIZE=world, LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=world, MASTER_ADDR=_HOST,
            MASTER_PORT=str(int.from_bytes(os.read(ports, _PORT_BYTES), "big")), TORCHELASTIC_USE_AGENT_STORE="True",
        )  # fmt: skip
        if "--use-megatron-fsdp" in task["argv"]:
            # Megatron refuses 1, which other layouts need.
            os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"
        if task["device"] == CUDA:
            os.environ["NCCL_HOSTID"] = f"rank{rank}"
            if task["repeatable"]:
                os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"
            arguments = (json.dumps(sys.path), json.dumps(task), str(_record(folder, rank)))
            os.execv(sys.executable, [sys.executable, "-c", _START, *arguments])
        found = _train_rank(task)
        _record(folder, rank).write_text(json.dumps(found))
        status = 0 if found["ok"] else 1
    finally:
        os._exit(status)


def train_on_gpu(task: dict[str, Any], record: str) -> int:
    """Train as the rank that the environment describes, and write what it records. Return the exit status.

    The ranks share the GPUs of this machine.
    """
    try:
        import torch

        os.environ["LOCAL_RANK"] = str(int(os.environ["RANK"]) % torch.cuda.device_count())
        from fp8launch.injob.rank import worker
        from fp8launch.injob.rank.compat import cache_folders

        cache_folders.give_triton_a_cache()
        worker.prepare(CUDA)
        found = _train_rank(task)
    except BaseException as failure:
        found = described(failure)
    Path(record).write_text(json.dumps(found))
    return 0 if found["ok"] else 1


def _train_rank(task: dict[str, Any]) -> dict[str, Any]:
    from fp8launch.injob.rank import pretrain
    from fp8launch.injob.rank.compat import python311
    from fp8launch.plugins.prove import recording

    record = recording.install(task["record"], task["device"])
    sys.argv = ["pretrain.py", *task["argv"], *python311.defaults(task["argv"])]
    try:
        pretrain.main(time.time())
    except SystemExit as stop:
        if stop.code not in (None, 0):
            return {"ok": False, "exception": "SystemExit", "message": str(stop.code), "at": "", "settings": []}
    except BaseException as failure:
        return described(failure)
    return {"ok": True, **record}

"""The process of a proof: it is forked for each training or comparison, on a CPU after it has imported Megatron once.

It runs inside the containment of rehearsals (`fp8launch.plugins.rehearse.forked`). In the `task` of a request, `do` is
"train" (see `world.train`), "compare" (see `tensors.compare`) or "settings" (see `recording.settings_read`), which gets
the names of classes in `kinds`.
"""

from __future__ import annotations

import argparse
import importlib
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from fp8launch.plugins.prove.settings import CUDA
from fp8launch.plugins.rehearse.failure import described

# Collectives stay on this machine, also where its name has no address.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
# Compiling Megatron's fused functions would take longer than the trainings.
_ON_GPU = {
    "TORCHDYNAMO_DISABLE": "1",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    # The trainings load only what other trainings of the proof have saved.
    "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE": "1",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    # NCCL refuses two ranks on one GPU of a host. `world` makes each rank a host, reached through the loopback.
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
}

# Modules that Megatron imports during a training.
_IMPORTED_LATE = (
    "megatron.core.tokenizers.text",
    "megatron.core.models.mimo",
    "megatron.core.dist_checkpointing.gpt_checkpoint_interop",
    "multiprocessing.managers",
    "torch.utils.serialization",
)


def prepared(setup: dict[str, Any]) -> dict[str, Any] | None:
    """Prepare torch and Megatron for the device. Return None, or a description of the failure."""
    os.environ.update({**_ENVIRONMENT, "FP8LAUNCH_DEVICE": setup["device"]})
    # What torch and Megatron keep in temporary files is removed with the folder that this process works in.
    os.environ["TMPDIR"] = str(Path.cwd())
    if setup["device"] == CUDA:
        # CUDA does not survive a fork, so each rank is a new process, which prepares itself.
        os.environ.update(_ON_GPU)
        return None
    try:
        from fp8launch.injob.rank.compat import python311

        python311.install()
        from fp8launch.injob.rank.compat import checkpointing, cpu, datasets_helper
        from fp8launch.plugins.prove import repairs

        repairs.average_over_gloo()
        cpu.install()
        datasets_helper.install()
        checkpointing.report_saves_in_bytes()
    except BaseException as failure:
        return described(failure)
    return None


def import_megatron(setup: dict[str, Any]) -> None:
    """Import everything that the processes need that are forked from this one."""
    importlib.import_module("fp8launch.plugins.prove.tensors")
    if setup["device"] == CUDA:
        return
    for module in ("injob.rank.pretrain", "injob.rank.gpt_model", "plugins.prove.recording", "plugins.prove.world"):
        importlib.import_module(f"fp8launch.{module}")
    for module in _IMPORTED_LATE:
        # Not every release has all of them.
        with suppress(ImportError):
            importlib.import_module(module)
    _share_parser()


def _share_parser() -> None:
    """Build Megatron's parser once. Every rank would build it three times, which takes a fifth of a short training."""
    arguments: Any = importlib.import_module("megatron.training.arguments")
    pretrain: Any = importlib.import_module("fp8launch.injob.rank.pretrain")
    pretrain.leave_out_help_texts()
    parser: argparse.ArgumentParser = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))

    def shared(unused: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser.set_defaults(inprocess_active_world_size=int(os.environ["WORLD_SIZE"]))
        return parser

    arguments.add_megatron_arguments = shared


def result_of(request: dict[str, Any]) -> dict[str, Any]:
    """Carry out the task of a request in this process, which was forked for it."""
    task = request["task"]
    try:
        if task["do"] == "train":
            from fp8launch.plugins.prove import world

            return world.train(task)
        if task["do"] == "settings":
            from fp8launch.plugins.prove import recording

            return {"ok": True, "settings": {kind: recording.settings_read(kind) for kind in task["kinds"]}}
        from fp8launch.plugins.prove import tensors

        return {"ok": True, **tensors.compare(task)}
    except BaseException as failure:
        return described(failure)

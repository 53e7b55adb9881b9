"""Run one rehearsal in this process, which was forked for it.

The request is a JSON object: `argv` (Megatron's arguments, already shrunk), `script` (None for fp8launch's own entry),
`translated` (the run uses Megatron-Core without Megatron-LM), `program` (None, or the input of `bridge.train`, which
with `scale` replaces the arguments), `rank`, `world`, `local_world`, `env`, `capability`, `memory_gib`, `cuda` (its
version), and `te_site` (a folder with Transformer Engine's Python code). The result is `{"ok": true, "seconds": 4.2}`.
If `ok` is false, it has the `exception`, its `message`, the place `at` which it was raised, the `settings` that the
code there reads, and the `traceback`. `unknown` is true if a stand-in was missing, which says nothing about the recipe.
"""
# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import importlib
import os
import resource
import runpy
import sys
import time
from pathlib import Path
from typing import Any

from fp8launch.plugins.rehearse.failure import described

ATTENTION = "fp8launch.plugins.rehearse.compiled_te.attention"
BRIDGE = "fp8launch.plugins.rehearse.bridge"


def prepared(request: dict[str, Any]) -> dict[str, Any] | None:
    """Prepare the software. Return None, or a description of the failure."""
    try:
        prepare_software(request)
    except BaseException as failure:
        return {**described(failure), "seconds": 0.0}
    return None


def result_of(request: dict[str, Any]) -> dict[str, Any]:
    """Run the rehearsal in this process, which has already prepared the software."""
    began = time.monotonic()
    result: dict[str, Any] = {"ok": True}
    sizes: dict[str, tuple[int, int]] = {}
    try:
        join_world(request)
        if request.get("saves"):
            resuming = importlib.import_module("fp8launch.plugins.rehearse.resuming")
            te = Path(request["te_site"]).name if request.get("te_site") else ""
            resuming.install(te, Path(request["result"]).parent)
        freed = importlib.import_module("fp8launch.plugins.rehearse.freed_memory")
        with freed.guarded("--fine-grained-activation-offloading" in request["argv"]):
            train(request, sizes)
    except SystemExit as stop:
        if stop.code not in (None, 0):
            result = {"ok": False, "exception": "SystemExit", "message": str(stop.code), "at": "", "traceback": ""}
    except BaseException as failure:
        result = described(failure)
        if "attention backend" in result["message"] and request.get("te_site"):
            attention = importlib.import_module(ATTENTION)
            result["reasons"] = attention.REASONS
            if attention.left_to_newer_flash_attention(request["capability"], Path(request["te_site"]).name):
                result["unknown"] = True
                result["message"] = "rehearsals have FlashAttention 2, which does not support this; a newer one may"
    result["sizes"] = sizes
    result["not_rehearsed"] = sorted(sys.modules["fp8launch.plugins.rehearse.packages"].USED.values())
    usage = resource.getrusage(resource.RUSAGE_SELF)
    result["processor_seconds"] = round(usage.ru_utime + usage.ru_stime, 2)
    result["memory_mib"] = usage.ru_maxrss >> 10
    result["seconds"] = round(time.monotonic() - began, 2)
    return result


def prepare_software(request: dict[str, Any]) -> None:
    """Install the stand-ins that are the same for all ranks, before Megatron is imported."""
    os.environ.update(request["env"])
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="1",
        TORCHDYNAMO_DISABLE="1",
        FP8LAUNCH_DEVICE="cuda",
        OMP_NUM_THREADS="1",
    )
    from fp8launch.injob.rank.compat import python311, triton_stub

    python311.install()
    triton_stub.install(("megatron.", "transformer_engine."), launches_do_nothing=True)
    import torch

    from fp8launch.injob.rank.compat import apex_wgrad, cpu, datasets_helper
    from fp8launch.plugins.rehearse import compiled_te, device, packages, replaced

    torch.set_num_threads(1)
    cpu.install_device()
    device.install(tuple(request["capability"]), request["memory_gib"], request["cuda"])
    packages.install()
    if request.get("te_site"):
        compiled_te.install(Path(request["te_site"]), request["cuda"])
    apex_wgrad.install()  # before Megatron looks for it
    cpu.install_megatron()
    replaced.install()
    datasets_helper.install()


def import_megatron(request: dict[str, Any]) -> None:
    """Import Megatron once for all processes that are forked from this one."""
    if request.get("program"):
        importlib.import_module(BRIDGE).prepare(request["program"]["words"])
    elif not request.get("script"):
        importlib.import_module("fp8launch.injob.rank.pretrain")
        importlib.import_module("fp8launch.injob.rank.gpt_model")
    replaced = sys.modules["fp8launch.plugins.rehearse.replaced"]
    replaced.every_rank_trains()
    if request.get("translated"):
        replaced.predicts_by_the_last_layer()
    if request.get("te_site"):
        importlib.import_module(ATTENTION).keep_reasons()


def join_world(request: dict[str, Any]) -> None:
    """Become one rank of the run's world."""
    rank, world, local = request["rank"], request["world"], request["local_world"]
    os.environ.update(request["env"])
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank % local), LOCAL_WORLD_SIZE=str(local))
    importlib.import_module("fp8launch.plugins.rehearse.device").set_count(local)
    importlib.import_module("fp8launch.plugins.rehearse.mirror_group").install(rank, world)


def train(request: dict[str, Any], sizes: dict[str, tuple[int, int]]) -> None:
    """Run two steps of the job's entry, script or program. A program adds its shrunk sizes to `sizes`."""
    if request.get("program"):
        importlib.import_module(BRIDGE).train(request, sizes)
        return
    from fp8launch.injob.rank.compat import python311

    if request.get("script"):
        sys.argv = [request["script"], *request["argv"], *python311.defaults(request["argv"])]
        runpy.run_path(request["script"], run_name="__main__")
        return
    sys.argv = ["pretrain.py", *request["argv"], *python311.defaults(request["argv"])]
    importlib.import_module("fp8launch.injob.rank.pretrain").main(time.time())

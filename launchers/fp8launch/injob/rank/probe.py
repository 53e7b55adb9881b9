"""After the first iteration: which modules ran under FP8, with which recipe, which did not and why, and which weights
are FP8 tensors. One rank of each tensor and pipeline parallel position prints it, `fp8launch-probe: {json}`.

Transformer Engine stores what a module's last forward pass did on the module: `fp8`, `fp8_meta["recipe"]` and the
quantizers (for its fused operations `_fp8_metas` and `_quantizers`, which are None without FP8). Nothing is hooked or
computed: the attributes are read once, in milliseconds. Other versions may use other names, so the line contains the
raw values as well as the conclusions.

FP8LAUNCH_PROBE=0 turns the probe off. It never ends a run: problems are reported as a line of the log.
"""
# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from fp8launch.injob.rank import training_loop
from fp8launch.injob.rank.module_facts import chunks_of, plain, probe
from fp8launch.injob.rank.training_loop import attempt, say

PROBE = "fp8launch-probe: "
VERSION = 1
_WHAT = "the FP8 probe"

_ASKED = (
    "fp8", "fp8_recipe", "fp8_param_gather", "fp8_quantizer_factory", "fp4", "fp4_recipe", "fp4_param_gather",
    "fp4_quantizer_factory", "first_last_layers_bf16", "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16",
    "num_layers", "transformer_impl", "fp8_output_proj", "use_transformer_engine_op_fuser", "te_precision_config_file",
)  # fmt: skip


def install(loop: str = training_loop.MEGATRON, asked: Callable[[], Any] | None = None) -> None:
    """Probe the model after the first step of a loop. Never raises.

    `asked` returns an object with the requested settings as attributes, by Megatron's names; by default Megatron's
    arguments.
    """
    if os.environ.get("FP8LAUNCH_PROBE", "1") != "0":
        attempt(_WHAT, lambda: training_loop.observe(_Probe(asked or _megatron_arguments), loop))


def _megatron_arguments() -> Any:
    return importlib.import_module("megatron.training").get_args()


class _Probe(training_loop.Observer):
    def __init__(self, asked: Callable[[], Any]) -> None:
        self._asked = asked

    def after_step(self, model: Any, iteration: int | None) -> bool:
        attempt(_WHAT, lambda: _probe_and_say(model, iteration, self._asked))
        return False


def _probe_and_say(model: Any, iteration: int | None, arguments: Callable[[], Any]) -> None:
    began = time.perf_counter()
    position = position_of_rank()
    if position is None:
        return
    args = arguments()
    asked = {name: plain(getattr(args, name)) for name in _ASKED if hasattr(args, name)}
    found = probe(chunks_of(model), asked)
    now = round(time.time(), 3)
    record = {"v": VERSION, **position, "iteration": iteration, "time": now, "asked": asked, "software": _software()}
    say(PROBE, {**record, "ms": round((time.perf_counter() - began) * 1e3, 2), **found})


def position_of_rank() -> dict[str, Any] | None:
    """Return this rank's position in the model-parallel grid; None for all but the first data-parallel rank there."""
    rank = int(os.environ.get("RANK", "0"))
    try:
        state = importlib.import_module("megatron.core.parallel_state")
        if state.get_data_parallel_rank(with_context_parallel=True) != 0:
            return None
        tp, pp = state.get_tensor_model_parallel_rank(), state.get_pipeline_model_parallel_rank()
        return {"rank": rank, "tp": tp, "pp": pp}
    except Exception:  # process groups of another kind: rank 0 reports for all
        if rank != 0:
            return None
        return {"rank": rank, "tp": None, "pp": None}


def _software() -> dict[str, Any]:
    torch: Any = sys.modules.get("torch")
    engine = sys.modules.get("transformer_engine")
    versions = {
        "torch": getattr(torch, "__version__", None),
        "transformer_engine": getattr(engine, "__version__", None),
    }
    try:
        gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
        return {**versions, "gpu": gpu.name, "gpu_id": plain(getattr(gpu, "uuid", None))}
    except Exception:
        return versions

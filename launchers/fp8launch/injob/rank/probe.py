"""After the first iteration: which modules ran under FP8, with which recipe, which did not and why, and which weights
are FP8 tensors. One line of the log says it, `fp8launch-probe: {json}`, from one rank of each tensor and pipeline
parallel place.

Transformer Engine keeps what a module's last forward did on the module: `fp8`, `fp8_meta["recipe"]` and the
quantizers (its fused operations: `_fp8_metas` and `_quantizers`, which are None without FP8). Nothing is hooked or
computed; reading them takes milliseconds once, then Megatron's own `train_step` is put back. Other versions may name
things differently, so the raw values stand in the line beside what is made of them.

FP8LAUNCH_PROBE=0 turns it off; FP8LAUNCH_PROFILE_ITERATION=N adds a kernel profile of iteration N (`profile_once`).
Nothing here may end a run: whatever goes wrong is one line of the log.
"""
# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from fp8launch.injob.rank.module_facts import chunks_of, plain, probe

PROBE = "fp8launch-probe: "
KERNELS = "fp8launch-kernels: "
VERSION = 1

_ASKED = (
    "fp8", "fp8_recipe", "fp8_param_gather", "fp4", "fp4_recipe", "fp4_param_gather", "first_last_layers_bf16",
    "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16", "num_layers", "transformer_impl", "fp8_output_proj",
    "use_transformer_engine_op_fuser", "te_precision_config_file",
)  # fmt: skip


# --- In the training loop --------------------------------------------------------------------------------------------


def install(loop: str = "megatron.training.training", asked: Callable[[], Any] | None = None) -> None:
    """Watch the first `train_step` of this process, and the one to profile. Never raises.

    `loop` is the module whose `train_step` the training loop calls by name. `asked` returns an object with what was
    asked for as attributes, by Megatron's names; None for Megatron's own arguments.
    """
    try:
        wanted = os.environ.get("FP8LAUNCH_PROBE", "1") != "0"
        profiled = int(os.environ.get("FP8LAUNCH_PROFILE_ITERATION") or 0)
        if wanted or profiled:
            _Watch(importlib.import_module(loop), asked or _megatron_arguments, wanted, profiled)
    except Exception as problem:
        _tell(problem)


def _megatron_arguments() -> Any:
    return importlib.import_module("megatron.training").get_args()


class _Watch:
    """In place of Megatron's `train_step`, looked up by name at each iteration, until there is nothing more to see."""

    def __init__(self, training: Any, asked: Callable[[], Any], wanted: bool, profiled: int) -> None:
        self._training, self._step, self._asked = training, training.train_step, asked
        self._wanted, self._profiled = wanted, profiled
        training.train_step = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        number = None
        if isinstance(kwargs.get("iteration"), int):
            number = kwargs["iteration"] + 1
        profile = None
        if number is not None and number == self._profiled:
            profile = self._start_profile()
        result = self._step(*args, **kwargs)
        if profile is not None:
            _safely(lambda: _say(KERNELS, {"v": VERSION, "rank": 0, "iteration": number, **profile.stop()}))
        if self._wanted:
            self._wanted = False
            model = kwargs["model"] if "model" in kwargs else args[2]
            _safely(lambda: _probe_and_say(model, number, self._asked))
        if not self._wanted and (number is None or number >= self._profiled):
            self._training.train_step = self._step
        return result

    def _start_profile(self) -> Any:
        """A running profile on rank 0; None elsewhere, and where it cannot be."""
        if int(os.environ.get("RANK", "0")) != 0:
            return None
        try:
            from fp8launch.injob.rank.profile_once import Profile

            profile = Profile()
            profile.start()
            return profile
        except Exception as problem:
            _tell(problem)
            return None


def _probe_and_say(model: Any, iteration: int | None, arguments: Callable[[], Any]) -> None:
    began = time.perf_counter()
    place = _place()
    if place is None:
        return
    args = arguments()
    asked = {name: plain(getattr(args, name)) for name in _ASKED if hasattr(args, name)}
    found = probe(chunks_of(model), asked)
    record = {"v": VERSION, **place, "iteration": iteration, "asked": asked, "software": _software()}
    _say(PROBE, {**record, "ms": round((time.perf_counter() - began) * 1e3, 2), **found})


def _place() -> dict[str, Any] | None:
    """This rank's place in the model-parallel grid; None for all but one of the data-parallel ranks there."""
    rank = int(os.environ.get("RANK", "0"))
    try:
        state = importlib.import_module("megatron.core.parallel_state")
        if state.get_data_parallel_rank(with_context_parallel=True) != 0:
            return None
        tp, pp = state.get_tensor_model_parallel_rank(), state.get_pipeline_model_parallel_rank()
        return {"rank": rank, "tp": tp, "pp": pp}
    except Exception:  # A process-group set-up of another kind: one rank speaks for all.
        if rank != 0:
            return None
        return {"rank": rank, "tp": None, "pp": None}


def _software() -> dict[str, Any]:
    torch = sys.modules.get("torch")
    engine = sys.modules.get("transformer_engine")
    versions = {
        "torch": getattr(torch, "__version__", None),
        "transformer_engine": getattr(engine, "__version__", None),
    }
    try:
        return {**versions, "gpu": torch.cuda.get_device_name()}  # type: ignore[union-attr]
    except Exception:
        return versions


def _say(marker: str, record: Mapping[str, Any]) -> None:
    """One line in one write, so that other ranks' lines do not come in between."""
    sys.stdout.write(f"{marker}{json.dumps(record, separators=(',', ':'), default=str)}\n")
    sys.stdout.flush()


def _safely(action: Callable[[], None]) -> None:
    try:
        action()
    except Exception as problem:
        _tell(problem)


def _tell(problem: Exception) -> None:
    reasons = str(problem).strip().splitlines() or [""]
    print(
        f"fp8launch: the FP8 probe failed, training goes on: {type(problem).__name__}: {reasons[0]}",
        file=sys.stderr,
        flush=True,
    )

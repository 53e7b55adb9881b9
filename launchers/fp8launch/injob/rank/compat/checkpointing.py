"""Fixes for Megatron's checkpointing: the scale of FP8 weights when loading, the writers' queue when saving."""
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

import functools
import importlib
import pickle
from dataclasses import dataclass
from typing import Any

PACKAGE = "megatron.core.dist_checkpointing"


def load_weights_with_their_scale() -> None:
    """Have Megatron convert FP8 weights of delayed scaling to bf16 before it loads a checkpoint.

    From 0.19 on, Megatron writes a weight of a torch_dist checkpoint into the FP8 parameter as soon as it is read
    (`stream_ckpt_dequant` in strategies/torch.py). With delayed scaling the scale is part of the module's extra state,
    which is loaded later, so the weight is quantized with the initial scale of 1. Weights of 0.02 then have one or two
    significant digits until the next optimizer step: on an H100 the first loss after a resume was 6.2660 instead of
    6.2537. As bf16 tensors, as in 0.17 and 0.18, weights are quantized after the scale is known.

    A second call does nothing.
    """
    package: Any = importlib.import_module(PACKAGE)
    strategies: Any = importlib.import_module(f"{PACKAGE}.strategies.torch")
    serialization: Any = importlib.import_module(f"{PACKAGE}.serialization")
    load = serialization.load
    streams = "stream_ckpt_dequant" in strategies.TorchDistLoadShardedStrategy.__init__.__code__.co_varnames
    if not streams or load.__module__ == __name__:
        return

    @functools.wraps(load, assigned=("__doc__", "__name__"))
    def load_with_scales(sharded_state_dict: Any, *arguments: Any, **named: Any) -> Any:
        convert_delayed_weights(sharded_state_dict)
        return load(sharded_state_dict, *arguments, **named)

    serialization.load = package.load = load_with_scales


def convert_delayed_weights(sharded_state_dict: Any) -> None:
    """Replace FP8 tensors of delayed scaling in a sharded state dict by bf16 tensors, in place."""
    dict_utils: Any = importlib.import_module(f"{PACKAGE}.dict_utils")
    for entry in dict_utils.nested_values(sharded_state_dict):
        tensor: Any = getattr(entry, "data", None)
        # A quantizer of delayed scaling holds its scale in a tensor; other quantizers compute a scale for each tensor.
        if hasattr(getattr(tensor, "_quantizer", None), "scale") and hasattr(tensor, "dequantize"):
            entry.data = tensor.dequantize()


@dataclass(frozen=True)
class PickledQueue:
    """The queue methods that Megatron uses, on top of a queue that only carries bytes."""

    queue: Any

    def put(self, item: Any) -> None:
        self.queue.put(pickle.dumps(item))

    def get_nowait(self) -> Any:
        return pickle.loads(self.queue.get_nowait())


def report_saves_in_bytes() -> None:
    """Have the writers of a checkpoint report to their rank in bytes. A second call does nothing.

    At its first save each rank starts a process that serves the queue of these reports. If that process unpickles them,
    it imports torch, which takes 2.6 s of processor time per rank on a CPU, while the save waits.
    """
    module: Any = importlib.import_module(f"{PACKAGE}.strategies.filesystem_async")
    original = getattr(module, "get_write_results_queue", None)
    if original is None or original.__module__ == __name__:
        return

    def get_write_results_queue(*args: Any, **kwargs: Any) -> PickledQueue:
        return PickledQueue(original(*args, **kwargs))

    module.get_write_results_queue = get_write_results_queue

"""Loading FP8 weights of delayed scaling with the scale that they were saved with.

From 0.19 on, Megatron writes a weight of a torch_dist checkpoint into the FP8 parameter as soon as it is read
(`stream_ckpt_dequant`, megatron/core/dist_checkpointing/strategies/torch.py). With delayed scaling the scale is part of
the module's extra state, which is loaded later, so the weight is quantized with the initial scale of 1. Weights of 0.02
then have one or two significant digits until the next optimizer step: on an H100 the first loss after a resume was
6.2660 instead of 6.2537. Converted to bf16 first, as in 0.17 and 0.18, weights are quantized after the scale is known.
"""
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

import functools
import importlib
from typing import Any

PACKAGE = "megatron.core.dist_checkpointing"


def install() -> None:
    """Have Megatron convert FP8 weights of delayed scaling to bf16 before it loads a checkpoint. Twice is once."""
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
        # A quantizer of delayed scaling has the scale as a tensor; others compute one for each tensor.
        if hasattr(getattr(tensor, "_quantizer", None), "scale") and hasattr(tensor, "dequantize"):
            entry.data = tensor.dequantize()

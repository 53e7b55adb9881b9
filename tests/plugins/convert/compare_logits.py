"""Compare the forward passes of a Hugging Face model and Megatron's model on the CPU: `... -- MODEL CHECKPOINT DTYPE`.

Prints the largest difference of two logits, and the largest logit.
"""
# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import importlib
import sys
from typing import Any

from fp8launch.injob.rank import worker
from fp8launch.plugins.bridge.injob import bridge
from fp8launch.plugins.convert.injob import convert
from fp8launch.plugins.convert.injob import model as convert_model

LENGTH = 32


def main() -> None:
    _, model_name, checkpoint, dtype_name = sys.argv[1:]
    worker.prepare(worker.begin())
    modules = ("megatron.bridge.models.conversion.auto_bridge", "megatron.bridge.training.checkpointing")
    bridge.import_modules(modules)
    import torch

    transformers: Any = importlib.import_module("transformers")
    source = convert_model.open_model(model_name, with_weights=False)
    dtype = convert_model.dtype_of(source, dtype_name)
    ours = convert.arguments(["megatron-to-hf", "--model", model_name, "--out", "nowhere"])
    provider = convert_model.provider_of(source, ours, dtype, load=False)
    with convert_model.without_gpu(provider):
        model = convert_model.build(provider, "cpu")
        importlib.import_module(modules[1])._load_model_weights_from_checkpoint(checkpoint, model)
        ids = torch.arange(LENGTH).view(1, -1) * 7 % 512
        future = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
        with torch.no_grad():
            mine = model[0].eval()(ids, torch.arange(LENGTH).view(1, -1), future).float()
    reference = transformers.AutoModelForCausalLM.from_pretrained(model_name, dtype=dtype).eval()
    with torch.no_grad():
        theirs = reference(ids).logits.float()
    print("logits", (theirs - mine).abs().max().item(), theirs.abs().max().item(), flush=True)

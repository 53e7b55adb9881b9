"""A history of GPU memory over a range of iterations, by PyTorch's allocator.

From the model's construction to the range, the allocator keeps the stack of each live allocation, so weights and
optimizer states at the peak have an origin. Within the range it keeps all events. Files in the folder `profile`:
`rank<N>_<first>-<last>.memory.pickle`, which https://pytorch.org/memory_viz shows, and `.memory.json`, the record that
is also a line of the log, `fp8launch-profile: {json}`.
"""
# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import json
import os
import pickle
import time
from typing import Any

import torch

from fp8launch.injob.rank.module_facts import chunks_of
from fp8launch.injob.rank.training_loop import attempt, say
from fp8launch.plugins.measure.injob import memory_summary
from fp8launch.plugins.measure.injob.memory_summary import Mark
from fp8launch.plugins.measure.injob.request import SAID, Request

# About 100 MB of host memory, and of the file.
MOST_EVENTS = 200_000


class MemoryProfile:
    """Raises RuntimeError for a run without a GPU."""

    def __init__(self, request: Request) -> None:
        if os.environ.get("FP8LAUNCH_DEVICE") == "cpu":
            raise RuntimeError("the tool memory records a GPU's memory, and this run has no GPU")
        self._request = request
        self._marks: list[Mark] = []
        self._iteration = 0
        self._hooks: list[Any] = []
        # The allocator exists once CUDA is initialized, on the device that Megatron selects, too.
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.init()
        # "python" leaves out C++ frames, which take milliseconds to resolve.
        torch.cuda.memory._record_memory_history("state", stacks="python")

    def begin(self, model: Any) -> None:
        for chunk in chunks_of(model):
            for module in chunk.modules():
                number = getattr(module, "layer_number", None)
                if isinstance(number, int) and type(module).__name__.endswith("Layer"):
                    self._hooks.append(module.register_forward_pre_hook(self._mark_of(number)))
        torch.cuda.memory._record_memory_history("all", context="alloc", stacks="python", max_entries=MOST_EVENTS)

    def before_step(self, iteration: int) -> None:
        self._iteration = iteration
        self._mark(None)

    def end(self, first: int) -> None:
        try:
            snapshot = torch.cuda.memory._snapshot()
        finally:
            torch.cuda.memory._record_memory_history(None)
            for hook in self._hooks:
                hook.remove()
        found = memory_summary.summary(snapshot, torch.cuda.current_device(), self._marks, MOST_EVENTS)
        record = {**self._request.record(first), **found}
        record["file"] = attempt("the memory snapshot", lambda: self._write(snapshot))
        self._request.file(".memory.json").write_text(json.dumps(record, indent=1) + "\n")
        say(SAID, record)

    def _mark_of(self, layer: int) -> Any:
        def before_forward(module: Any, inputs: Any) -> None:
            self._mark(layer)

        return before_forward

    def _mark(self, layer: int | None) -> None:
        self._marks.append(Mark(time.time_ns() // 1000, self._iteration, layer))

    def _write(self, snapshot: Any) -> str:
        file = self._request.file(".memory.pickle")
        with file.open("wb") as out:
            pickle.dump(snapshot, out)
        return str(file)

"""The queue through which the writers of a checkpoint report to their rank, without another torch.

Each rank starts a process that serves it, at its first save. That process unpickled every report and imported torch for
that: on a CPU 2.6 s of processor time for a rank, in which the save waited. Here it only ever sees bytes.
"""
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

import importlib
import pickle
from dataclasses import dataclass
from typing import Any

MODULE = "megatron.core.dist_checkpointing.strategies.filesystem_async"


@dataclass(frozen=True)
class PickledQueue:
    """What Megatron uses of a queue, over one that passes bytes on."""

    queue: Any

    def put(self, item: Any) -> None:
        self.queue.put(pickle.dumps(item))

    def get_nowait(self) -> Any:
        return pickle.loads(self.queue.get_nowait())


def install() -> None:
    """Have Megatron's writers report in bytes. Twice is once."""
    module: Any = importlib.import_module(MODULE)
    original = getattr(module, "get_write_results_queue", None)
    if original is None or original.__module__ == __name__:
        return

    def get_write_results_queue(*args: Any, **kwargs: Any) -> PickledQueue:
        return PickledQueue(original(*args, **kwargs))

    module.get_write_results_queue = get_write_results_queue

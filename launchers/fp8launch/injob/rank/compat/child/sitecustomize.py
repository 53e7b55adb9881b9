"""Loaded by Python at the start of a process that a CPU training process started afresh; see cpu.py."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

CODE = str(Path(__file__).resolve().parents[5])


class _BeforeMegatron(importlib.abc.MetaPathFinder):
    """Installs CPU mode when Megatron is about to be imported, then steps aside."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name == "megatron.core":
            sys.meta_path.remove(self)
            if CODE not in sys.path:
                sys.path.insert(0, CODE)
            importlib.import_module("fp8launch.injob.rank.compat.python311").install()
            importlib.import_module("fp8launch.injob.rank.compat.cpu").install()
        return None


# worker.py prepares itself; it is only the processes below it that come here with nothing installed.
if os.environ.get("FP8LAUNCH_DEVICE") == "cpu":
    sys.meta_path.insert(0, _BeforeMegatron())

"""The Megatron-Bridge that this Python would import."""

from __future__ import annotations

import importlib.util
import os
import runpy
from pathlib import Path


def installed() -> tuple[Path, str] | None:
    """The folder of the package `megatron.bridge` and its release ("" where it states none); None without it."""
    if importlib.util.find_spec("megatron") is None:
        return None
    found = importlib.util.find_spec("megatron.bridge")
    if found is None or found.origin is None:
        return None
    os.environ.setdefault("NO_VCS_VERSION", "1")  # else its version module calls git
    folder = Path(found.origin).parent
    info = folder / "package_info.py"
    if not info.is_file():
        return folder, ""
    return folder, str(runpy.run_path(str(info))["__version__"]).split("+")[0]

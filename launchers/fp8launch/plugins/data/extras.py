"""Import packages of the extras `fp8launch[data]` and `fp8launch[chat]` when they are needed."""

from __future__ import annotations

import importlib
from typing import Any

from fp8launch.diagnostics import MACHINE_LACKS, error

INSTALL = "pip install 'fp8launch[data]'"


def load(module: str, purpose: str, install: str = INSTALL) -> Any:
    """Import a module of an extra. Raises UserError (exit code 3) that names the package and the feature."""
    try:
        return importlib.import_module(module)
    except ImportError as exc:
        package = module.partition(".")[0]
        message = f"{purpose} needs the Python package {package}, which cannot be imported here: {exc}"
        raise error("data-extra-missing", message, package, install, MACHINE_LACKS) from None

"""Import packages of the extra `fp8launch[data]` when they are needed."""

from __future__ import annotations

import importlib
from typing import Any

from fp8launch.diagnostics import MACHINE_LACKS, error

INSTALL = "pip install 'fp8launch[data]'"


def load(module: str, purpose: str) -> Any:
    """Import a module of the extra. Raises UserError (exit code 3) that names the package and the feature."""
    try:
        return importlib.import_module(module)
    except ImportError as exc:
        package = module.partition(".")[0]
        message = f"{purpose} needs the Python package {package}, which cannot be imported here: {exc}"
        raise error("data-extra-missing", message, package, INSTALL, MACHINE_LACKS) from None

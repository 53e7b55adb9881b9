"""Where the package of Megatron-Bridge is in what a tool was given."""

from __future__ import annotations

from pathlib import Path


def source_folder(checkout: Path) -> Path:
    """Return the folder to put on `sys.path`: `src` of a source checkout, or an unpacked wheel itself."""
    if (checkout / "src").is_dir():
        return checkout / "src"
    return checkout

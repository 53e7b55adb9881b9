"""Where the suite's Megatron-Core of each minor version lies."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from fp8launch.megatron.schema import supported_versions

REPOSITORY = Path(__file__).resolve().parents[1]
UNPACKED = Path(os.environ.get("FP8LAUNCH_TEST_MEGATRON") or REPOSITORY / ".cache" / "megatron")


def megatron_site(minor: str) -> Path:
    """Where the suite's Megatron-Core of this minor version lies; skips the test if it was not installed."""
    unpacked = [folder for folder in UNPACKED.glob(f"{minor}.*") if (folder / "megatron").is_dir()]
    installed = [folder for folder in map(Path, sys.path) if any(folder.glob(f"megatron_core-{minor}.*.dist-info"))]
    for site in (*unpacked, *installed):
        return site
    pytest.skip(f"no megatron-core {minor} in FP8LAUNCH_TEST_MEGATRON, in .cache/megatron or installed")


@pytest.fixture(params=supported_versions(), scope="session")
def minor(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def site(minor: str) -> Path:
    return megatron_site(minor)

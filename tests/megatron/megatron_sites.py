"""Where the suite's Megatron-Core of each minor version lies."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fp8launch.diagnostics import UserError
from fp8launch.megatron.schema import supported_versions
from fp8launch.plugins.validators import megatron_core

REPOSITORY = Path(__file__).resolve().parents[2]


def megatron_site(minor: str) -> Path:
    """Where the suite's Megatron-Core of this minor version lies; skips the test if it was not installed."""
    for place in (os.environ.get("FP8LAUNCH_TEST_MEGATRON"), REPOSITORY / ".cache" / "megatron"):
        try:
            found = place and megatron_core.find_megatron(minor, Path(place))
        except UserError:
            continue
        if found and Path(found).is_dir():
            return Path(found)
    installed = next(megatron_core._installed(), None)
    if installed and (megatron_core.megatron_version(installed) or "").startswith(f"{minor}."):
        return installed
    pytest.skip(f"no megatron-core {minor} in FP8LAUNCH_TEST_MEGATRON, in .cache/megatron or installed")


@pytest.fixture(params=supported_versions(), scope="session")
def minor(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def site(minor: str) -> Path:
    return megatron_site(minor)

"""Runs and releases of Megatron-Core that tests of the core use as well."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[2]
sys.path += [str(TESTS / "check"), str(TESTS / "megatron")]

from megatron_sites import minor as minor  # noqa: E402
from megatron_sites import site as site  # noqa: E402


@pytest.fixture(scope="session", autouse=True)
def megatron() -> None:
    unpacked = os.environ.get("FP8LAUNCH_TEST_MEGATRON") or TESTS.parent / ".cache" / "megatron"
    if "FP8LAUNCH_MEGATRON" not in os.environ and Path(unpacked).is_dir():
        os.environ["FP8LAUNCH_MEGATRON"] = str(unpacked)

"""Runs of the core's rules, and the releases of Megatron-Core that the suite has."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from megatron_parser import real_parser as real_parser
from megatron_sites import UNPACKED
from megatron_sites import minor as minor
from megatron_sites import site as site

TESTS = Path(__file__).parents[2]
sys.path.append(str(TESTS / "check"))  # bad_sets


@pytest.fixture(scope="session", autouse=True)
def megatron() -> None:
    if "FP8LAUNCH_MEGATRON" not in os.environ and UNPACKED.is_dir():
        os.environ["FP8LAUNCH_MEGATRON"] = str(UNPACKED)

"""Real Megatron-Core of every supported version, for tests that read its code."""

from __future__ import annotations

from megatron_sites import minor as minor
from megatron_sites import site as site

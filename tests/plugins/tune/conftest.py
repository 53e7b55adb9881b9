"""A scheduler in memory, for sessions that are cut off."""

from __future__ import annotations

from launcher_site import in_memory as in_memory
from launcher_site import memory as memory

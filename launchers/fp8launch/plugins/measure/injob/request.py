"""The profile that the environment requests, and where its files go.

FP8LAUNCH_PROFILE={"tool": "torch", "start": 6, "end": 8, "ranks": [0]}   iterations 6 to 8 on rank 0

Python's standard library only: a rank reads this before it imports torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "FP8LAUNCH_PROFILE"
# In the current folder of a rank, which is the run folder.
FOLDER = Path("profile")
SAID = "fp8launch-profile: "


@dataclass(frozen=True)
class Request:
    """A profile of iterations `start` to `end`, both included, on this rank."""

    tool: str
    start: int
    end: int
    rank: int

    def file(self, suffix: str) -> Path:
        """Return the path of a file with results, in the folder `profile`, which is made if it is missing."""
        FOLDER.mkdir(exist_ok=True)
        return FOLDER / f"rank{self.rank}_{self.start}-{self.end}{suffix}"

    def record(self, first: int) -> dict[str, object]:
        """Return the beginning of a record. A start from a checkpoint may have missed the first iterations."""
        return {"v": 1, "tool": self.tool, "rank": self.rank, "iteration": first, "last_iteration": self.end}


def requested(environment: Mapping[str, str] = os.environ) -> Request | None:
    """Return the request for this rank, or None."""
    text = environment.get(VARIABLE)
    if not text:
        return None
    stated = json.loads(text)
    rank = int(environment.get("RANK", "0"))
    if rank not in stated["ranks"]:
        return None
    return Request(stated["tool"], stated["start"], stated["end"], rank)

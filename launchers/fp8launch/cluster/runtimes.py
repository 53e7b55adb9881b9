"""Container runtimes, by the names of recipes, profiles and commands."""

from __future__ import annotations

from typing import Literal

Runtime = Literal["pyxis", "apptainer", "charliecloud", "none"]

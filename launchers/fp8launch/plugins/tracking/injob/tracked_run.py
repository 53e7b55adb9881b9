"""What trackers call a run, and what they show about it, from the manifest in its folder."""
# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Union

from fp8launch.injob.regular_files import read_regular
from fp8launch.injob.supervisor.run_records import MANIFEST

# Not with bars: the host's Python may be older than 3.10.
Scalar = Union[float, int, str, bool]  # noqa: UP007
DEFAULT_PROJECT = "fp8launch"
# W&B accepts ids of at most 64 characters.
_LONGEST_ID = 64
_LARGEST_MANIFEST = 16 << 20


@dataclass(frozen=True)
class TrackedRun:
    """A run in a tracker. `group` is its study, `config` the settings that people compare."""

    name: str
    group: str | None
    config: dict[str, Scalar]

    @property
    def id(self) -> str:
        """The id of the run in every tracker, which all its attempts and `export` share.

        Runs of two studies may have the same name.
        """
        text = file_name(self.name if self.group is None else f"{self.group}.{self.name}")
        if len(text) <= _LONGEST_ID:
            return text
        return f"{text[:47]}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"

    @property
    def project(self) -> str:
        """The project of a run whose recipe names none."""
        return file_name(self.group or DEFAULT_PROJECT)


def tracked_run(folder: Path) -> TrackedRun:
    """Return the run of a folder. Raises OSError or ValueError if its manifest cannot be read."""
    manifest: dict[str, Any] = json.loads(read_regular(folder / MANIFEST, _LARGEST_MANIFEST).decode())
    recipe, study = manifest["recipe"], manifest.get("study") or {}
    facts: dict[str, Any] = dict(manifest.get("arguments") or {})
    facts["recipe"] = manifest.get("name")
    facts["precision"] = (recipe.get("precision") or {}).get("recipe")
    facts["gpu"] = manifest.get("gpu")
    facts["nodes"] = (recipe.get("resources") or {}).get("nodes")
    facts["world_size"] = (manifest.get("layout") or {}).get("world")
    facts["image"] = (manifest.get("image") or {}).get("image")
    facts["commit"] = (manifest.get("git") or {}).get("commit")
    facts["fp8launch"] = (manifest.get("versions") or {}).get("fp8launch")
    for key, value in (study.get("point") or {}).items():
        facts[f"axis {key}"] = value
    if study:
        facts["repeat"] = study.get("repeat")
    config = {text(name): scalar(value) for name, value in facts.items() if value is not None}
    return TrackedRun(text(folder.name), text(study["name"]) if study else None, config)


def file_name(name: str) -> str:
    """Turn a name from a manifest into the name of one file or folder: never `..`, never a path."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", name[:200]).lstrip(".") or "_"


def scalar(value: object) -> Scalar:
    """Return a value that every tracker accepts: a number of at most 64 bits, or text in UTF-8."""
    if isinstance(value, (bool, float)) or (isinstance(value, int) and abs(value) < 1 << 63):
        return value
    return text(str(value))


def text(words: str) -> str:
    return words.encode("utf-8", "replace").decode()
